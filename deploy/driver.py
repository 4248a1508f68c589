"""The process of ``sluice serve`` that talks to Ray.

Calls of Ray can block without a limit, and Ray ends its driver's process when its control store
is lost, so ``supervisor`` runs this process, a fork of its own. It sends pairs of an event and a
text, and gets the command to stop. It ends with the supervisor."""

from __future__ import annotations

import os
import signal
import threading
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal, NoReturn

from sluice.deploy import local
from sluice.deploy.config import SluiceConfig
from sluice.deploy.ray_start import RayTooSlowError

Event = Literal["report", "slow", "ray", "ready", "failed", "stopped"]
"""``slow``: Ray took longer to start than it allows."""


def main(config: SluiceConfig, folder: Path, supervisor: Connection) -> None:
    """Serve ``config`` with files in ``folder`` until the supervisor says to stop."""
    os.setpgid(0, 0)  # Ctrl-C on the terminal is for the supervisor
    # Ignored signals would be ignored in Ray, too.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    os.dup2(2, 1)  # what libraries print is not for the standard output
    _close_all_but(0, 1, 2, supervisor.fileno())
    with suppress(OSError):  # for `ps`; other systems have no such file
        Path("/proc/self/comm").write_text("sluice-driver")
    # Whoever cleans the folder up ends every process that writes there; see `leftovers`.
    with (folder / "driver").open("w") as mark:
        driver = Driver(config, folder, supervisor, mark.fileno())
        threading.Thread(target=driver.obey, daemon=True).start()
        driver.run()
        # Not through Ray's and other libraries' hooks, which may block: nothing is left to do.
        os._exit(0)


def _close_all_but(*kept: int) -> None:
    """Close the supervisor's descriptors: some processes end once all copies of one are closed."""
    for descriptor in [int(path.name) for path in Path("/dev/fd").iterdir()]:
        if descriptor not in kept:
            with suppress(OSError):  # that of the listing
                os.close(descriptor)


class Driver:
    """Starts the application and stops it again. ``log``: descriptor for what libraries print once
    the application is ready."""

    def __init__(
        self, config: SluiceConfig, folder: Path, supervisor: Connection, log: int
    ) -> None:
        self._config = config
        self._folder = folder
        self._supervisor = supervisor
        self._log = log
        self._stop = threading.Event()
        self._drain_s = 0.0

    def obey(self) -> None:
        """Take the command to stop: the time for running requests, seconds. At the supervisor's end
        this process ends."""
        with suppress(EOFError, OSError):
            while True:
                self._drain_s = self._supervisor.recv()
                self._stop.set()
        os._exit(1)

    def run(self) -> None:
        """Serve until a command says to stop, and report why it could not."""
        try:
            local.check_models(self._config)
            local.start_ray_for(self._config, self._folder, self._report, tries=1)
            self._emit("ray")
            local.start_application(self._config, self._stop, self._report)
            drain = local.drain_of(self._config)
        except local.StoppedError:
            return
        except RayTooSlowError as error:
            self._fail(str(error), "slow")
        except local.StartError as error:
            self._fail(str(error))
        except Exception as error:
            traceback.print_exc()
            self._fail(f"{type(error).__name__}: {error}")
        os.dup2(self._log, 2)  # such as what Ray says of its own end
        self._emit("ready")
        self._stop.wait()
        try:
            drain(self._drain_s)
            local.end_application()
        except Exception as error:  # the supervisor ends what is left
            self._report(f"not everything ended in order: {type(error).__name__}: {error}")
        self._emit("stopped")

    def _fail(self, why: str, kind: Event = "failed") -> NoReturn:
        """Say why nothing can be served, and leave the end to the supervisor: Ray ends with this
        process."""
        self._emit(kind, why)
        while True:
            signal.pause()

    def _report(self, line: str) -> None:
        self._emit("report", line)

    def _emit(self, kind: Event, text: str = "") -> None:
        self._supervisor.send((kind, text))
