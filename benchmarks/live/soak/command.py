"""A steady mixed load on real Ray and Serve for any duration: does anything grow, is anything lost?
With ``--faults``: while parts of it are killed, frozen and drained at random.

Run with ``sluice bench soak``. Every answer is checked against its request: with simulated engines
its whole text, so that missing and duplicated tokens are detected. Every :data:`SAMPLE_S` seconds
each process is sampled; :mod:`sluice.benchmarks.live.soak.watch` says what counts as growth. In the
end, when the application is idle, nothing may be left: no request, no reservation, no byte of a
body.

If the program ``prometheus`` is installed, it scrapes during the run, and its counters are compared
with the client's own counts (:mod:`sluice.benchmarks.live.soak.prometheus`).

The exit status is 1 if a request was lost, something grows or is left over, or counters differ.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from rich.console import Console

from sluice.benchmarks.live.application import application
from sluice.benchmarks.live.replay.client import Outcome, replay
from sluice.benchmarks.live.soak.batches import Batches
from sluice.benchmarks.live.soak.load import (
    CAPACITY,
    LOAD,
    LOAD_WITH_FAULTS,
    Load,
    configuration,
    make_load,
)
from sluice.benchmarks.live.soak.prometheus import PROGRAM, SCRAPE_S, comparison, scraping
from sluice.benchmarks.live.soak.report import is_well, summary, tables
from sluice.benchmarks.live.soak.trends import Sample
from sluice.benchmarks.options import as_json, number_option, seed, show
from sluice.deploy.config import SluiceConfig

if TYPE_CHECKING:
    from sluice.benchmarks.live.soak.faults import Chaos
    from sluice.benchmarks.live.soak.watch import Watch

SAMPLE_S: Final = 10.0
WARM_UP_S: Final = 60.0
"""Growth counts from here on, seconds from the load's start; in a short run, from a fifth of it."""

GRACE_S: Final = 120.0
_IDLE_S = 60.0
_POLL_S = 0.5
_CALM_S = 15.0
"""Time without faults at the beginning and at the end, seconds; less in a short run."""


@click.command(name="soak")
@number_option("--minutes", default=5.0, least=0.1, most=10_000)
@click.option("--faults", is_flag=True, help="Kill, freeze and drain parts at random.")
@seed
@number_option("--replicas", default=3, least=2, most=64)
@number_option("--routers", default=2, least=1, most=16)
@number_option(
    "--rate",
    default=None,
    least=0.01,
    most=1_000,
    words="Requests a second in total, between bursts.  [default: about 80 % of the engines' "
    "capacity, with faults 50 %]",
)
@click.option(
    "--scrape/--no-scrape",
    default=None,
    help="Compare the counters that Prometheus scraped with the clients' own counts. Needs the "
    "program `prometheus`.  [default: if it is on the path, and without faults]",
)
@as_json
def soak(
    minutes: float,
    faults: bool,
    seed: int,
    replicas: int,
    routers: int,
    rate: float | None,
    scrape: bool | None,
    as_json: bool,
) -> None:
    """Serve a mixed load for long, and check whether anything is lost or grows.

    \b
    Examples:
      sluice bench soak --minutes 40
      sluice bench soak --minutes 20 --faults --seed 7
    """
    if scrape and faults:
        raise click.UsageError("--scrape: killed routers lose counts; leave --faults out.")
    if scrape and shutil.which(PROGRAM) is None:
        raise click.UsageError(f"--scrape: {PROGRAM} is not on the path.")
    if scrape is None:
        scrape = not faults and shutil.which(PROGRAM) is not None
    share = LOAD_WITH_FAULTS if faults else LOAD
    load = make_load(60 * minutes, rate or share * CAPACITY * replicas, seed)
    with tempfile.TemporaryDirectory(prefix="sluice-soak-") as batches:
        config = configuration(replicas, routers, Path(batches))
        found = measure(config, load, seed if faults else None, scrape)
    show(found, tables(found), as_json, f"left over: {found['left_over'] or 'nothing'}")
    raise SystemExit(not is_well(found))


