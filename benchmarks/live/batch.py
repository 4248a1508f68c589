"""Chat beside a full batch, and batches with short windows, on a real vLLM engine: ``sluice bench
batch``."""

from __future__ import annotations

import json
import time
import urllib.request
from math import exp, log
from random import Random
from statistics import fmean
from typing import Final

import click

from sluice.benchmarks.experiments.kinds import Kind
from sluice.benchmarks.live import systems as live
from sluice.benchmarks.live.client import Json, LoadError
from sluice.benchmarks.live.engine import MODEL
from sluice.benchmarks.live.mix import WORDS, Pattern, body_of
from sluice.benchmarks.live.report import quantiles, table
from sluice.benchmarks.live.systems import Bench, System, campaign, objectives, router, sluice
from sluice.benchmarks.options import as_json, number_option, show
from sluice.benchmarks.report import Estimate
from sluice.router.config import ServiceClass

CLASSES: Final = {
    "chat": ServiceClass(ttft_ms=1_000, tpot_ms=100, priority=2),
    "batch": ServiceClass(when_unattainable="reject"),
}
SLOS: Final = objectives(CLASSES)
CHAT: Final = Pattern("chat", kinds={"chat": Kind(1.0, (120, 480), (16, 64))})
LINE: Final = Kind(1.0, (100, 400), (16, 96))
FULL_LINES: Final = 5_000
MINUTES: Final = (1, 2, 3)
"""Windows of the short batches."""

PART: Final = 0.6
"""The short batches are to do this share of the lines that a full one did beside chat."""

_POLL_S: Final = 0.5


def config_of(bench: Bench, port: int) -> Json:
    """One replica, and routers that keep batches in the benchmark's folder."""
    windows = ["24h", *(f"{each}m" for each in MINUTES)]
    batches = {"directory": str(bench.folder / "batches"), "completion_windows": windows}
    parts = {"engine": {"served_model_name": MODEL}, "replica": {"count": 1}}
    return {**parts, "router": {**router(port, CLASSES), "batches": batches}}


def line_of(number: int, chance: Random) -> bytes:
    """A line of a batch with words of its own."""
    prompt, output = (chance.randint(*span) for span in (LINE.prompt_tokens, LINE.output_tokens))
    text = " ".join(chance.choices(WORDS, k=prompt))
    body = {"model": MODEL, "prompt": text, "max_tokens": output, "ignore_eos": True}
    request = {"method": "POST", "url": "/v1/completions", "body": body}
    return json.dumps({"custom_id": f"{number}", **request}).encode()


def ask(
    system: System, path: str, body: bytes | None = None, kind: str = "application/json"
) -> Json:
    """What the API answers."""
    request = urllib.request.Request(f"{system.urls[0]}/v1/{path}", body, {"content-type": kind})
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: Json = json.load(answer)
    return found


def submit(system: System, name: str, count: int, window: str) -> Json:
    """A new batch of ``count`` lines."""
    chance = Random(name)
    lines = b"\n".join(line_of(number, chance) for number in range(count))
    part = b'--mark\r\ncontent-disposition: form-data; name="'
    form = part + b'purpose"\r\n\r\nbatch\r\n' + part + b'file"; filename="a"\r\n\r\n' + lines
    file = ask(system, "files", form + b"\r\n--mark--\r\n", "multipart/form-data; boundary=mark")
    body = {"input_file_id": file["id"], "completion_window": window}
    return ask(system, "batches", json.dumps(body | {"endpoint": "/v1/completions"}).encode())


def ended(system: System, batch: Json) -> Json:
    """The batch when it has ended."""
    while (found := ask(system, f"batches/{batch['id']}"))["status"] not in (
        *("completed", "expired", "failed", "cancelled"),
    ):
        time.sleep(_POLL_S)
    return found


