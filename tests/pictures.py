"""The pictures of the documents, by ``make pictures``: the live page and the chart of the peers.

Each picture has a digest of what it was made from, so a test notices when that has changed. The
page shows a real router, a real controller and replicas with simulated engines, in this process."""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import uvicorn
from matplotlib.figure import Figure
from PIL import Image, PngImagePlugin

import sluice.router.admin.api
from sluice.benchmarks.live.client import replay
from sluice.controller.config import ControllerConfig
from sluice.controller.discovery import compile_loops
from sluice.deploy.ray_start import free_port
from sluice.replica.config import SimulatedEngineConfig
from sluice.router.admin.api import AdminService
from sluice.router.config import RouterConfig, ServiceClass
from sluice.scheduling.batching.warm_up import warm_up
from sluice.simulation.generators import Gamma
from sluice.simulation.workload import Arrival, Workload
from tests.documents import ROOT
from tests.replica.waiting import until
from tests.router.browser import browser
from tests.router.far_side import Edge
from tests.router.local_controller import LocalController
from tests.router.local_replicas import Replicas

KEY = "admin-key-of-the-picture"
DIGEST = "Made from"
"""The text of the page's picture with the digest of its sources."""

PEERS, RESULTS = (ROOT / "docs" / name for name in ("peers.svg", "results/peers.json"))

SHARES = {"interactive": 0.5, "standard": 0.35, "background": 0.15}
PROMPT_TOKENS, OUTPUT_TOKENS = (100, 800), (10, 120)


class Scene(NamedTuple):
    """A fleet under load: ``rate`` requests per second for ``seconds``. The times of engines and
    objectives are scaled by ``slower``, so that this process keeps up."""

    replicas: int
    rate: float = 0.0
    seconds: float = 0.0
    slower: float = 1.0
    scroll_to: str = ""

    @property
    def classes(self) -> dict[str, ServiceClass]:
        """The service classes."""
        return {
            "interactive": ServiceClass(
                ttft_ms=1_500 * self.slower, tpot_ms=60 * self.slower, priority=4
            ),
            "standard": ServiceClass(
                ttft_ms=5_000 * self.slower, tpot_ms=100 * self.slower, priority=2
            ),
            "background": ServiceClass(priority=1),
        }

    def load(self) -> Workload:
        """Requests of the three classes."""
        chance = np.random.default_rng(1)
        times = Gamma(self.rate, 1.0).times(round(2 * self.rate * self.seconds), chance)
        arrivals = []
        for time_s in times[times < self.seconds].tolist():
            name = str(chance.choice(list(SHARES), p=list(SHARES.values())))
            prompt, output = (
                int(chance.integers(*span)) for span in (PROMPT_TOKENS, OUTPUT_TOKENS)
            )
            slo = self.classes[name].objective(name)
            arrivals.append(Arrival(time_s, prompt, output, slo))
        return Workload("picture", tuple(arrivals))


SCENES = {
    "idle": Scene(2, slower=3),
    "loaded": Scene(2, rate=0.7, seconds=80, slower=3),
    "overloaded": Scene(2, rate=8, seconds=60, slower=3),
    "many": Scene(64, rate=12, seconds=60, slower=12, scroll_to="#replicas-title"),
}
SCREENS = {"desk": (1400, 900, {}), "phone": (390, 844, {"phone": True})}


def picture(scene: str, screen: str) -> Path:
    """Where a picture of the page is."""
    return ROOT / "docs" / "page" / f"{scene}-{screen}.png"


def digest(files: Iterable[Path]) -> str:
    """Of the contents of files."""
    found = hashlib.sha256()
    for file in files:
        found.update(file.read_bytes())
    return found.hexdigest()


def page_sources() -> list[Path]:
    """The files of which the page is made."""
    return sorted(Path(sluice.router.admin.api.__file__).with_name("static").iterdir())