def measure(
    config: SluiceConfig, load: Load, faults_seed: int | None, scrape: bool = False
) -> dict[str, Any]:
    """Serve ``config``, send all of ``load``, and report the results.

    Args:
        faults_seed: of the faults; ``None``: no faults.
        scrape: whether Prometheus scrapes it during the run.
    """
    say = Console(stderr=True).print
    with contextlib.ExitStack() as stack:
        served = stack.enter_context(application(config))
        scraper = None
        if scrape:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="sluice-prometheus-"))
            every_s = min(SCRAPE_S, load.workload.duration_s / 10)
            scraper = stack.enter_context(scraping(served.url, Path(folder), every_s))
        # Ray reads its environment on import, and these import Ray.
        from sluice.benchmarks.live.soak.faults import Chaos
        from sluice.benchmarks.live.soak.watch import Watch

        name, stop = config.name, served.stop
        run = _Run(served.url, config.engine.model, load, Watch(served.url, name), stop, say)
        if faults_seed is not None:
            counts = config.replica.first, config.router.replicas
            run.chaos = Chaos(faults_seed, name, *counts, run.now_s, stop)
        outcomes = asyncio.run(run.drive())
        if run.chaos is not None:
            run.chaos.mend()
            run.chaos.wait_until_well()
        left = run.wait_until_idle()
        done = run.chaos.done if run.chaos is not None else []
        warm_s = min(WARM_UP_S, load.workload.duration_s / 5)
        samples = [sample for sample in run.samples if sample.at_s >= warm_s]
        ends = run.batches.ends
        scraped = comparison(scraper, outcomes, load.kinds, ends) if scraper is not None else None
        return summary(outcomes, load.kinds, samples, done, left, ends, scraped)


class _Run:
    """One running soak: the load, batches, samples and faults, concurrently."""

    def __init__(
        self,
        url: str,
        model: str,
        load: Load,
        watch: Watch,
        stop: threading.Event,
        say: Callable[[str], None],
    ) -> None:
        self.samples: list[Sample] = []
        self.chaos: Chaos | None = None
        self.batches = Batches(url, model)
        self._url = url
        self._model = model
        self._load = load
        self._watch = watch
        self._stop = stop
        self._say = say
        self._started_s = time.monotonic()

    def now_s(self) -> float:
        """Seconds from the load's start."""
        return time.monotonic() - self._started_s

    async def drive(self) -> list[Outcome]:
        """Send the load; sample the processes and inject faults until all of it has been sent.

        Raises:
            click.Abort: a stop was requested.
        """
        self._started_s = time.monotonic()
        sent = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            beside = [
                group.create_task(self._look(sent)),
                group.create_task(self.batches.run(sent, GRACE_S)),
            ]
            if self.chaos is not None:
                beside.append(group.create_task(self._hurt(self.chaos, sent)))
            outcomes = await self._send(sent)
            if outcomes is None:
                for task in beside:
                    task.cancel()
        if outcomes is None:
            raise click.Abort
        return outcomes

    async def _send(self, sent: asyncio.Event) -> list[Outcome] | None:
        """Send the load; ``None`` if a stop was requested."""
        replaying = asyncio.create_task(
            replay(
                f"{self._url}/v1/completions",
                self._model,
                self._load.workload,
                GRACE_S,
                sent.set,
                body=self._load.body,
                leaves_after=self._load.leaves.__getitem__,
            )
        )
        while not replaying.done():
            await asyncio.wait([replaying], timeout=_POLL_S)
            if self._stop.is_set():
                replaying.cancel()
                return None
        return replaying.result()

    async def _look(self, sent: asyncio.Event) -> None:
        every_s = min(SAMPLE_S, self._load.workload.duration_s / 20)
        while not sent.is_set():
            self.samples.append(await asyncio.to_thread(self._watch.look, self.now_s()))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(every_s):
                    await sent.wait()

    async def _hurt(self, chaos: Chaos, sent: asyncio.Event) -> None:
        whole_s = self._load.workload.duration_s
        calm_s = min(_CALM_S, whole_s / 6)
        await asyncio.sleep(calm_s)
        while self.now_s() < whole_s - calm_s and not sent.is_set():
            begun_s = self.now_s()
            injury = await asyncio.to_thread(chaos.hurt)
            if injury is not None:
                self._say(f"{injury.at_s:.0f} s: {injury.what} {injury.target}")
            await asyncio.sleep(max(0.0, begun_s + chaos.pause_s() - self.now_s()))

    def wait_until_idle(self) -> dict[str, float]:
        """Figures that are not 0 although the application is idle; returns once there are none."""
        deadline_s = time.monotonic() + _IDLE_S
        while True:
            figures = self._watch.figures()
            left = {name: figures.get(name, math.nan) for name in self._watch.idle}
            left = {name: value for name, value in left.items() if value != 0}
            if not left or time.monotonic() > deadline_s or self._stop.is_set():
                return left
            time.sleep(_POLL_S)
