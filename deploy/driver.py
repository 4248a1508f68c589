"""The process of ``sluice serve`` that talks to Ray.

Calls of Ray can block without a limit, and Ray ends its driver's process when its control store
is lost, so ``supervisor`` runs this process, a fork of its own. It sends pairs of an event and a
text, and gets the command to stop. Until that comes it has no memory to speak of: it leaves Ray,
runs ``resting``, and then this module, which joins Ray again. It ends with the supervisor."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import traceback
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

import psutil

from sluice.deploy import local
from sluice.deploy.config import SluiceConfig
from sluice.deploy.ray_start import RayTooSlowError
from sluice.replica.processes import close_all_but

Event = Literal["report", "slow", "ray", "ready", "failed", "stopped"]
"""``slow``: Ray took longer to start than it allows."""

_RAYLET_END_S = 5.0


def start(config: SluiceConfig, folder: Path, supervisor: Connection) -> None:
    """Serve ``config`` with files in ``folder``, and rest. A failure is reported, and the end left
    to the supervisor: Ray ends with this process."""
    os.setpgid(0, 0)  # Ctrl-C on the terminal is for the supervisor
    # Ignored signals would be ignored in Ray, too.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    os.dup2(2, 1)  # what libraries print is not for the standard output
    close_all_but(0, 1, 2, supervisor.fileno())
    with suppress(OSError):  # for `ps`; other systems have no such file
        Path("/proc/self/comm").write_text("sluice-driver")
    # Whoever cleans the folder up ends every process that writes there; see `leftovers`.
    mark = (folder / "driver").open("w")
    _end_with(supervisor)
    report = partial(_emit, supervisor, "report")
    kind: Event = "failed"
    try:
        local.check_models(config)
        local.start_ray_for(config, folder, report, tries=1)
        _emit(supervisor, "ray")
        local.start_application(config, local.StopSignals(), report)
        os.dup2(mark.fileno(), 2)  # such as what Ray says of its own end
        _emit(supervisor, "ready")
        _rest(config.name, supervisor.fileno(), mark.fileno())
    except RayTooSlowError as error:
        kind, why = "slow", str(error)
    except local.StartError as error:
        why = str(error)
    except Exception as error:
        traceback.print_exc()
        why = _named(error)
    _emit(supervisor, kind, why)
    while True:
        signal.pause()


def _rest(name: str, *descriptors: int) -> None:
    """Become ``resting``, with these descriptors, of which the first is the supervisor's."""
    address = local.leave_ray()
    close_all_but(0, 1, 2, *descriptors)
    for each in descriptors:
        os.set_inheritable(each, True)
    rest = str(Path(__file__).with_name("resting.py"))
    supervisor, *_ = map(str, descriptors)
    stop = [sys.executable, "-P", "-m", __name__, supervisor, name, address]
    os.execv(sys.executable, [sys.executable, "-IS", rest, supervisor, *stop])


def stop(supervisor: Connection, name: str, address: str) -> None:
    """Take the command, the time for running requests in seconds, and end the application."""
    try:
        drain_s: float = supervisor.recv()
    except (EOFError, OSError):
        return
    _end_with(supervisor)
    try:
        local.end_application(name, address, drain_s)
        for process in psutil.Process().children():
            if process.name() == "raylet":  # which ends the other actors
                process.terminate()
                process.wait(_RAYLET_END_S)
    except Exception as error:  # the supervisor ends what is left
        _emit(supervisor, "report", f"not everything ended in order: {_named(error)}")
    _emit(supervisor, "stopped")


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _end_with(supervisor: Connection) -> None:
    """Have this process end with the supervisor. Commands are left to be read."""
    hung_up = select.poll()
    hung_up.register(supervisor.fileno(), 0)

    def wait() -> None:
        hung_up.poll()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _emit(supervisor: Connection, event: Event, text: str = "") -> None:
    supervisor.send((event, text))


if __name__ == "__main__":
    stop(Connection(int(sys.argv[1])), *sys.argv[2:])
    # Not through Ray's and other libraries' hooks, which may block: nothing is left to do.
    os._exit(0)
