"""Quotes, offers and announcements on a real vLLM replica: ``sluice bench quotes --real``."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Final

import aiohttp
import click
import numpy as np

from sluice.benchmarks.experiments.quotes import counted, cover
from sluice.benchmarks.live.client import Json
from sluice.benchmarks.live.engine import MODEL
from sluice.benchmarks.live.mix import body_of
from sluice.benchmarks.live.promises import CLASSES, PATTERN, SLOS, capacity_of
from sluice.benchmarks.live.report import table
from sluice.benchmarks.live.systems import (
    Bench,
    campaign,
    metrics,
    router,
    sluice,
    until_stopped,
)
from sluice.benchmarks.options import number_option, show
from sluice.router import wire
from sluice.scheduling.request.objective import OBJECTIVES
from sluice.simulation.workload import Arrival

LOADS: Final = (0.7, 1.3)
ACCEPT_S: Final = 0.5
"""How long a client takes to take up an offer, seconds."""


OPTIONS: Final = (
    click.option("--real", is_flag=True, help="One vLLM replica here, no simulation."),
    number_option(
        "--seconds", default=60.0, least=5, most=3_600, words="With --real: arrivals of a run."
    ),
)
"""Of :func:`measure`, for ``options.with_real``."""


def make_config(_: Bench, port: int) -> Json:
    """One replica, and classes that refuse what cannot be promised."""
    classes = {
        name: entry.model_copy(update={"when_unattainable": "reject"})
        for name, entry in CLASSES.items()
    }
    parts = {"engine": {"served_model_name": MODEL}, "replica": {"count": 1}}
    return {**parts, "router": router(port, classes)}


def measure(seconds: float, seeds: Sequence[int], as_json: bool) -> None:
    """Quote and then send every request, at each load; refused clients take up their offers. Also
    counts the promises that streams said they would miss."""
    rows: list[Json] = []
    with campaign() as bench, sluice("sluice", make_config)(bench) as system:
        load_1 = capacity_of(bench, system, 1, seconds / 3, seeds[0])
        bench.say(f"capacity {load_1:.2f} requests/s")
        for seed in seeds:
            for load in LOADS:
                sent = _run(system.urls[0], load * load_1, seconds, seed, f"{seed} {load}")
                before = promises(system.urls[0])
                found = figures_of(asyncio.run(until_stopped(bench, sent)))
                after = promises(system.urls[0])
                counts = {name: after[name] - count for name, count in before.items()}
                rows.append({"load": load, "seed": seed, **found, **counts})
                bench.say(str(rows[-1]))
    shown = table(rows, *rows[0], title="quotes, offers and announcements")
    show({"load_1": load_1, "rows": rows}, [shown], as_json)


async def _run(url: str, rate: float, seconds: float, seed: int, name: str) -> list[Json]:
    arrivals = PATTERN.workload(rate, seconds, seed, SLOS).arrivals
    bodies, begun_s = body_of(name), time.monotonic()
    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one(number: int, arrival: Arrival) -> Json:
            await asyncio.sleep(begun_s + arrival.arrival_s - time.monotonic())
            body = bodies(MODEL, number, arrival)
            body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
            body["slo"] = {wire.CLASS: arrival.slo.service_class}
            async with session.post(wire.QUOTE_PATH, json=body) as answer:
                quote = await answer.json()
            seen, error = await _send(session, body)
            found = {"quote": quote, "seen": seen, "stated": error is None}
            found["arrived_s"] = arrival.arrival_s
            if error is not None and (offer := error.get("offer")) is not None:
                await asyncio.sleep(ACCEPT_S)
                slo = {each: offer[each] for each in (wire.TTFT, wire.TPOT) if each in offer}
                body["slo"] |= slo
                found["stated_ms"], found["offer"] = arrival.slo.columns[0] * 1e3, offer
                _, error = await _send(session, body, {wire.QUOTE_HEADER: offer["quote"]})
                found["promised"] = error is None
            return found

        return list(await asyncio.gather(*(one(n, each) for n, each in enumerate(arrivals))))


async def _send(
    session: aiohttp.ClientSession, body: Json, headers: Json | None = None
) -> tuple[list[float], Json | None]:
    """TTFT, TPOT and end-to-end time as the client sees them, ms, or the error."""
    sent_s = time.monotonic()
    async with session.post("/v1/chat/completions", json=body, headers=headers) as answer:
        if answer.status != 200:
            return [], (await answer.json())["error"]
        times_s = [
            time.monotonic() - sent_s
            async for line in answer.content
            if line.startswith(b"data: {") and json.loads(line[6:]).get("choices")
        ]
    times_s = times_s[1:] or times_s  # the first event has the role alone
    pace_s = (times_s[-1] - times_s[0]) / max(1, len(times_s) - 1)
    return [1e3 * each for each in (times_s[0], pace_s, times_s[-1])], None


def figures_of(found: Sequence[Json]) -> dict[str, float]:
    """As the simulated experiment's."""
    arrived_s = [each["arrived_s"] for each in found]
    ended_s = [each["arrived_s"] + sum(each["seen"][2:]) / 1e3 for each in found]
    pairs = [
        (each["seen"], [list(each["quote"][f"{name}_ms"].values()) for name in OBJECTIVES])
        for each in found[counted(arrived_s, ended_s)]
        if each["seen"] and wire.TTFT in each["quote"]
    ]
    figures = {name: round(share, 3) for name, share in cover(pairs).items()}
    taken = [each for each in found if "offer" in each]
    later_by = [each["offer"].get(wire.TTFT, 0.0) / each["stated_ms"] for each in taken]
    return {
        "requests": len(found),
        "quoted": len(pairs),
        **figures,
        "refused": sum(not each["stated"] for each in found),
        "taken": len(taken),
        "held": sum(each["promised"] for each in taken),
        "later": round(float(np.median(later_by)), 2) if taken else 0.0,
    }


def promises(url: str) -> dict[str, float]:
    """Promised streams so far: all that were missed, and those announced by what became of them."""
    pages = {outcome: metrics(url, outcome=outcome) for outcome in ("missed", "kept")}
    said = "sluice_promises_announced_total"
    counts = {f"announced_{outcome}": page.get(said, 0.0) for outcome, page in pages.items()}
    return {"missed": pages["missed"].get("sluice_promises_total", 0.0), **counts}
