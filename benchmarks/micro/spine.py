"""The cost of the path edge -> controller -> replica over Serve's own path to the same engine.

Both applications run in one Ray instance with simulated engines that answer at once, so that only
the path is measured. Rounds alternate between the two, so that a drift of the machine hits both.

Run it with ``python -m sluice.benchmarks.micro.spine``.
"""

from __future__ import annotations

import asyncio
import json
import re
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from typing import Any

import aiohttp
import click
from rich.console import Console
from rich.table import Table

from sluice.deploy.config import SluiceConfig
from sluice.deploy.local import base_url, running, stop_signals
from sluice.deploy.ray_settings import free_port

_TOKENS = 20
_FIRST_TOKEN = re.compile(rb'"content": ?"[^"]')
"""Content that is not empty: a stream opens with an empty piece before any token is computed."""
_PATHS = {"sluice": "", "serve": "/baseline"}


@dataclass
class Measured:
    """One path at one concurrency: milliseconds to first token, and requests per second.

    Each list has one entry a round; TTFT entries are that round's percentile.
    """

    ttft_p50_ms: list[float]
    ttft_p99_ms: list[float]
    per_second: list[float]


@click.command()
@click.option("--rounds", default=5, show_default=True, help="Rounds of each path.")
@click.option("--requests", default=300, show_default=True, help="Requests in a round.")
@click.option("--replicas", default=2, show_default=True, help="Simulated replicas of each path.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
def main(rounds: int, requests: int, replicas: int, as_json: bool) -> None:
    """Measure added TTFT and requests per second of the whole path."""
    config = _config(replicas)
    say = Console(stderr=True).print
    # Ray's own messages must not stand between the lines of the JSON.
    with redirect_stdout(sys.stderr), stop_signals() as stop, running(config, stop, say):
        _deploy_baseline(config)
        results = {
            concurrency: asyncio.run(
                _compare(base_url(config), config, rounds, requests, concurrency, say)
            )
            for concurrency in (1, 16)
        }
    if as_json:
        click.echo(
            json.dumps(
                {
                    str(concurrency): {name: asdict(entry) for name, entry in measured.items()}
                    for concurrency, measured in results.items()
                }
            )
        )
    else:
        Console().print(_table(results))


def _config(replicas: int) -> SluiceConfig:
    instant = {"step_s": 0.0, "token_s": 0.0, "context_token_s": 0.0}
    return SluiceConfig.model_validate(
        {
            "engine": {"kind": "simulated", "model": "simulated", "simulated": instant},
            "replica": {"count": replicas, "num_cpus": 0.1},
            "router": {"port": free_port()},
        }
    )


def _deploy_baseline(config: SluiceConfig) -> None:
    from ray import serve

    from sluice.benchmarks.micro.baseline_app import build_baseline

    # As a separate application it has a controller of its own.
    serve.run(build_baseline(config), name="baseline", route_prefix=_PATHS["serve"])


async def _compare(
    url: str,
    config: SluiceConfig,
    rounds: int,
    requests: int,
    concurrency: int,
    say: Callable[[str], None],
) -> dict[str, Measured]:
    results = {name: Measured([], [], []) for name in _PATHS}
    body = {
        "model": config.engine.model,
        "messages": [{"role": "user", "content": "What does a sluice do? " * 8}],
        "max_tokens": _TOKENS,
        "stream": True,
    }
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        for prefix in _PATHS.values():
            await _round(session, f"{url}{prefix}/v1/chat/completions", body, 50, concurrency)
        for number in range(rounds):
            for name, prefix in _PATHS.items():
                target = f"{url}{prefix}/v1/chat/completions"
                ttfts, seconds = await _round(session, target, body, requests, concurrency)
                entry = results[name]
                entry.ttft_p50_ms.append(1e3 * statistics.median(ttfts))
                entry.ttft_p99_ms.append(1e3 * sorted(ttfts)[int(0.99 * len(ttfts))])
                entry.per_second.append(len(ttfts) / seconds)
            say(f"concurrency {concurrency}: round {number + 1} of {rounds}")
    return results


async def _round(
    session: aiohttp.ClientSession,
    url: str,
    body: dict[str, Any],
    requests: int,
    concurrency: int,
) -> tuple[list[float], float]:
    """Send ``requests`` with ``concurrency`` workers; every TTFT, and the total seconds."""
    left = iter(range(requests))
    ttfts: list[float] = []

    async def worker() -> None:
        ttfts.extend([await _request(session, url, body) for _ in left])

    started = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(concurrency)))
    return ttfts, time.perf_counter() - started


async def _request(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> float:
    """One streamed request, read to its end; seconds to its first token."""
    started = time.perf_counter()
    first: float | None = None
    done = False
    async with session.post(url, json=body) as response:
        response.raise_for_status()
        async for data in response.content.iter_any():
            if first is None and _FIRST_TOKEN.search(data):
                first = time.perf_counter() - started
            done = done or b"[DONE]" in data
    if first is None or not done:
        raise RuntimeError(f"{url} ended without a token or without its end mark")
    return first


def _table(results: dict[int, dict[str, Measured]]) -> Table:
    table = Table(
        "concurrency",
        "path",
        "TTFT p50 ms",
        "TTFT p99 ms",
        "requests/s",
        title="median over rounds (least .. most)",
    )
    for concurrency, measured in results.items():
        for name, entry in measured.items():
            table.add_row(
                str(concurrency),
                name,
                *(
                    f"{statistics.median(values):.2f} ({min(values):.2f} .. {max(values):.2f})"
                    for values in (entry.ttft_p50_ms, entry.ttft_p99_ms, entry.per_second)
                ),
            )
        ours, theirs = measured["sluice"], measured["serve"]
        added = statistics.median(
            a - b for a, b in zip(ours.ttft_p50_ms, theirs.ttft_p50_ms, strict=True)
        )
        ratio = statistics.median(
            a / b for a, b in zip(ours.per_second, theirs.per_second, strict=True)
        )
        table.add_row(
            str(concurrency), "difference", f"{added:+.2f}", "", f"x {ratio:.2f}", end_section=True
        )
    return table


if __name__ == "__main__":
    main()