@asynccontextmanager
async def serving(scene: Scene) -> AsyncIterator[str]:
    """The address of a router over the scene's fleet."""
    settled = ControllerConfig(stale_after_s=10)
    compile_loops(settled)
    warm_up("deadline_triage")
    controller = LocalController(time.monotonic, settled)
    engine = SimulatedEngineConfig(
        step_s=0.008 * scene.slower, token_s=0.0004 * scene.slower, context_token_s=1e-7
    )
    side = Replicas(controller, engine, 0.1)
    names = np.random.default_rng(7).choice(
        list("bcdfghjkmnpqrstvwxz23456789"), (scene.replicas, 8)
    )
    for name in names:
        await side.start("".join(name))
    classes = {name: each.model_dump() for name, each in scene.classes.items()}
    settings = {
        **{"admin": {"keys": [KEY]}, "classes": classes, "default_class": "standard"},
        "stall_after_s": 300,  # the machine may be busy with other things
    }
    admin = AdminService({"m": controller})  # type: ignore[dict-item]
    config = RouterConfig.model_validate(settings)
    edge = Edge(side, controller, config, admin_service=admin)  # type: ignore[arg-type]
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(edge.api, port=port, log_level="error", lifespan="off"))

    async def push() -> None:
        while True:
            await controller.hear(edge.metrics)
            await asyncio.sleep(1)

    tasks = asyncio.create_task(server.serve()), asyncio.create_task(push())
    await until(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{port}"
        assert not any(task.done() for task in tasks)
    finally:
        # Requests, replicas and the server at once, so that none sees another one end.
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)


async def draw_scene(name: str) -> None:
    """Serve, send the load, and save what the page shows at its end."""
    scene = SCENES[name]
    async with serving(scene) as url:
        sent = asyncio.Event()
        where = f"{url}/v1/completions", "m"
        if scene.rate:
            load = replay(*where, scene.load(), on_sent=sent.set, exact=False)
            tasks = asyncio.create_task(load), asyncio.create_task(sent.wait())
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.to_thread(_take, name, url)


def _take(name: str, url: str) -> None:
    made_from = PngImagePlugin.PngInfo()
    made_from.add_text(DIGEST, digest(page_sources()))
    with browser() as chromium:
        for screen, (width, height, look) in SCREENS.items():
            with chromium.tab(width, height, **look) as tab:
                tab.go(f"{url}/ui#key={KEY}")
                tab.until("!document.querySelector('#main').hidden")
                tab.until("document.querySelector('#tiles > div')")
                time.sleep(5)  # for two more answers, of which the lines beside figures are made
                path = picture(name, screen)
                print(path.name, tab.eval("document.documentElement.scrollHeight"), "px high")
                if SCENES[name].scroll_to:
                    tab.eval(f"document.querySelector('{SCENES[name].scroll_to}').scrollIntoView()")
                tab.picture(path)
                with Image.open(path) as shot:
                    few = shot.convert("RGB").quantize(128)
                few.save(path, pnginfo=made_from, optimize=True)


def draw_peers() -> None:
    """Draw the measured attainment against load, but not that with the papers' policies."""
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))["summary"]
    rows = [row for row in rows if not row["system"].startswith("sluice-")]
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for name in dict.fromkeys(row["system"] for row in rows):
        own = sorted((r for r in rows if r["system"] == name), key=lambda row: row["load"])
        ends = np.array([row["attained_interval"] for row in own])
        axes.errorbar(
            [row["load"] for row in own],
            [row["attained"] for row in own],
            yerr=(ends[:, 1] - ends[:, 0]) / 2,
            **{"label": name, "marker": "o", "markersize": 3, "capsize": 2},
        )
    axes.set(
        title="Requests within all objectives, bursty",
        xlabel="load, 1 is the capacity of stock vLLM",
        ylabel="share of sent requests",
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(PEERS, dpi=120)
    with PEERS.open("a", encoding="utf-8") as file:
        file.write(f"<!-- {DIGEST} {digest([RESULTS])} -->\n")


def main(scenes: Sequence[str]) -> None:
    """Draw these scenes of the page; without any, all of them and the chart."""
    if not scenes:
        draw_peers()
    picture("", "").parent.mkdir(exist_ok=True)
    for name in scenes or SCENES:
        asyncio.run(draw_scene(name))


if __name__ == "__main__":
    main(sys.argv[1:])
