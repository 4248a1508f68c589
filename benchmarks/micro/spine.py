"""The cost of the path edge -> controller -> replica over Serve's own path to the same engine.

Both applications run in one Ray instance with simulated engines that answer at once, so that only
the path is measured. Rounds alternate between the two, so that a drift of the machine hits both.

Run it with ``python -m sluice.benchmarks.micro.spine``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from math import inf
from operator import sub, truediv
from statistics import median

import click
from rich.console import Console

from sluice.benchmarks.live.application import application, simulated
from sluice.benchmarks.live.gateway.client import load
from sluice.benchmarks.live.report import table
from sluice.benchmarks.options import as_json, number_option, show

_TOKENS = 20
_WARM_UP = 50
_PATHS = {"sluice": "", "serve": "/baseline"}
_INSTANT = {"step_s": 0.0, "token_s": 0.0, "context_token_s": 0.0}

_FIGURES = ("ttft_p50_ms", "ttft_p99_ms", "per_second")

Measured = dict[str, list[float]]
"""One path at one concurrency: each of :data:`_FIGURES`, an entry a round."""


@click.command()
@number_option("--rounds", default=5, least=1, most=1_000, words="Rounds of each path.")
@number_option("--requests", default=300, least=1, most=1_000_000, words="Requests in a round.")
@number_option("--replicas", default=2, least=1, most=64, words="Simulated replicas of each path.")
@as_json
def main(rounds: int, requests: int, replicas: int, as_json: bool) -> None:
    """Measure added TTFT and requests per second of the whole path."""
    config, say = simulated(_INSTANT, replicas), Console(stderr=True).print
    results: dict[int, dict[str, Measured]] = {}
    with application(config) as served:
        # Ray is imported once its environment is set.
        from ray import serve

        from sluice.benchmarks.micro.baseline_app import build_baseline

        # As a separate application it has a controller of its own.
        serve.run(build_baseline(config), name="baseline", route_prefix=_PATHS["serve"])
        for concurrency in (1, 16):
            paths: dict[str, Measured] = {path: {name: [] for name in _FIGURES} for path in _PATHS}
            results[concurrency] = paths
            for prefix in _PATHS.values():
                _round(served.url + prefix, _WARM_UP, concurrency)
            for number in range(rounds):
                for path, prefix in _PATHS.items():
                    found = _round(served.url + prefix, requests, concurrency)
                    for name, value in zip(_FIGURES, found, strict=True):
                        paths[path][name].append(value)
                say(f"concurrency {concurrency}: round {number + 1} of {rounds}")
    rows = [row for concurrency, paths in results.items() for row in _rows(concurrency, paths)]
    title = "median over rounds (least .. most)"
    show(results, [table(rows, "concurrency", "path", *_FIGURES, title=title)], as_json)


def _round(url: str, requests: int, concurrency: int) -> tuple[float, float, float]:
    """Send ``requests``, at least one by each of ``concurrency`` clients; :data:`_FIGURES`."""
    further = iter(range(requests - concurrency))
    done = asyncio.run(load([url], concurrency, _TOKENS, inf, lambda: next(further, None) is None))
    ttfts_ms = sorted(1e3 * each for each in done.ttfts_s)
    p99_ms = ttfts_ms[int(0.99 * len(ttfts_ms))]
    return median(ttfts_ms), p99_ms, len(ttfts_ms) / done.elapsed_s


def _rows(concurrency: int, paths: dict[str, Measured]) -> Iterator[dict[str, str]]:
    """Both paths, and the median of their differences within a round."""
    for path, figures in paths.items():
        shown = {
            name: f"{median(each):.2f} ({min(each):.2f} .. {max(each):.2f})"
            for name, each in figures.items()
        }
        yield {"concurrency": str(concurrency), "path": path, **shown}
    serve, ours = paths["serve"], paths["sluice"]
    added = median(map(sub, ours["ttft_p50_ms"], serve["ttft_p50_ms"]))
    ratio = median(map(truediv, ours["per_second"], serve["per_second"]))
    shown = {"ttft_p50_ms": f"{added:+.2f}", "per_second": f"x {ratio:.2f}"}
    yield {"concurrency": str(concurrency), "path": "difference", **shown}


if __name__ == "__main__":
    main()
