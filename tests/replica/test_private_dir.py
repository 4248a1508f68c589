"""Private folders: those that killed processes leave are removed, those in use never."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from sluice.replica.private_dir import LOCK, make_private_dir, private_dir

_OTHER = """
import pathlib, sys
from sluice.replica.private_dir import make_private_dir
made = make_private_dir(pathlib.Path(sys.argv[1]))
(made / "ray" / "sockets").mkdir(parents=True)
(made / "ray" / "sockets" / "raylet").write_text("x")
print(made, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other(tmp_path):
    """Another process with a folder in ``tmp_path``."""
    process = subprocess.Popen(
        [sys.executable, "-c", _OTHER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    folder = Path(process.stdout.readline().strip())
    yield process, folder
    process.kill()
    process.communicate()


def test_a_folder_is_for_this_user_alone_and_goes_at_the_end(tmp_path):
    with private_dir(tmp_path) as folder:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        (folder / "state").write_bytes(b"x")
    assert not folder.exists()


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_has_is_not(tmp_path, other):
    process, folder = other
    with private_dir(tmp_path):
        assert (folder / "ray" / "sockets" / "raylet").exists()
    process.send_signal(signal.SIGSTOP)  # a frozen process has not died
    make_private_dir(tmp_path)
    assert folder.exists()
    process.send_signal(signal.SIGKILL)
    process.wait()
    # What it had started lives, and is found by the folder.
    child = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()", folder], stdin=subprocess.PIPE
    )
    make_private_dir(tmp_path)
    assert folder.exists()
    child.communicate()
    own = make_private_dir(tmp_path)
    assert not folder.exists()
    make_private_dir(tmp_path)
    assert own.exists()


def test_other_folders_with_a_lock_file_are_not_touched(tmp_path):
    # Files and batches may lie beside private folders, and have a file of this name.
    batches = tmp_path / "sluice-batches"
    batches.mkdir()
    (batches / "lock").touch()
    (batches / "record").touch()
    make_private_dir(tmp_path)
    assert (batches / "record").exists()


def test_folders_that_are_not_known_to_be_ours_are_not_touched(tmp_path):
    target = tmp_path / "elsewhere"
    target.mkdir()
    (target / LOCK).touch()
    (tmp_path / "sluice-link").symlink_to(target)
    (tmp_path / "sluice-file").touch()
    without_lock = tmp_path / "sluice-being-made"
    without_lock.mkdir()
    linked_lock = tmp_path / "sluice-linked-lock"
    linked_lock.mkdir()
    (linked_lock / LOCK).symlink_to(target / LOCK)
    make_private_dir(tmp_path)
    for path in (target / LOCK, tmp_path / "sluice-file", without_lock, linked_lock):
        assert path.exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make folders of another user")
def test_folders_of_other_users_are_not_touched(tmp_path):
    folder = tmp_path / "sluice-theirs"
    folder.mkdir()
    (folder / LOCK).touch()
    os.chown(folder, 12345, 12345)
    make_private_dir(tmp_path)
    assert folder.exists()
