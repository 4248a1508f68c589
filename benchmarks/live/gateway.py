"""The cost of a gateway in front of engines: Sluice, other routers, and no gateway.

All share this machine in turns: read processor times, and ratios within one run."""

from __future__ import annotations

import asyncio
import gc
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from statistics import median
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import click
import httptools
from rich.table import Table

from sluice.benchmarks.experiments.grid import grouped
from sluice.benchmarks.live import rest
from sluice.benchmarks.live import systems as live
from sluice.benchmarks.live.client import Json, LoadError
from sluice.benchmarks.live.engine import chat_body
from sluice.benchmarks.live.report import OWN, Meter, quantiles, table
from sluice.benchmarks.live.systems import (
    ENGINES,
    REPLICAS,
    Bench,
    Server,
    System,
    campaign,
    served,
    simulated,
    sluice,
)
from sluice.benchmarks.options import as_json, choices_option, number_option, show
from sluice.deploy.local import StoppedError, StopSignals

# A closed loop of concurrent HTTP requests, each sent when the one before it has ended.
#
# It shares its cores with the systems under test, so it does little: it searches for the first
# token while a stream runs, and counts the tokens when the stream has ended.

ANSWER_LIMIT_S = 120.0
"""Timeout of an answer, seconds."""

_FIRST_TOKEN = re.compile(rb'"content": ?"[^"]')
"""Content that is not empty: a stream may open with an empty piece before any token."""
_CONTENT = re.compile(rb'"content": ?"([^"\\]*)"')
_USAGE = re.compile(rb'"completion_tokens": ?(\d+)')
_SHOWN = 300


class Load(NamedTuple):
    """The TTFT of each request, the whole time and the client's processor time, in seconds."""

    ttfts_s: list[float]
    elapsed_s: float
    cpu_s: float


async def load(
    urls: Sequence[str], at_once: int, tokens: int, seconds: float, stopped: Callable[[], bool]
) -> Load:
    """Keep ``at_once`` streams running over ``urls`` in turn; none starts after ``seconds`` or once
    ``stopped``. Raises :class:`LoadError`."""
    connections = [_Connection(urls[number % len(urls)], tokens) for number in range(at_once)]
    for connection in connections:
        await connection.connect()
    ttfts_s: list[float] = []
    begun_s, begun_cpu_s = time.perf_counter(), time.process_time()

    async def ask(connection: _Connection) -> None:
        while True:
            ttfts_s.append(await connection.ask())
            if time.perf_counter() - begun_s >= seconds or stopped():
                return

    try:
        async with asyncio.TaskGroup() as group:
            for connection in connections:
                group.create_task(ask(connection))
        elapsed_s = time.perf_counter() - begun_s
        cpu_s = time.process_time() - begun_cpu_s
    except* LoadError as errors:
        raise errors.exceptions[0] from None
    finally:
        for connection in connections:
            connection.close()
    return Load(ttfts_s, elapsed_s, cpu_s)


