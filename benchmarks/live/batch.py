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

from sluice.benchmarks.live import systems as live
from sluice.benchmarks.live.client import Json, LoadError
from sluice.benchmarks.live.engine import MODEL
from sluice.benchmarks.live.mix import WORDS, Kind, Pattern, body_of
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
"""Share of the lines that a full batch did beside chat that short ones are to do."""

_WARM_UP_S: Final = 5.0
_BEGIN_S: Final = 3.0
_POLL_S: Final = 0.5
_ENDED: Final = ("completed", "expired", "failed", "cancelled")


def config_of(bench: Bench, port: int) -> Json:
    """One replica, and routers that keep batches in the benchmark's folder."""
    windows = ["24h", *(f"{each}m" for each in MINUTES)]
    batches = {"directory": str(bench.folder / "batches"), "completion_windows": windows}
    return {
        "engine": {"served_model_name": MODEL},
        "replica": {"count": 1},
        "router": {**router(port, CLASSES), "batches": batches},
    }


def lines_of(name: str, count: int) -> bytes:
    """The input of a batch with texts of its own."""
    chance = Random(name)
    lines = []
    for number in range(count):
        prompt, output = (
            chance.randint(*span) for span in (LINE.prompt_tokens, LINE.output_tokens)
        )
        text = " ".join(chance.choices(WORDS, k=prompt))
        body = {"model": MODEL, "prompt": text, "max_tokens": output, "ignore_eos": True}
        line = {"custom_id": f"{number}", "method": "POST", "url": "/v1/completions", "body": body}
        lines.append(json.dumps(line).encode())
    return b"\n".join(lines)


class Batches:
    """The files and batches of a system."""

    def __init__(self, system: System) -> None:
        self._url = f"{system.urls[0]}/v1"

    def submit(self, name: str, count: int, window: str) -> Json:
        """A new batch of ``count`` lines."""
        mark, head = b"--line", b'content-disposition: form-data; name="'
        parts = (head + b'purpose"\r\n\r\nbatch', head + b'file"; filename="a"\r\n\r\n')
        form = b"\r\n".join(
            (mark, parts[0], mark, parts[1] + lines_of(name, count), mark + b"--\r\n")
        )
        file = self._ask("files", form, "multipart/form-data; boundary=line")
        body = {
            "input_file_id": file["id"],
            "endpoint": "/v1/completions",
            "completion_window": window,
        }
        return self._ask("batches", json.dumps(body).encode())

    def now(self, batch: Json) -> Json:
        """The batch as it is now."""
        return self._ask(f"batches/{batch['id']}")

    def cancel(self, batch: Json) -> int:
        """End it; the lines that it has done."""
        self._ask(f"batches/{batch['id']}/cancel", b"")
        done: int = self.ended(batch)["request_counts"]["completed"]
        return done

    def ended(self, batch: Json) -> Json:
        """The batch when it has ended."""
        while (found := self.now(batch))["status"] not in _ENDED:
            time.sleep(_POLL_S)
        return found

    def _ask(self, path: str, body: bytes | None = None, kind: str = "application/json") -> Json:
        request = urllib.request.Request(f"{self._url}/{path}", body, {"content-type": kind})
        with urllib.request.urlopen(request, timeout=60) as answer:
            found: Json = json.load(answer)
        return found


def beside(bench: Bench, system: System, rate: float, seconds: float, run: str, full: bool) -> Json:
    """Chats of some seconds, alone or beside a full batch; another pair has other texts."""
    batches, workload = Batches(system), CHAT.workload(rate, seconds, len(run), SLOS)
    batch = batches.submit(run, FULL_LINES, "24h") if full else None
    time.sleep(_BEGIN_S)
    begun_s = time.monotonic()
    body = body_of(f"{run} {full}")
    done = live.run(bench, system, {}, seconds, workload, body=body, exact=False).outcomes
    took_s = time.monotonic() - begun_s
    times = [1e3 * each.ttft_s for each in done if each.ttft_s is not None]
    if len(times) < len(done):
        raise LoadError(f"{len(done) - len(times)} of {len(done)} chats were not answered")
    found = {"chats": len(done), "ttft_ms": quantiles(times, at=(0.5, 0.95))}
    found["attained"] = sum(each.attained for each in done)
    if batch is not None:
        found["lines_per_s"] = round(batches.cancel(batch) / (took_s + _BEGIN_S), 2)
    return found


def short(bench: Bench, system: System, rate: float, lines_per_s: float) -> list[Json]:
    """Batches with windows of minutes, submitted together beside chats."""
    batches = Batches(system)
    lines = max(1, round(PART * lines_per_s * 60))
    made = [batches.submit(f"{minutes}m", lines, f"{minutes}m") for minutes in MINUTES]
    seconds = 60.0 * MINUTES[-1]
    workload, body = CHAT.workload(rate, seconds, 1, SLOS), body_of("short")
    live.run(bench, system, {}, seconds, workload, body=body, exact=False)
    rows = []
    for each in map(batches.ended, made):
        end = each["completed_at"] or each["expired_at"] or each["failed_at"]
        row = {"window": each["completion_window"], "lines": lines, "promise": each["promise"]}
        rows.append(row | {"status": each["status"], "seconds": end - each["created_at"]})
    return rows


@click.command()
@number_option("--rate", default=2.0, least=0.1, most=1e3, words="Chats a second.")
@number_option("--seconds", default=20.0, least=5, most=3_600, words="How long chats arrive.")
@number_option("--rounds", default=3, least=1, most=100, words="Pairs of runs.")
@click.option("--windows/--no-windows", default=True, help="Short batches after the pairs.")
@as_json
def batch(rate: float, seconds: float, rounds: int, windows: bool, as_json: bool) -> None:
    """Chat's TTFT alone and beside a full batch, in turns, and batches with short windows.

    Starts one vLLM replica here. A pair of runs takes a minute, the short batches three.
    """
    rows: list[Json] = []
    with campaign() as bench, sluice("sluice", config_of)(bench) as system:
        for full in (False, True):
            beside(bench, system, rate, _WARM_UP_S, "warm-up", full)
        for number in range(rounds):
            order = (False, True) if number % 2 else (True, False)
            name = "x" * (number + 1)  # its length is the seed
            found = {full: beside(bench, system, rate, seconds, name, full) for full in order}
            rows.append({"round": number, "alone": found[False], "beside": found[True]})
            bench.say(f"{rows[-1]}")
        lines_per_s = fmean(each["beside"]["lines_per_s"] for each in rows)
        kept = short(bench, system, rate, lines_per_s) if windows else []
    ratios = {}
    for place, name in enumerate(("p50", "p95")):
        pairs = [
            (each["beside"]["ttft_ms"][place], each["alone"]["ttft_ms"][place]) for each in rows
        ]
        logs = Estimate.of([log(beside / alone) for beside, alone in pairs])
        mean, half = logs.mean, logs.half_width
        ratios[name] = [round(exp(each), 3) for each in (mean, mean - half, mean + half)]
    columns = [f"{run}.{name}" for run in ("alone", "beside") for name in ("chats", "ttft_ms")]
    pairs_table = table(rows, "round", *columns, "beside.lines_per_s", title="TTFT P50 / P95, ms")
    title = f"TTFT beside a batch over that alone, with its 95 % interval: {ratios}"
    ended = table(kept, "window", "lines", "promise", "status", "seconds", title="Short windows")
    found_all = {"rounds": rows, "ratios": ratios, "windows": kept}
    show(found_all, [pairs_table, *([ended] if kept else [])], as_json, title)
