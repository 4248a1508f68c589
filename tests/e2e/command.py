"""``sluice serve`` as a process of its own."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests.documents import newcomer
from tests.injuries import Process
from tests.processes import title_of

SLUICE = Path(sys.executable).with_name("sluice")
_FOLDER = re.compile("=(/tmp/sluice-[^/]+)/")


class ServeCommand:
    """``sluice serve`` with a configuration, more ``words`` and ``variables``; ready once made."""

    def __init__(self, fields: dict[str, Any], folder: Path, *words: str, **variables: str) -> None:
        self._words = words
        self._variables = variables
        self._config, self._log = folder / "sluice.yaml", folder / "log"
        self._config.write_text(yaml.safe_dump(fields))
        self.process = self._start()

    def start_again(self) -> None:
        assert self.process.poll() is not None
        self.process = self._start()

    def log(self) -> str:
        return self._log.read_text()

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def kill(self) -> None:
        if self.process.poll() is not None:
            return
        # All are stopped first: nothing may restart what has been killed.
        Process.of(self.process.pid).freeze()
        family = self.family()
        folders = {found for member in family for found in _FOLDER.findall(title_of(member))}
        Process.of(self.process.pid).kill()
        self.process.communicate(timeout=120)
        _, alive = psutil.wait_procs(family, timeout=120)
        assert alive == [], "it was not all of it"
        assert folders, "Ray runs below a folder of its own"
        for folder in folders:
            # Another instance that starts removes what killed ones have left, too.
            shutil.rmtree(folder, ignore_errors=True)

    def _start(self) -> subprocess.Popen[str]:
        process = self._begin()
        # Ray gives itself 30 s to start, which a busy machine may need more than once.
        while process.poll() is not None and "timed out during startup" in self.log():
            process = self._begin()
        assert process.poll() is None, self.log()
        return process

    def _begin(self) -> subprocess.Popen[str]:
        with self._log.open("w") as stderr:
            process = subprocess.Popen(
                [SLUICE, "serve", "--config", self._config, *self._words],
                env={**newcomer(), "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.02", **self._variables},
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        assert process.stdout is not None
        if not process.stdout.readline():
            process.wait()
        return process
