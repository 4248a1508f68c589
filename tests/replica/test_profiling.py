"""Latency profiles on disk: kept, found again, and refused when they are not what they claim."""

from __future__ import annotations

import logging

import pytest

from sluice.replica.profiling import profile_path, read_profile, write_profile
from sluice.scheduling.latency.model import LinearLatency
from sluice.scheduling.latency.profile import FitReport, LatencyProfile

PROFILE = LatencyProfile.of(
    "key", LinearLatency(0.004, 0.0002, 1e-6), FitReport(50, 5, 0.03, 0.07, 0.99)
)


def test_a_profile_is_kept_and_found(tmp_path):
    path = profile_path(tmp_path, "key")
    assert read_profile(path, "key") is None
    write_profile(path, PROFILE)
    assert read_profile(path, "key") == PROFILE
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_kept_profile_can_be_read_by_others(tmp_path):
    path = profile_path(tmp_path, "key")
    write_profile(path, PROFILE)
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_profile_that_cannot_be_kept_leaves_nothing_behind(tmp_path, caplog):
    path = profile_path(tmp_path, "key")
    path.mkdir(parents=True)  # in the way of the file
    write_profile(path, PROFILE)
    assert "cannot save the latency profile" in caplog.text
    assert list(path.parent.iterdir()) == [path]


def test_keys_have_their_own_files(tmp_path):
    assert profile_path(tmp_path, "key") != profile_path(tmp_path, "other")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"key": "key", "a": -1, "b": 0, "c": 0, "d": 0}'])
def test_a_corrupt_profile_is_refused_with_a_reason_and_replaced(tmp_path, caplog, text):
    path = profile_path(tmp_path, "key")
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with caplog.at_level(logging.WARNING):
        assert read_profile(path, "key") is None
    assert "replacing the invalid latency profile" in caplog.text
    write_profile(path, PROFILE)
    assert read_profile(path, "key") == PROFILE


def test_a_profile_cut_off_or_garbled_anywhere_is_read_as_none_or_as_one(tmp_path):
    path = profile_path(tmp_path, "key")
    write_profile(path, PROFILE)
    whole = path.read_bytes()
    for place in range(len(whole)):
        for damaged in (whole[:place], whole[:place] + b"\0\xff" + whole[place + 2 :]):
            path.write_bytes(damaged)
            read = read_profile(path, "key")
            # Only what stands in for a space is not noticed.
            assert read is None or read == PROFILE


def test_a_write_that_is_broken_off_leaves_the_old_one(tmp_path, monkeypatch):
    path = profile_path(tmp_path, "key")
    write_profile(path, PROFILE)

    def crash(_handle):
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", crash)
    with pytest.raises(KeyboardInterrupt):
        write_profile(path, LatencyProfile.of("key", LinearLatency(1.0, 1.0, 1.0)))
    assert read_profile(path, "key") == PROFILE
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_profile_of_something_else_is_not_used(tmp_path, caplog):
    path = profile_path(tmp_path, "other")
    write_profile(path, PROFILE)
    assert read_profile(path, "other") is None
    assert "for another configuration" in caplog.text


def test_a_directory_that_cannot_be_written_is_no_failure(tmp_path, caplog):
    (tmp_path / "profiles").write_text("a file")
    write_profile(profile_path(tmp_path, "key"), PROFILE)
    assert "cannot save the latency profile" in caplog.text
