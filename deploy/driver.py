"""The process of ``sluice serve`` that talks to Ray: ``python -m sluice.deploy.driver FOLDER``.

Calls of Ray can block without a limit, and Ray ends its driver's process when its control store
is lost, so ``supervisor`` runs this process. It gets a ``task`` on its standard input, later the
command to stop, and writes one JSON event a line. When its input ends, it ends."""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NoReturn

from sluice.deploy import local
from sluice.deploy.config import SluiceConfig
from sluice.deploy.ray_start import RayTooSlowError

Event = Literal["report", "slow", "ray", "ready", "failed", "stopped"]
"""``slow``: Ray took longer to start than it allows."""

_LENGTH_BYTES = 8


def task(config: SluiceConfig) -> bytes:
    """What the driver gets first: the configuration, with its secrets."""
    pickled = pickle.dumps(config)
    return len(pickled).to_bytes(_LENGTH_BYTES) + pickled


def main() -> None:
    """See above."""
    # The terminal's Ctrl-C is for the supervisor. Ignored signals would be ignored in Ray, too.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    events = os.dup(1)
    os.dup2(2, 1)  # what libraries print is no event
    with suppress(OSError):  # for `ps`; other systems have no such file
        Path("/proc/self/comm").write_text("sluice-driver")
    folder = Path(sys.argv[1])
    # Whoever cleans the folder up ends every process that writes there; see `leftovers`.
    mark = (folder / "driver").open("w")
    config: SluiceConfig = pickle.loads(_read(int.from_bytes(_read(_LENGTH_BYTES))))
    driver = Driver(config, folder, events, mark.fileno())
    threading.Thread(target=driver.obey, daemon=True).start()
    driver.run()
    # Not through Ray's and other libraries' hooks, which may block: nothing is left to do.
    os._exit(0)


class Driver:
    """Starts the application and stops it again. ``events``: descriptor for events; ``log``:
    descriptor for what libraries print once the application is ready."""

    def __init__(self, config: SluiceConfig, folder: Path, events: int, log: int) -> None:
        self._config = config
        self._folder = folder
        self._events = events
        self._log = log
        self._stop = threading.Event()
        self._drain_s = 0.0

    def obey(self) -> None:
        """Take the command ``stop SECONDS``, with the time for running requests. At the end of the
        input, which is that of the supervisor, this process ends."""
        while command := os.read(0, 256):
            self._drain_s = float(command.split()[1])
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
        process, and would be what has ended."""
        self._emit(kind, why)
        while True:
            signal.pause()

    def _report(self, line: str) -> None:
        self._emit("report", line)

    def _emit(self, kind: Event, text: str = "") -> None:
        entry: dict[str, Any] = {"event": kind, "text": text}
        os.write(self._events, json.dumps(entry).encode() + b"\n")


def _read(length: int) -> bytes:
    """Exactly ``length`` bytes of the standard input."""
    data = b""
    while len(data) < length:
        read = os.read(0, length - len(data))
        if not read:
            os._exit(1)  # the supervisor has ended
        data += read
    return data


if __name__ == "__main__":
    main()