class _Connection(asyncio.Protocol):
    """One connection that is kept open, with one request at a time."""

    def __init__(self, url: str, tokens: int) -> None:
        self._url, self._tokens = url, tokens
        parts, body = urlsplit(url), chat_body(tokens)
        self._address = str(parts.hostname), parts.port or 80
        head = (
            f"POST {parts.path}/v1/chat/completions HTTP/1.1\r\nhost: {parts.netloc}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        self._request = head.encode() + body
        self._transport: asyncio.WriteTransport | None = None
        self._parser: Any = None
        self._body = bytearray()
        self._sent_s = 0.0
        self._ttft_s: float | None = None
        self._answered: asyncio.Future[None] | None = None

    async def connect(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.create_connection(lambda: self, *self._address)
        except OSError as error:
            raise LoadError(f"{self._url}: {error}") from None

    async def ask(self) -> float:
        """Ask; seconds to the first token. Raises :class:`LoadError`."""
        if self._transport is None:  # the server closes after each answer
            await self.connect()
        assert self._transport is not None
        self._parser = httptools.HttpResponseParser(self)
        self._body.clear()
        self._ttft_s = None
        self._answered = asyncio.get_running_loop().create_future()
        self._sent_s = time.perf_counter()
        self._transport.write(self._request)
        try:
            # Not wait_for, which drops a cancellation that comes with the answer.
            async with asyncio.timeout(ANSWER_LIMIT_S):
                await self._answered
        except TimeoutError:
            raise LoadError(f"{self._url}: no end after {ANSWER_LIMIT_S:g} s") from None
        body = bytes(self._body)
        stated = _USAGE.findall(body)
        got = int(stated[-1]) if stated else len(b"".join(_CONTENT.findall(body)).split())
        if self._ttft_s is None or got != self._tokens or b"[DONE]" not in body:
            raise LoadError(
                f"{self._url}: status {self._parser.get_status_code()}, {got} of "
                f"{self._tokens} tokens: {body[-_SHOWN:].decode(errors='replace')}"
            )
        return self._ttft_s

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"no HTTP: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._fail(f"connection lost: {exc or 'closed by the server'}")

    def _fail(self, why: str) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(LoadError(f"{self._url}: {why}"))

    def on_body(self, body: bytes) -> None:
        self._body += body
        if self._ttft_s is None and _FIRST_TOKEN.search(self._body):
            self._ttft_s = time.perf_counter() - self._sent_s

    def on_message_complete(self) -> None:
        if not self._parser.should_keep_alive():
            self.close()
            self._transport = None
        if self._answered is not None and not self._answered.done():
            self._answered.set_result(None)


WARM_UP_S = 1.0
IDLE_S = 2.0
"""Time without requests, to measure the systems' idle usage, seconds."""

REFERENCES: Final = ("direct", "vllm-router")
"""Systems with which the others' requests a second are compared, where they were measured."""

GATEWAY: Final = "gateway"
"""All processes but those of engines and the client."""


@contextmanager
def _direct(bench: Bench) -> Iterator[System]:
    yield System(tuple(bench.engines.values()), dict.fromkeys(bench.engines, ENGINES))


def sluice_config(bench: Bench, port: int) -> Json:
    """Sluice in front of simulated engines with the step time of ``bench``."""
    times = {"step_s": bench.step_ms / 1e3, "token_s": 0.0, "context_token_s": 0.0}
    return simulated(port, times, REPLICAS)


def _serve_llm(bench: Bench, port: int) -> Server:
    return live.serve_llm(bench, port, "--replicas", f"{REPLICAS}", "--step-ms", f"{bench.step_ms}")


SYSTEMS: Final[dict[str, live.Start]] = {
    "direct": _direct,
    "vllm-router": served("vllm-router", live.vllm_router),
    "ray-serve-llm": served("ray-serve-llm", _serve_llm),
    "sluice": sluice("sluice", sluice_config),
}
"""The function that starts each system."""


@click.command(name="gateway")
@number_option("--rounds", default=3, least=1, most=100)
@number_option("--seconds", default=1.5, least=0.1, most=600, words="Of each measurement.")
@number_option("--at-once", "at_onces", default=(1, 16, 64), least=1, most=1_000, multiple=True)
@number_option("--tokens", "token_counts", default=(20, 200), least=1, most=4_000, multiple=True)
@number_option(
    "--step-ms", default=0.0, least=0, most=1_000, words="Time between two tokens of an engine."
)
@choices_option("--system", "names", of=SYSTEMS, words="[default: all]")
@click.option(
    "--rest",
    "at_rest",
    is_flag=True,
    help="Instead: start, memory and idle usage with one real engine, beside vLLM's own server.",
)
@as_json
def gateway(
    rounds: int,
    seconds: float,
    at_onces: tuple[int, ...],
    token_counts: tuple[int, ...],
    step_ms: float,
    names: tuple[str, ...],
    at_rest: bool,
    as_json: bool,
) -> None:
    """Measure what a gateway adds to engines that compute nothing.

    Of Sluice, of other routers, and without one. Each number of concurrent requests, --at-once, is
    measured with streams of each number of --tokens; they and --system are repeatable. Missing
    routers are installed from PyPI into the user's cache. A router that cannot be installed or
    started is left out, and the output says so.

    \b
    Example:
      sluice bench gateway --system direct --system sluice --at-once 16
    """
    if at_rest:
        with campaign() as bench:
            runs = rest.measured(bench, rounds)
        rows = rest.summary(runs)
        return show({"summary": rows, "runs": runs}, [rest.as_table(rows)], as_json)
    starts = {name: SYSTEMS[name] for name in names or SYSTEMS}
    with campaign(step_ms) as bench, live.started(starts, bench) as (systems, left_out):
        if not systems:
            raise click.ClickException("no system could be started")
        for system in systems.values():
            _measured(system, max(at_onces), min(token_counts), WARM_UP_S, bench.stop)
        runs = []
        for number in range(rounds):
            turn = list(systems)[:: -1 if number % 2 else 1]
            for at_once, tokens, name in product(at_onces, token_counts, turn):
                row = _measured(systems[name], at_once, tokens, seconds, bench.stop)
                cell = {"system": name, "at_once": at_once, "tokens": tokens}
                runs.append({**cell, "round": number, **row})
            bench.say(f"round {number + 1} of {rounds}")
        # Not before: a system that has just started is busy with its own start-up.
        idle_cores = _idle(systems)
    rows = summary(runs)
    further = further_tokens(rows)
    found = {"summary": rows, "further_token": further, "idle_cores": idle_cores}
    lines = [
        f"{name}: {cores:.3f} cores while nothing is sent" for name, cores in idle_cores.items()
    ]
    lines += [f"{name} was left out: {reason}" for name, reason in left_out.items()]
    show({**found, "left_out": left_out, "runs": runs}, tables(rows, further), as_json, *lines)


def _idle(systems: Mapping[str, System]) -> dict[str, float]:
    """Cores that each system uses while nothing is sent, its engines included."""
    meters = {name: Meter(system.processes) for name, system in systems.items()}
    time.sleep(IDLE_S)
    used = {name: meter.stop().kinds.values() for name, meter in meters.items()}
    return {name: round(sum(each.cores for each in kinds), 3) for name, kinds in used.items()}


def _measured(system: System, at_once: int, tokens: int, seconds: float, stop: StopSignals) -> Json:
    gc.collect()
    meter = Meter(system.processes)
    measured = asyncio.run(load(system.urls, at_once, tokens, seconds, stop.is_set))
    if stop.is_set():
        raise StoppedError("stopped in the middle of a measurement")
    return figures(measured, {kind: used.cpu_s for kind, used in meter.stop().kinds.items()})


# The report.


def figures(load: Load, cpu_s: Mapping[str, float]) -> Json:
    """One run, as plain data; ``cpu_s`` are processor seconds by kind of process."""
    requests = len(load.ttfts_s)
    p50, p99 = quantiles(load.ttfts_s, digits=6)
    each = {**cpu_s, OWN: load.cpu_s}
    return {
        "requests": requests,
        "per_second": round(requests / load.elapsed_s, 2),
        "ttft_p50_ms": round(1e3 * p50, 3),
        "ttft_p99_ms": round(1e3 * p99, 3),
        "cpu_ms": {kind: round(1e3 * seconds / requests, 4) for kind, seconds in each.items()},
    }


def summary(runs: Sequence[Json]) -> list[Json]:
    """Each cell and system: medians over rounds; ratios within a round, as a busy moment hits it
    whole."""
    rows = []
    for cell in grouped(runs, "at_once", "tokens").values():
        systems = {name: own for (name,), own in grouped(cell, "system").items()}
        for system, own in systems.items():
            row: Json = {name: own[0][name] for name in ("at_once", "tokens", "system")}
            row["requests"] = sum(run["requests"] for run in own)
            row["cpu_ms"] = _cpu_ms(own, row["requests"])
            for name in ("per_second", "ttft_p50_ms", "ttft_p99_ms"):
                row[name] = round(median(run[name] for run in own), 3)
            bases = {name: systems[name] for name in REFERENCES if name in systems}
            row["ratio"] = {n: _ratio(own, base) for n, base in bases.items() if n != system}
            rows.append(row)
    return rows


def _ratio(runs: Sequence[Json], bases: Sequence[Json]) -> float:
    pairs = zip(runs, bases, strict=True)
    ratios = [float(run["per_second"] / base["per_second"]) for run, base in pairs]
    return round(median(ratios), 3)


def _cpu_ms(runs: Sequence[Json], requests: int) -> dict[str, float]:
    """Processor time of a request, by kind of process, and of all processes of the gateway."""
    sums = Counter[str]()
    for run in runs:
        sums.update({kind: ms * run["requests"] for kind, ms in run["cpu_ms"].items()})
    found = {kind: total / requests for kind, total in sums.items()}
    found[GATEWAY] = sum(ms for kind, ms in found.items() if kind not in (ENGINES, OWN))
    return {kind: round(ms, 3) for kind, ms in found.items()}


def further_tokens(rows: Sequence[Json]) -> list[Json]:
    """Processor time of a further token, microseconds: longest against shortest streams."""
    costs = []
    for (at_once, system), own in grouped(rows, "at_once", "system").items():
        short, long = (pick(own, key=lambda row: row["tokens"]) for pick in (min, max))
        tokens = long["tokens"] - short["tokens"]
        if tokens:
            cpu_us = {
                kind: round(1e3 * (ms - short["cpu_ms"].get(kind, 0.0)) / tokens, 2)
                for kind, ms in long["cpu_ms"].items()
            }
            costs.append({"at_once": at_once, "system": system, "cpu_us": cpu_us})
    return costs


def tables(rows: Sequence[Json], tokens: Sequence[Json]) -> list[Table]:
    """:func:`summary` and :func:`further_tokens` as tables."""
    cell = ("at_once", "tokens", "system")
    speed = ("per_second", "ratio.direct", "ratio.vllm-router", "ttft_p50_ms", "ttft_p99_ms")
    kinds = dict.fromkeys([GATEWAY, *(kind for row in rows for kind in row["cpu_ms"])])
    of_request, of_token = ([f"{unit}.{kind}" for kind in kinds] for unit in ("cpu_ms", "cpu_us"))
    shown = [
        table(rows, *cell, *speed, "requests", title="medians over rounds"),
        table(rows, *cell, *of_request, title="processor time of a request"),
    ]
    if tokens:
        title = "processor time of a further token"
        shown.append(table(tokens, "at_once", "system", *of_token, title=title))
    return shown
