"""An application that is served in this process, on a Ray of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import NamedTuple

from rich.console import Console

from sluice.benchmarks.live import systems
from sluice.deploy.config import SluiceConfig
from sluice.deploy.local import StopSignals, base_url, stop_signals
from tests.own_ray import running


class Application(NamedTuple):
    """A running application: root URL, model's name, and an event that ends this process."""

    url: str
    model: str
    stop: StopSignals

    @property
    def completions(self) -> str:
        return f"{self.url}/v1/completions"

    def until(self, done: Callable[[], bool], limit_s: float) -> bool:
        return systems.until(done, limit_s, self.stop)


@contextmanager
def application(config: SluiceConfig) -> Iterator[Application]:
    """Serve ``config`` until the block ends, with standard output as standard error."""
    say = Console(stderr=True).print
    with redirect_stdout(sys.stderr), stop_signals() as stop, running(config, stop, say):
        yield Application(base_url(config), config.engine.model, stop)
