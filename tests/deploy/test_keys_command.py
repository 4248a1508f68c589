"""``sluice keys``: what it prints is what routers accept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from sluice.deploy.cli import main
from sluice.deploy.commands.options import Exit
from sluice.router.tenancy.auth import KeyRing


def accepts(path: Path, key: str) -> str:
    client = KeyRing([], path).check([(b"authorization", b"Bearer " + key.encode())])
    return client.name


def test_a_new_key_opens_with_the_entry_that_came_with_it(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    made = [CliRunner().invoke(main, ["keys", "new", "--name", name]) for name in ("a", "b")]
    path.write_text("".join(result.stderr for result in made))
    keys = [result.stdout.strip() for result in made]
    assert [accepts(path, key) for key in keys] == ["a", "b"]
    assert len(set(keys)) == 2 and min(map(len, keys)) > 40
    assert not any(key in path.read_text() for key in keys)
    checked = CliRunner().invoke(main, ["keys", "check", str(path), "--json"])
    assert json.loads(checked.stdout) == {"valid": True, "accepted": 2, "problem": None}


def test_the_digest_of_a_key_from_standard_input(tmp_path: Path) -> None:
    path, key = tmp_path / "keys.yaml", "a-key-of-more-than-20-characters"
    for line in (key, f"{key}\n", f"{key}\r\nsomething else"):
        result = CliRunner().invoke(main, ["keys", "hash", "--name", "acme"], input=line)
        assert result.exit_code == 0, result.output
        assert key not in result.output
        path.write_text(result.stdout)
        assert accepts(path, key) == "acme"


@pytest.mark.parametrize(
    ("line", "options", "says"),
    [
        ("", [], "not empty"),
        ("two words", [], "without spaces"),
        ("clé", [], "printable ASCII"),
        ("****", [], "asterisks"),
        ("good-key", ["--name", "two words"], "must match"),
        ("good-key", ["--name", "unnamed"], "must match"),
    ],
)
def test_what_is_no_key_has_no_digest(line: str, options: list[str], says: str) -> None:
    result = CliRunner().invoke(main, ["keys", "hash", *options], input=line)
    assert result.exit_code != 0
    assert says in result.stderr
    assert result.stdout == ""
    assert "good-key" not in result.output


def test_a_short_key_is_warned_of() -> None:
    result = CliRunner().invoke(main, ["keys", "hash"], input="short")
    assert result.exit_code == 0
    assert "this key is short" in result.stderr


def test_a_wrong_file_is_told_with_an_exit_code(tmp_path: Path) -> None:
    path, config = tmp_path / "keys.yaml", tmp_path / "sluice.yaml"
    path.write_text("- {key: s3cret-s3cret-s3cret, limits: {classes: [gold]}}\n")
    result = CliRunner().invoke(main, ["keys", "check", str(path)])
    assert result.exit_code == Exit.FAILED
    assert "['gold']" in result.stderr and "s3cret" not in result.output
    config.write_text("router: {default_class: gold, classes: {gold: {}}}\n")
    result = CliRunner().invoke(main, ["keys", "check", str(path), "--config", str(config)])
    assert result.exit_code == 0, result.output
    assert "valid, 1 keys are accepted" in result.stdout
    result = CliRunner().invoke(main, ["keys", "check", str(path), "--opens", "admin"])
    assert result.exit_code == Exit.FAILED
    assert "may have only key or sha256, and name" in result.stderr
    path.write_text("- {key: s3cret-s3cret-s3cret, name: me}\n")
    result = CliRunner().invoke(main, ["keys", "check", str(path), "--opens", "admin"])
    assert result.exit_code == 0, result.output
