"""The folder in which ``sluice serve`` keeps files and batches by default."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.deploy.commands.serve import with_batches_folder
from sluice.deploy.config import SluiceConfig, parse_config


def test_it_is_private_and_found_again_on_the_same_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    config = parse_config({"router": {"port": 8123}})
    folder = tmp_path / "state" / "sluice" / "batches" / "8123"
    for _ in range(2):
        assert with_batches_folder(config).router.batches.directory == folder
    assert [each.stat().st_mode & 0o777 for each in (folder, *folder.parents[:2])] == [0o700] * 3


def test_what_is_configured_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    own = parse_config({"router": {"batches": {"directory": str(tmp_path / "own")}}})
    without_class = parse_config({"router": {"classes": {"chat": {}}, "default_class": "chat"}})
    for config in (own, without_class):
        assert with_batches_folder(config) == config
    assert list(tmp_path.iterdir()) == []


def test_without_a_place_to_keep_them_they_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/no-such-folder")
    assert with_batches_folder(SluiceConfig()) == SluiceConfig()