def chat(bench: Bench, system: System, rate: float, seconds: float, run: str, full: bool) -> Json:
    """Chats of some seconds, alone or beside a full batch; their times are the same in both."""
    workload = CHAT.workload(rate, seconds, Random(run).randrange(1 << 30), SLOS)
    begun_s, batch = time.monotonic(), submit(system, run, FULL_LINES, "24h") if full else None
    time.sleep(3.0)
    body = body_of(f"{run} {full}")
    sent = live.run(bench, system, {}, seconds, workload, body=body, exact=False).outcomes
    times = [1e3 * each.ttft_s for each in sent if each.ttft_s is not None]
    if len(times) < len(sent):
        raise LoadError(f"{len(sent) - len(times)} of {len(sent)} chats were not answered")
    found: Json = {"in_time": sum(each.attained for each in sent), "chats": len(sent)}
    found["ttft_ms"] = quantiles(times, at=(0.5, 0.95))
    if batch is not None:
        took_s = time.monotonic() - begun_s
        ask(system, f"batches/{batch['id']}/cancel", b"")
        done = ended(system, batch)
        found["lines_per_s"] = round(done["request_counts"]["completed"] / took_s, 2)
    return found


def short(bench: Bench, system: System, rate: float, lines_per_s: float) -> list[Json]:
    """Batches with windows of minutes, which begin together, beside chats."""
    lines = max(1, round(PART * lines_per_s * 60))
    made = [submit(system, f"{each}m", lines, f"{each}m") for each in MINUTES]
    chat(bench, system, rate, 60.0 * MINUTES[-1], "short", full=False)
    rows = []
    for each in (ended(system, batch) for batch in made):
        end = each["completed_at"] or each["expired_at"] or each["failed_at"]
        row = {"window": each["completion_window"], "lines": lines, "promise": each["promise"]}
        rows.append({**row, "status": each["status"], "seconds": end - each["created_at"]})
    return rows


@click.command()
@number_option("--rate", default=2.0, least=0.1, most=1e3, words="Chats a second.")
@number_option("--seconds", default=20.0, least=5, most=3_600, words="How long chats arrive.")
@number_option("--rounds", default=3, least=0, most=100, words="Pairs of runs.")
@as_json
def batch(rate: float, seconds: float, rounds: int, as_json: bool) -> None:
    """Measure chats beside a full batch, and batches with short windows.

    Starts a vLLM replica here. A pair of runs takes a minute, the short batches three.

    \b
    Example:
      sluice bench batch --rounds 1
    """
    rows: list[Json] = []
    with campaign() as bench, sluice("sluice", config_of)(bench) as system:
        first = [chat(bench, system, rate, 5.0, "warm-up", full) for full in (False, True)]
        for number in range(rounds):
            row: Json = {"round": number}
            for full in (False, True) if number % 2 else (True, False):
                name = "beside" if full else "alone"
                row[name] = chat(bench, system, rate, seconds, f"round {number}", full)
            rows.append(row)
            bench.say(f"{row}")
        besides = [row["beside"] for row in rows] or first[1:]
        windows = short(bench, system, rate, fmean(each["lines_per_s"] for each in besides))
    times = {}
    for place, name in enumerate(("P50", "P95")):
        pairs = [(row["beside"]["ttft_ms"][place], row["alone"]["ttft_ms"][place]) for row in rows]
        mean, half, _ = Estimate.of([log(beside / alone) for beside, alone in pairs])
        times[name] = [round(exp(each), 3) for each in (mean, mean - half, mean + half)]
    title = f"chats; TTFT beside a batch over that alone, with 95 % interval: {times}"
    columns = [
        f"{run}.{of}" for run in ("alone", "beside") for of in ("in_time", "chats", "ttft_ms")
    ]
    shown = [table(rows, "round", *columns, "beside.lines_per_s", title=title)]
    shown.append(table(windows, *windows[0], title="batches with short windows"))
    show({"rounds": rows, "times": times, "windows": windows}, shown, as_json)
