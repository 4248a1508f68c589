"""The pictures of the documents, by ``make pictures``: the live page and the chart of the peers.

Each picture has a digest of what it was made from, so a test notices when that has changed."""

from __future__ import annotations

import asyncio
import hashlib
import json
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from PIL import Image, PngImagePlugin

import sluice.router.admin.api
from sluice.benchmarks.live.client import replay
from sluice.benchmarks.live.peers import attainment
from sluice.benchmarks.live.systems import SLUICE, spawned, wait_until_ready
from sluice.benchmarks.report import draw
from sluice.deploy.ray_start import free_port
from sluice.router.config import ServiceClass
from sluice.simulation.generators import Gamma
from sluice.simulation.workload import Arrival, Workload
from tests.documents import ROOT
from tests.router.browser import browser

KEY = "admin-key-of-the-picture"
DIGEST = "Made from"
"""The text of the page's picture with the digest of its sources."""

PAGE, PEERS, RESULTS = (
    ROOT / "docs" / name for name in ("page.png", "peers.svg", "results/peers.json")
)

SHOWN = 1_880
"""Pixels of its height: the list of decisions is longer."""

SECONDS = 75.0
RATE = 7.0
PROMPT_TOKENS, OUTPUT_TOKENS = (100, 1_500), (10, 120)
CLASSES = {
    "interactive": ServiceClass(ttft_ms=600, tpot_ms=40, priority=4),
    "standard": ServiceClass(ttft_ms=3_000, tpot_ms=80, priority=2),
    "background": ServiceClass(priority=1),
}
SHARES = (0.5, 0.35, 0.15)


def digest(files: Iterable[Path]) -> str:
    """Of the contents of files."""
    found = hashlib.sha256()
    for file in files:
        found.update(file.read_bytes())
    return found.hexdigest()


def page_sources() -> list[Path]:
    """The files of which the page is made."""
    return sorted(Path(sluice.router.admin.api.__file__).with_name("static").iterdir())


def load() -> Workload:
    """Bursts of requests of three classes, about a third more than two replicas can serve."""
    chance = np.random.default_rng(1)
    times = Gamma(RATE, 2.0).times(round(2 * RATE * SECONDS), chance)
    arrivals = []
    for time_s in times[times < SECONDS].tolist():
        name = str(chance.choice(list(CLASSES), p=SHARES))
        prompt, output = (int(chance.integers(*span)) for span in (PROMPT_TOKENS, OUTPUT_TOKENS))
        arrivals.append(Arrival(time_s, prompt, output, CLASSES[name].objective(name)))
    return Workload("picture", tuple(arrivals))


def config(port: int) -> str:
    """Of two simulated replicas with the classes, JSON."""
    classes = {name: each.model_dump() for name, each in CLASSES.items()}
    admin = {"keys": [KEY]}
    times = {"step_s": 0.008, "token_s": 0.0004, "context_token_s": 1e-7}
    return json.dumps(
        {
            "engine": {"kind": "simulated", "model": "local", "simulated": times},
            "replica": {"count": 2, "num_cpus": 0.1},
            "router": {
                **{"port": port, "classes": classes, "default_class": "standard", "admin": admin}
            },
        }
    )


def draw_page() -> None:
    """Serve, send the load, and save what the page shows at its end."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory(prefix="sluice-") as name:
        folder = Path(name)
        file = folder / "config.json"
        file.write_text(config(port))
        command: list[str | Path] = [SLUICE, "serve", "--config", file]
        with spawned(command, folder / "log") as server:
            wait_until_ready(server, f"{url}/health", folder / "log", 600.0, threading.Event())

            async def run() -> None:
                sent = asyncio.Event()
                where = f"{url}/v1/completions", "local"
                answers = asyncio.create_task(replay(*where, load(), on_sent=sent.set))
                await sent.wait()
                await asyncio.to_thread(_take, f"{url}/ui#key={KEY}")
                answers.cancel()

            asyncio.run(run())
    made_from = PngImagePlugin.PngInfo()
    made_from.add_text(DIGEST, digest(page_sources()))
    with Image.open(PAGE) as shot:
        top = shot.crop((0, 0, shot.width, SHOWN)).quantize(64)
    top.save(PAGE, pnginfo=made_from, optimize=True)


def _take(address: str) -> None:
    with browser() as chromium, chromium.tab(1280, 1790) as tab:
        tab.go(address)
        tab.until("document.querySelectorAll('[data-replica]').length === 2")
        tab.picture(PAGE)


def draw_peers() -> None:
    """Draw the measured attainment against load, but not that with the papers' policies."""
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))["summary"]
    rows = [row for row in rows if not row["system"].startswith("sluice-")]
    draw(attainment(rows)["attainment-bursty"], PEERS)
    with PEERS.open("a", encoding="utf-8") as file:
        file.write(f"<!-- {DIGEST} {digest([RESULTS])} -->\n")


if __name__ == "__main__":
    draw_peers()
    draw_page()
