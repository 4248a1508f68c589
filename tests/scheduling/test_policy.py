"""Policies by name: the project's, and those of installed packages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
from pydantic import Field

from sluice.scheduling.policy import PolicyOptions, Registry
from tests.documents import ROOT, marked

_PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "our-policies"
version = "1"

[tool.setuptools]
py-modules = ["our_policies"]

"""


class Options(PolicyOptions):
    patience_s: float = Field(default=1.0, gt=0)


class First:
    name = "first"
    source = "a test"
    Options = Options

    def __init__(self, options: PolicyOptions | None = None) -> None:
        self.options = options


OWN: Registry[First] = Registry("testing", First, (First,))


def test_a_policy_is_made_by_name_with_its_options() -> None:
    made = OWN.make("first", {"patience_s": 2})
    assert made.options == Options(patience_s=2)
    assert list(OWN) == ["first"]
    with pytest.raises(ValueError, match="unknown testing policy 'last'; known: first"):
        OWN.make("last")
    with pytest.raises(ValueError, match="patience_s"):
        OWN.make("first", {"patience_s": 0})


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import missing_module", "cannot be imported: .*missing_module"),
        ("Second = 3", "must be a subclass of First"),
        ("class Second: name = 'second'", "must be a subclass of First"),
        (
            "from tests.scheduling.test_policy import First\nclass Second(First): name = 'other'",
            "must have that name",
        ),
    ],
)
def test_an_error_in_an_installed_policy_is_raised_where_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, message: str
) -> None:
    module = f"offered_{abs(hash(code))}"
    (tmp_path / f"{module}.py").write_text(code)
    _offer(tmp_path, f"second = {module}:Second")
    monkeypatch.syspath_prepend(str(tmp_path))
    registry: Registry[First] = Registry("testing", First, (First,))
    # Names are known, and the others work, without it.
    assert list(registry) == ["first", "second"]
    registry.make("first")
    with pytest.raises(ValueError, match=f"testing policy 'second' of offering .*{message}"):
        registry.make("second")


def test_no_package_takes_the_name_of_another_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _offer(tmp_path, "first = other:First")
    monkeypatch.syspath_prepend(str(tmp_path))
    registry: Registry[First] = Registry("testing", First, (First,))
    registry.make("first")
    with pytest.raises(ValueError, match="'first' of offering has the name of one of Sluice"):
        list(registry)


def test_the_documents_package_brings_a_policy_along(tmp_path: Path) -> None:
    """It is built and installed as pip does it, then chosen by name."""
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    (code,) = marked(ROOT / "CONTRIBUTING.md", "run: policy")
    (offer,) = marked(ROOT / "CONTRIBUTING.md", "check: entry point")
    (source / "our_policies.py").write_text(code)
    (source / "pyproject.toml").write_text(_PROJECT + offer)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    _run([*pip, "--no-index", "--target", str(target), str(source)], target)
    listed = json.loads(
        _run(
            [
                sys.executable,
                "-c",
                "from sluice.deploy.cli import main; main()",
                "policies",
                "--json",
            ],
            target,
        )
    )
    assert ("batch", "priority_first") in {(each["kind"], each["name"]) for each in listed}
    made = dedent("""
        from sluice.replica.config import EngineConfig
        from sluice.scheduling.batching import make_policy
        print(type(make_policy(EngineConfig(policy="priority_first").policy)).__module__)
    """)
    assert _run([sys.executable, "-c", made], target).strip() == "our_policies"


def _run(command: list[str], target: Path) -> str:
    """What ``command`` prints, where what is in ``target`` is installed, too."""
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(target)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _offer(folder: Path, entry: str) -> None:
    """Have an installed package ``offering`` in ``folder`` offer this policy."""
    about = folder / "offering-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: offering\nVersion: 1\n")
    (about / "entry_points.txt").write_text(f"[sluice.testing]\n{entry}\n")
