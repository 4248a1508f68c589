"""The cost of the path edge -> controller -> replica over Serve's own path to the same engine.

Both applications run in one Ray instance with simulated engines that answer at once, so that only
the path is measured. Rounds alternate between the two, so that a drift of the machine hits both.

Run it with ``python -m sluice.benchmarks.micro.spine``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf
from operator import sub, truediv
from statistics import median

import click
from rich.console import Console
from rich.table import Table

from sluice.benchmarks.live.application import application, simulated
from sluice.benchmarks.live.gateway.client import load
from sluice.benchmarks.options import as_json, number_option, show

_TOKENS = 20
_WARM_UP = 50
_PATHS = {"sluice": "", "serve": "/baseline"}
_INSTANT = {"step_s": 0.0, "token_s": 0.0, "context_token_s": 0.0}

Measured = dict[str, list[float]]
"""One path at one concurrency, an entry a round: ``ttft_p50_ms`` and ``ttft_p99_ms`` of the round,
and its requests ``per_second``."""


@click.command()
@number_option("--rounds", default=5, least=1, most=1_000, words="Rounds of each path.")
@number_option("--requests", default=300, least=1, most=1_000_000, words="Requests in a round.")
@number_option("--replicas", default=2, least=1, most=64, words="Simulated replicas of each path.")
@as_json
def main(rounds: int, requests: int, replicas: int, as_json: bool) -> None:
    """Measure added TTFT and requests per second of the whole path."""
    config = simulated(_INSTANT, replicas)
    say = Console(stderr=True).print
    results: dict[int, dict[str, Measured]] = {}
    with application(config) as served:
        # Ray is imported once its environment is set.
        from ray import serve

        from sluice.benchmarks.micro.baseline_app import build_baseline

        # As a separate application it has a controller of its own.
        serve.run(build_baseline(config), name="baseline", route_prefix=_PATHS["serve"])
        for concurrency in (1, 16):
            results[concurrency] = _compare(served.url, rounds, requests, concurrency, say)
    show(results, [_table(results)], as_json)


def _compare(
    url: str, rounds: int, requests: int, concurrency: int, say: Callable[[str], None]
) -> dict[str, Measured]:
    names = ("ttft_p50_ms", "ttft_p99_ms", "per_second")
    results: dict[str, Measured] = {path: {name: [] for name in names} for path in _PATHS}
    for prefix in _PATHS.values():
        _round(url + prefix, _WARM_UP, concurrency)
    for number in range(rounds):
        for path, prefix in _PATHS.items():
            for name, value in zip(names, _round(url + prefix, requests, concurrency), strict=True):
                results[path][name].append(value)
        say(f"concurrency {concurrency}: round {number + 1} of {rounds}")
    return results


def _round(url: str, requests: int, concurrency: int) -> tuple[float, float, float]:
    """Send ``requests``, at least one by each of ``concurrency`` clients; median and 99th
    percentile of the TTFT, ms, and requests a second."""
    further = iter(range(requests - concurrency))
    done = asyncio.run(load([url], concurrency, _TOKENS, inf, lambda: next(further, None) is None))
    ttfts_ms = sorted(1e3 * each for each in done.ttfts_s)
    p99_ms = ttfts_ms[int(0.99 * len(ttfts_ms))]
    return median(ttfts_ms), p99_ms, len(ttfts_ms) / done.elapsed_s


def _table(results: dict[int, dict[str, Measured]]) -> Table:
    table = Table(
        *("concurrency", "path", "TTFT p50 ms", "TTFT p99 ms", "requests/s"),
        title="median over rounds (least .. most)",
    )
    for concurrency, measured in results.items():
        for path, figures in measured.items():
            shown = [f"{median(v):.2f} ({min(v):.2f} .. {max(v):.2f})" for v in figures.values()]
            table.add_row(str(concurrency), path, *shown)
        serve, ours = (measured[path] for path in ("serve", "sluice"))
        added = median(map(sub, ours["ttft_p50_ms"], serve["ttft_p50_ms"]))
        ratio = median(map(truediv, ours["per_second"], serve["per_second"]))
        shown = [f"{added:+.2f}", "", f"x {ratio:.2f}"]
        table.add_row(str(concurrency), "difference", *shown, end_section=True)
    return table


if __name__ == "__main__":
    main()
