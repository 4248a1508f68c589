"""The live page in a real browser, over the real API and the real controller."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import pytest
import uvicorn

from sluice.controller.config import ControllerConfig
from sluice.deploy.ray_start import free_port
from sluice.protocol.messages import FaultNotice, MetricSample, MetricsPush, RequestEnding
from sluice.router.admin.api import AdminService
from sluice.router.config import RouterConfig
from sluice.router.metrics.instruments import Outcome, RequestFigures
from sluice.router.request.call import Call
from sluice.router.request.prompt import PromptSize
from sluice.scheduling.fleet.breaker import FAILURES, ReplicaFault
from sluice.scheduling.request.job import RouteQuery, Tier
from sluice.scheduling.request.lateness import Cause
from sluice.scheduling.request.objective import SLO, TokenClock
from tests.controller.fleet import decode_row, delta, hello, waiting_row
from tests.router.browser import Browser, Tab, browser
from tests.router.far_side import Edge, FarSide, serve
from tests.router.local_controller import LocalController

KEY = "admin-key-of-the-page-tests"
MARKUP = "<img src=x onerror=alert(1)>"
SPAN_S = 200
POLL = "document.dispatchEvent(new Event('visibilitychange'))"
"""As if the page had come back into sight, which makes it ask at once."""

Result = TypeVar("Result")

CLASSES = {
    "interactive": SLO(0.5, 0.05, priority=4, service_class="interactive"),
    "standard": SLO(2.0, 0.1, priority=2, service_class="standard"),
    "batch": SLO(service_class="batch"),
}
STALLED = ((Cause.ENGINE_STALL, 9.0), (Cause.DECODES, 1.2))
PATIENT = ControllerConfig(stale_after_s=6_000)
"""Replicas that say hello once count as alive."""


class Site:
    """A router over HTTP with a fleet that has some past."""

    def __init__(
        self, models: int = 1, past: bool = True, config: ControllerConfig = PATIENT
    ) -> None:
        self._past = past
        self.ahead_s = -float(SPAN_S)
        self.controllers = {
            f"model-{index}": LocalController(lambda: time.monotonic() + self.ahead_s, config)
            for index in range(models)
        }
        self.local = self.controllers["model-0"]
        self.edge = Edge(
            FarSide(a=serve),
            self.local,  # type: ignore[arg-type]
            RouterConfig.model_validate({"admin": {"keys": [KEY]}}),
            admin_service=AdminService(self.controllers),
        )
        self.port = free_port()
        config = uvicorn.Config(self.edge.api, port=self.port, log_level="error", lifespan="off")
        self._server = uvicorn.Server(config)
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.url = f"http://127.0.0.1:{self.port}"

    def _run(self) -> None:
        async def run() -> None:
            self._loop = asyncio.get_running_loop()
            for local in self.controllers.values() if self._past else ():
                await self._live(local)
            self._ready.set()
            await self._server.serve()

        asyncio.run(run())

    def __enter__(self) -> Site:
        self._thread.start()
        assert self._ready.wait(60)
        deadline = time.monotonic() + 120
        while not self._server.started:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(30)

    def do(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run something where the server runs."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)

    async def _live(self, local: LocalController) -> None:
        """A few minutes of a fleet's life."""
        await local.controller.hello(hello("k3x9a2bq"))
        await local.controller.hello(hello("p7w1m4zt", [waiting_row(900, 9_000)]))
        await local.controller.hello(hello(MARKUP))
        await local.hear(self.edge.metrics)
        for period in range(20):
            for index in range(30):
                self._serve_one(list(CLASSES)[index % 3], late=(index + period) % 11 == 0)
            self.ahead_s += SPAN_S / 20
            await local.hear(self.edge.metrics)
        for key in range(1, 13):
            name = list(CLASSES)[key % 3]
            await local.controller.route([self._query(key, name)])
        hopeless = RouteQuery(50, SLO(1e-6), 500, tiers=frozenset({Tier.GUARANTEED}))
        await local.controller.route([hopeless._replace(request_id=f"{50:032x}")])
        self._end(local)
        await local.hear(self.edge.metrics)
        rows = {slot: decode_row(slot + 1, 300) for slot in range(6)}
        rows |= {slot: waiting_row(slot + 1, 700) for slot in range(6, 9)}
        epoch = (await local.controller.snapshot())["epoch"]
        report = delta("k3x9a2bq", epoch, 1, rows)
        for name, value in (("last_step_s", 0.0213), ("predicted_step_s", 0.0205), ("steps", 9)):
            report.summary[name] = value
        await local.controller.report(report)

    def _query(self, key: int, name: str) -> RouteQuery:
        query = RouteQuery(key, CLASSES[name], 400 + 100 * key, request_id=f"{key:032x}")
        return query._replace(client_request_id=f"Order/{key}")

    def _end(self, local: LocalController) -> None:
        """How some of the requests end; the others have not ended yet."""
        served = RequestEnding("", "ok", (), 40, 0.21, 0.02, 1.01)
        for key, ending in {
            12: served,
            11: served,
            9: served._replace(missed=("tpot", "e2e"), tpot_s=0.31, late=STALLED),
            6: served._replace(outcome="cancelled"),
            3: served._replace(outcome="failed", error="stream_broken"),
            50: RequestEnding("", "refused", (), 0, None, None, 0.002, "slo_unattainable"),
        }.items():
            local.ended(ending._replace(request_id=f"{key:032x}"))

    def _serve_one(self, name: str, late: bool) -> None:
        metrics, slo = self.edge.metrics, CLASSES[name]
        clock = TokenClock(slo, 0.0)
        first_s = 3.0 if late else 0.2
        for token in range(5):
            clock.emit(1, first_s + 0.02 * token)
        metrics.ttft_s(name).observe(first_s)
        tier = Tier.GUARANTEED if slo.stated else Tier.BEST_EFFORT
        metrics.admission.admissions(name, tier).inc()
        figures = RequestFigures.of(clock, Outcome.OK, first_s + 0.1)
        metrics.ended(Call("", "chat", {"model": "m"}, slo, PromptSize(), 0.0), figures)
        if slo.stated:
            late = {"ttft": {Cause.ENGINE_STALL: 1.0}}
            metrics.admission.ended(figures._replace(late=late), 0.2, failed=False)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as found:
        yield found


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with Site() as running:
        yield running


def opened(tab: Tab, site: Site) -> Tab:
    """The page, shown, with the key that came in its address."""
    tab.go(f"{site.url}/ui#key={KEY}")
    tab.until("!document.querySelector('#main').hidden")
    return tab


async def fleet_of(site: Site) -> dict[str, Any]:
    """What the page is told."""
    return await AdminService(site.controllers).fleet()


@pytest.fixture
def tab(chromium: Browser, site: Site) -> Iterator[Tab]:
    with chromium.tab() as tab:
        yield opened(tab, site)


def until_status(tab: Tab, wanted: str) -> None:
    """Have the page ask until it says this of itself."""
    tab.until(f"({POLL}, document.querySelector('#status').innerText === '{wanted}')")


def check_whole(tab: Tab, site: Site) -> None:
    """Nothing was wrong, nothing came from elsewhere, and nothing is cut off at the side."""
    assert tab.complaints == []
    assert tab.requested and all(url.startswith(f"{site.url}/") for url in tab.requested)
    assert not any(KEY in url.partition("#")[0] for url in tab.requested)
    assert tab.eval("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize(
    ("width", "look"), [(1280, {}), (390, {"phone": True, "dark": True})], ids=["desk", "phone"]
)
def test_the_fleet_is_shown(
    chromium: Browser, site: Site, width: int, look: dict[str, bool]
) -> None:
    with chromium.tab(width, 844, **look) as tab:
        opened(tab, site)
        assert tab.eval("document.querySelectorAll('.replica').length") == 3
        assert "k3x9a2bq" in tab.text("[data-replica=k3x9a2bq] h3")
        card = tab.text("[data-replica=k3x9a2bq]")
        for shown in ("ready", "interactive", "10.0 %", "21 ms", "fcfs"):
            assert shown in card, card
        assert "of 400 with an objective" in tab.text("#tiles")
        rows = tab.eval("[...document.querySelectorAll('#classes tbody tr')].map(r => r.innerText)")
        assert [row.split()[0] for row in rows] == sorted(CLASSES)
        assert "in the last 3 min" in tab.text("#window")
        # What it says first: a tenth of the promises is late, and each figure has the same base.
        kept = sum(row["promises"]["kept"] for row in site.do(fleet_of(site))["classes"])
        assert tab.text("#verdict") == "Promises are missed:"
        assert "engine stalled" in tab.text("#causes")
        assert f"{400 - kept:.0f} of 400" in tab.text("#sentence")
        assert "91.0 %" in tab.text("#tiles > :nth-child(1)") and "99.0 %" in tab.text("#tiles")
        assert "2 of 3" in tab.text("#tiles") or "3 of 3" in tab.text("#tiles")
        # On a phone the decisions are behind a tap, and not even asked for.
        asked = any("v1/decisions" in url for url in tab.requested)
        assert asked is tab.eval("document.querySelector('#last').open") is not bool(look)
        if look:
            tab.click("#last > summary")
        tab.until("document.querySelectorAll('#decisions details').length === 13")
        assert "refused" in tab.text("#decisions details")
        assert tab.text("#status") == "Live"
        # The key is neither in the address nor in what a link would take along.
        assert tab.eval("location.hash") == "" and KEY not in tab.text("body")
        light = tab.eval("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, light[4:-1].split(","))) < 200) == bool(look.get("dark"))
        smallest = "Math.min(...[...document.querySelectorAll('button')]"
        smallest += ".filter(b => b.offsetParent).map(b => b.offsetHeight))"
        assert tab.eval(smallest) >= (44 if look else 28), "too small for a finger"
        check_whole(tab, site)


def test_a_decision_tells_why(tab: Tab, site: Site) -> None:
    tab.enter("#request", f"{12:032x}")
    tab.until("document.querySelectorAll('#decisions details').length === 1")
    tab.until("document.querySelector('#decisions .why table')")
    why = tab.text("#decisions .why")
    for shown in (f"{12:032x}", "Observed TTFT", "most_gain chose", "TTFT 500 ms", "chosen"):
        assert shown in why, why
    assert "p7w1m4zt" in why and MARKUP in why and MARKUP in tab.text("#replicas")
    assert tab.eval("document.images.length") == 0
    # It stays open while the page goes on.
    seen = tab.text("#decisions .age")
    tab.until(f"document.querySelector('#decisions .age').innerText !== '{seen}'")
    assert tab.eval("document.querySelector('#decisions details').open")
    # By its client's own id, too.
    tab.enter("#request", "Order/7")
    tab.until(f"document.querySelector('#decisions .why')?.innerText.includes('{7:032x}')")
    assert "Order/7" in tab.text("#decisions .why")
    tab.enter("#request", MARKUP + "&limit=1")
    tab.until("!document.querySelector('#no-decisions').hidden")
    assert tab.eval("document.querySelector('#decisions-head').hidden")
    tab.click("#find [type=reset]")
    tab.until("document.querySelectorAll('#decisions details').length === 13")
    check_whole(tab, site)


def test_a_decision_tells_how_its_request_ended(tab: Tab, site: Site) -> None:

    def row(key: int) -> str:
        return tab.text(f"#decisions [data-key='{key:016x}'] summary")

    assert "promised" in row(12) and "210 ms kept" in row(12)
    assert "best effort no objective stated" in row(11) and row(11).endswith("210 ms")
    assert "not ended yet" in row(10) and "missed TPOT, end to end: engine stalled" in row(9)
    assert "client left after 1.0 s" in row(6) and "failed: stream_broken" in row(3)
    assert "refused TTFT out of reach" in row(50) and "refused: slo_unattainable" in row(50)
    # It ends while somebody reads of it.
    tab.click(f"#decisions [data-key='{10:016x}'] summary")
    tab.until("document.querySelector('#decisions .why')")
    assert "Observed" not in tab.text("#decisions .why")
    site.local.ended(RequestEnding(f"{10:032x}", "ok", ("ttft",), 7, 2.5, 0.02, 2.8))
    site.do(site.local.hear(site.edge.metrics))
    tab.until("document.querySelector('#decisions .why').innerText.includes('7 tokens')")
    assert "2.5 s missed TTFT" in row(10)
    assert tab.eval("document.querySelectorAll('#decisions .why').length") == 1
    check_whole(tab, site)


def test_charts_say_what_they_show(tab: Tab, site: Site) -> None:
    assert tab.eval("document.querySelectorAll('.chart figcaption').length") == 6
    # Thirty requests in ten seconds; the axis goes on to the next round number.
    for number, texts in {
        1: ("Requests", "5.0/s", "0/s", "s ago", "now"),
        4: ("First token (TTFT)", "p50", "p95", " ms", "s ago"),
    }.items():
        chart = tab.text(f".chart:nth-child({number})")
        assert all(text in chart for text in texts), chart
    # The last ten seconds are not over, so how many requests they have depends on the moment.
    label = tab.eval("document.querySelector('svg').ariaLabel")
    assert re.search(r"from [0-9.]+/s to 3\.0/s", label), label
    said = "[...document.querySelectorAll('main svg')].map(s => s.getAttribute('aria-label'))"
    for words in tab.eval(said):
        assert "over the last" in words and "last " in words and "from" in words, words
    assert tab.eval("[...document.querySelectorAll('main svg')].every(s => s.role === 'img')")
    high = "[...document.querySelectorAll('main svg')].every(s => s.clientHeight >= 24)"
    assert tab.eval(high)
    check_whole(tab, site)


def test_without_data_the_page_says_so(chromium: Browser) -> None:
    with Site(past=False) as site, chromium.tab() as tab:
        tab.go(f"{site.url}/ui#key={KEY}")
        tab.until("!document.querySelector('#main').hidden")
        for none in ("data", "decision", "promise has ended"):
            assert f"No {none} yet" in tab.text("#main")
        assert tab.text("#verdict") == "Waiting:"
        assert "No replica has reported yet" in tab.text("#main")
        assert tab.eval("document.querySelector('#decisions-head').hidden")
        tiles = tab.text("#tiles")
        for shown in ("none with an objective", "none has ended", "not measured yet"):
            assert shown in tiles
        assert "NaN" not in tab.text("body") and "undefined" not in tab.text("body")
        check_whole(tab, site)


def test_a_model_without_replicas_at_rest_is_not_a_fault(chromium: Browser) -> None:
    config = ControllerConfig(stale_after_s=6_000, startup_s=40)
    with Site(past=False, config=config) as site, chromium.tab() as tab:
        opened(tab, site)
        assert tab.text("#verdict") == "Idle:"
        assert "a request starts one, in about 40 s" in tab.text("#sentence").replace("\u00a0", " ")
        assert tab.eval("document.querySelector('#verdict').className") == "good"
        check_whole(tab, site)


def test_a_fleet_whose_first_requests_run_is_not_idle(chromium: Browser) -> None:
    with Site(past=False) as site, chromium.tab() as tab:
        site.do(site.local.controller.hello(hello("a", [decode_row(1, 300)])))
        opened(tab, site)
        assert tab.text("#verdict") == "Well:"
        assert "no request has ended yet; 1 run or wait" in tab.text("#sentence")
        check_whole(tab, site)


async def _promise(local: LocalController, number: int, kept: bool) -> None:
    """A request is promised, and ends after as long as it takes."""
    name = f"{number:032x}"
    query = RouteQuery(number, SLO(5.0, service_class=MARKUP), 400, request_id=name)
    (made,) = (await local.controller.route([query])).decisions
    assert made.tier is Tier.GUARANTEED
    await local.controller.release([number])
    ending = RequestEnding(name, "ok", (), 9, 0.1 + 0.001 * (number % 17), 0.01, 0.5)
    local.ended(ending._replace(replica_id=made.replica_id or "", kept=kept))


@pytest.mark.parametrize(("width", "look"), [(1280, {}), (390, {"phone": True, "dark": True})])
def test_the_page_shows_how_promises_are_kept(
    chromium: Browser, width: int, look: dict[str, bool]
) -> None:
    with Site(past=False) as site, chromium.tab(width, 844, **look) as tab:
        for name in ("k3x9a2bq", "never-chosen"):
            site.do(site.local.controller.hello(hello(name)))
        site.do(site.local.controller.drain("never-chosen", True))
        for number in range(1, 81):
            site.do(_promise(site.local, number, kept=number > 2))
            if number % 20 == 0:
                site.do(site.local.hear(site.edge.metrics))
        tab.go(f"{site.url}/ui#key={KEY}")
        tab.until("document.querySelector('#promises svg')")
        said = " ".join(tab.text("#promises").split())
        for shown in ("Largest margin of TPOT 4.0 %", "First tokens by forecast", "predicted"):
            assert shown in said, said
        chosen, idle = (tab.text(f"[data-replica={name}]") for name in ("k3x9a2bq", "never-chosen"))
        assert "97.5 % of 80" in chosen and "First tokens by p50" in chosen
        assert "Promises kept" not in idle
        label = tab.eval("document.querySelector('#promises svg').ariaLabel")
        assert label.startswith("Reliability of 60 forecasts") and "90.0\u00a0% and " in label
        assert tab.eval("document.querySelectorAll('#promises circle').length") == 11
        box = "document.querySelector('#promises svg').getBoundingClientRect()"
        width_px, height_px = tab.eval(f"{box}.width"), tab.eval(f"{box}.height")
        assert width_px > 100 and abs(width_px - height_px) <= 1
        assert tab.eval("document.images.length") == 0
        check_whole(tab, site)


def classes_shown(tab: Tab) -> list[list[str]]:
    """The cells of the table of classes."""
    rows = "[...document.querySelectorAll('#classes tbody tr')]"
    cells = tab.eval(f"{rows}.map(row => [...row.cells].map(cell => cell.innerText.trim()))")
    return [[cell.replace("\u00a0", " ") for cell in row] for row in cells]


@pytest.mark.parametrize(("width", "look"), [(1280, {}), (390, {"phone": True})])
def test_an_overload_is_said_in_words_with_what_would_help(
    chromium: Browser, width: int, look: dict[str, bool]
) -> None:
    """The figures of the sentence are those of the table and of the controller."""
    slo = CLASSES["interactive"]
    with Site(past=False) as site, chromium.tab(width, 844, **look) as tab:
        site.do(site.local.controller.hello(hello("k3x9a2bq")))
        site.do(site.local.hear(site.edge.metrics))
        tiers = []
        for number in range(1, 201):
            site.ahead_s += 0.1
            query = RouteQuery(number, slo, 4_000, request_id=f"{number:032x}")
            (made,) = site.do(site.local.controller.route([query])).decisions
            site.do(site.local.controller.release([max(1, number - 3)]))
            tiers.append(made.tier)
        site.do(site.local.hear(site.edge.metrics))
        opened(tab, site)
        # Nothing has ended, and yet it is known that it is too much.
        assert tab.text("#verdict") == "Overloaded:"
        assert tab.text("#sentence").startswith("requests ask for more than all of the replicas'")
        for tier in tiers:
            site.edge.metrics.admission.admissions("interactive", tier).inc()
            figures = RequestFigures.of(TokenClock(slo, 0.0), Outcome.FAILED, 0.1)
            site.edge.metrics.ended(Call("", "chat", {}, slo, PromptSize(), 0.0), figures)
        site.do(site.local.hear(site.edge.metrics))
        tab.until("document.querySelector('#sentence').innerText.includes('cannot be promised')")
        (pool,) = site.do(fleet_of(site))["models"]["model-0"]["pressure"]
        lacking = tiers.count(Tier.BEST_EFFORT)
        assert 100 < lacking < 200 and pool["needed"] > 2
        assert tab.text("#verdict") == "Overloaded:"
        said = f"{lacking / 2:.1f} % of requests cannot be promised; {pool['needed'] - 1} more "
        assert tab.text("#sentence") == said + "replicas would be enough."
        load = tab.text("#tiles > :nth-child(3)")
        assert int(load.split()[1]) > 200 and "1 ready" in load
        ((_, requests, promised, best_effort, refused, *_),) = classes_shown(tab)
        numbers = [cell.split()[-1] for cell in (promised, best_effort, refused)]
        assert [int(number) for number in numbers] == [200 - lacking, lacking, 0]
        assert "200" in requests
        check_whole(tab, site)


@pytest.mark.parametrize(("width", "look"), [(1280, {}), (390, {"phone": True, "dark": True})])
def test_many_replicas_are_a_table_with_the_worst_first(
    chromium: Browser, width: int, look: dict[str, bool]
) -> None:
    with Site(past=False) as site, chromium.tab(width, 844, **look) as tab:
        controller = site.local.controller
        for number in range(64):
            waiting = [waiting_row(900, number * 30)] if number % 5 == 0 else []
            site.do(controller.hello(hello(f"replica-{number:02}", waiting)))
        site.do(controller.drain("replica-07", True))
        opened(tab, site)
        names = (
            "[...document.querySelectorAll('#many > tbody > tr > th')].map(cell => cell.innerText)"
        )
        tab.until(f"{names}.length === 16")
        assert "GPU" not in tab.text("#many")
        budget = "'#many > tbody > tr > td:nth-child(3)'"
        budgets = tab.eval(
            f"[...document.querySelectorAll({budget})].map(c => parseInt(c.innerText))"
        )
        assert tab.eval(names)[0] == "replica-07" and budgets[1:] == sorted(budgets[1:])
        assert len(set(budgets)) > 2
        assert tab.text("#shown") == "16 of 64, worst first"
        assert not tab.eval("document.querySelectorAll('#replicas article').length")
        tab.click("#all")
        tab.until(f"{names}.length === 64")
        tab.click("#many thead th button")
        assert tab.eval(names)[0] == "replica-00"
        tab.click("#many thead th button")
        assert tab.eval(names)[0] == "replica-63"
        assert tab.eval("document.querySelector('#many th').ariaSort") == "descending"
        # A row opens to its card, and keeps its place and the focus while the page goes on.
        row = "[data-row=replica-61]"
        tab.click(f"{row} button")
        assert "Prefill budget" in tab.text(f"{row} article")
        tab.eval(f"document.querySelector('{row} article button').focus(), 0")
        tab.click(f"{row} article button")
        tab.click(f"{row} article button")
        tab.until(f"document.querySelector('{row} td').innerText.startsWith('drained')")
        assert tab.eval(f"document.querySelector('{row} article') !== null")
        tab.eval(
            "document.querySelector('#filter').value = 'drained',"
            "document.querySelector('#filter').dispatchEvent(new Event('input')), 0"
        )
        assert tab.eval(names) == ["replica-61", "replica-07"]
        check_whole(tab, site)


def test_gpus_are_shown_where_there_are_some(chromium: Browser) -> None:
    with Site(past=False) as site, chromium.tab() as tab:
        controller = site.local.controller
        for name in "ab":
            site.do(controller.hello(hello(name)))
        opened(tab, site)
        tab.until("document.querySelector('[data-replica=b]') !== null")
        assert "GPU" not in tab.text("#replicas")
        labels = (("replica", "b"),)
        values = {
            "sluice_replica_gpu_utilization_ratio": 0.75,
            "sluice_replica_gpu_memory_used_bytes": 60.0 * 2**30,
            "sluice_replica_gpu_memory_bytes": 80.0 * 2**30,
        }
        samples = [MetricSample(n, "gauge", "", n, labels, value) for n, value in values.items()]
        site.do(controller.observer.push_metrics(MetricsPush("b", 1, 1, tuple(samples))))
        tab.until(f"({POLL}, document.querySelector('[data-replica=b]').innerText.includes('GPU'))")
        assert "75.0 % · 60.0 of 80.0 GiB" in tab.text("[data-replica=b]").replace("\u00a0", " ")
        assert "GPU" not in tab.text("[data-replica=a]")
        for number in range(8):
            site.do(controller.hello(hello(f"another-{number}")))
        tab.until(f"({POLL}, document.querySelectorAll('#many tbody').length === 10)")
        assert "75.0 %" in tab.text("[data-row=b]").replace("\u00a0", " ")
        assert tab.eval("document.querySelector('#many th.gpu').offsetParent !== null")
        check_whole(tab, site)


def test_an_axis_is_logarithmic_where_the_values_are_far_apart(chromium: Browser) -> None:
    with Site(past=False) as site, chromium.tab() as tab:
        for at_s in (0.0, 20.0):
            for number in range(100):
                for name, far in (("ttft", number % 10 == 0), ("tpot", False)):
                    metrics = site.edge.metrics
                    own = metrics.ttft_s if name == "ttft" else metrics._tpot
                    own("standard").observe(8.0 if far else 0.04)
            site.edge.metrics.admission.admissions("standard", Tier.BEST_EFFORT).inc()
            slo = CLASSES["standard"]
            figures = RequestFigures.of(TokenClock(slo, 0.0), Outcome.OK, 0.1)
            site.edge.metrics.ended(Call("", "chat", {}, slo, PromptSize(), 0.0), figures)
            site.do(site.local.hear(site.edge.metrics))
            site.ahead_s += 20.0 + at_s
        opened(tab, site)
        tab.until("document.querySelectorAll('.chart figcaption').length >= 6")
        charts = [tab.text(f".chart:nth-child({number})") for number in (4, 5)]
        assert "log" in charts[0].split() and "log" not in charts[1].split(), charts
        assert "10 ms" in charts[0] and "10 s" in charts[0]


def test_a_key_is_asked_for_and_a_wrong_one_is_refused(chromium: Browser, site: Site) -> None:
    with chromium.tab() as tab:
        tab.go(f"{site.url}/ui")
        tab.until("!document.querySelector('#login').hidden")
        assert "needs a key" in tab.text("#login")
        tab.enter("#key", "a-wrong-one")
        tab.until("document.querySelector('#login-why').innerText.includes('not accepted')")
        assert tab.eval("sessionStorage.length") == 0
        assert tab.eval("document.querySelector('#main').hidden")
        tab.enter("#key", KEY)
        tab.until("!document.querySelector('#main').hidden")
        assert tab.eval("localStorage.length + document.cookie.length") == 0
        # The refusals are what the browser itself notes of a 401.
        assert all("401" in each for each in tab.complaints)


def test_draining_takes_two_clicks_and_is_taken_back_with_one(tab: Tab, site: Site) -> None:
    button = "[data-replica=p7w1m4zt] button"
    tab.click(button)
    assert "Sure" in tab.text(button)
    assert tab.eval(f"document.querySelector('{button}').ariaLabel.startsWith('Sure?')")
    assert not site.do(site.local.controller.route([])).closed
    tab.click(button)
    tab.until(f"document.querySelector('{button}').innerText === 'Take back'")
    assert site.do(site.local.controller.route([])).closed == ("p7w1m4zt",)
    tab.until("document.querySelector('[data-replica=p7w1m4zt]').innerText.includes('left')")
    tab.click(button)
    tab.until(f"document.querySelector('{button}').innerText === 'Drain'")
    assert site.do(site.local.controller.route([])).closed == ()
    check_whole(tab, site)


def test_before_the_last_replica_is_drained_the_page_asks(tab: Tab, site: Site) -> None:
    button = "[data-replica=p7w1m4zt] button"
    for other in ("k3x9a2bq", MARKUP):
        site.do(site.local.controller.drain(other, True))
    for answer, then in (("false", "Drain"), ("true", "Take back")):
        tab.eval(f"window.confirm = (text) => {{ window.asked = text; return {answer}; }}, 0")
        tab.click(button)
        tab.click(button)
        tab.until("(window.asked ?? '').includes('last replica')")
        tab.until(f"document.querySelector('{button}').innerText === '{then}'")
        tab.eval("delete window.asked, 0")
        drained = "p7w1m4zt" in (site.do(site.local.controller.route([])).closed or ())
        assert drained == (answer == "true")
    for each in ("k3x9a2bq", "p7w1m4zt", MARKUP):
        site.do(site.local.controller.drain(each, False))


def test_a_replica_in_quarantine_says_why_and_what_comes_next(tab: Tab, site: Site) -> None:
    card = "document.querySelector('[data-replica=k3x9a2bq]')"
    controller = site.local.controller
    # As often as opens a breaker also where the engine has just made a step.
    notices = [FaultNotice("k3x9a2bq", ReplicaFault.HUNG)] * FAILURES
    site.do(controller.faulted(1, notices))
    tab.until(f"{card}.innerText.includes('in quarantine, it hangs')")
    assert tab.eval(f"{card}.classList.contains('off')")
    assert "2 of 3" in tab.text("#tiles")
    tab.until(f"{card}.innerText.includes('one request at a time tries it')")
    probe = RouteQuery(80, CLASSES["batch"], 100, request_id=f"{80:032x}")
    reply = site.do(controller.route([probe]))
    assert reply.decisions[0].replica_id == "k3x9a2bq"
    report = delta("k3x9a2bq", reply.epoch, 2, finished=(80,))
    report.summary["steps"] = 10
    assert not site.do(controller.report(report)).resync
    tab.until(f"{card}.innerText.includes('ready')")
    tab.enter("#request", f"{80:032x}")
    tab.until("document.querySelectorAll('#decisions details').length === 1")
    tab.until("document.querySelector('#decisions .why table')")
    assert "trial of a replica that was in quarantine" in tab.text("#decisions .why")
    check_whole(tab, site)


def test_what_is_old_looks_old_and_comes_back(tab: Tab, site: Site) -> None:
    offline = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    site.local.up = False
    until_status(tab, "Controller silent")
    assert "does not answer" in tab.text("#trouble") and "What is shown" in tab.text("#trouble")
    assert float(tab.eval("getComputedStyle(document.querySelector('main')).opacity")) < 1
    tab.call("Network.emulateNetworkConditions", offline=True, **offline)
    until_status(tab, "Unreachable")
    site.local.up = True
    tab.call("Network.emulateNetworkConditions", offline=False, **offline)
    until_status(tab, "Live")
    assert tab.eval("document.querySelector('#trouble').hidden")
    assert tab.eval("getComputedStyle(document.querySelector('main')).opacity") == "1"
    tab.click("#pause")
    assert tab.text("#status") == "Paused" and tab.text("#pause") == "Resume"
    tab.enter("#request", "f" * 32)
    tab.until("!document.querySelector('#no-decisions').hidden")
    assert tab.text("#status") == "Paused"
    tab.click("#pause")
    tab.until("document.querySelector('#status').innerText === 'Live'")


def test_several_models_and_roles_are_told_apart(chromium: Browser) -> None:
    with Site(models=2) as site, chromium.tab() as tab:
        other = site.controllers["model-1"].controller
        for name in ("k3x9a2bq", "p7w1m4zt", MARKUP):
            site.do(other.replica_gone([name]))
        site.do(other.hello(hello("first", role="prefill")))
        site.do(other.hello(hello("second", role="decode")))
        asked = RouteQuery(70, CLASSES["standard"], 500, request_id=f"{70:032x}", prefill_key=71)
        site.do(other.route([asked]))
        opened(tab, site)
        assert "prefill" in tab.text("[data-replica=first]")
        assert "decode" in tab.text("[data-replica=second]")
        tab.enter("#request", f"{70:032x}")
        tab.until("document.querySelector('#decisions .why table')")
        assert "first → second" in tab.text("#decisions summary")
        assert "another one" in tab.text("#decisions .why")
        assert tab.eval("document.querySelectorAll('#decisions .why table').length") == 2
        assert tab.text("#about") == "2 models"
        assert "model-1" in tab.text("#replicas") and "(model-1)" in tab.text("#classes")
        site.controllers["model-1"].up = False
        tab.until("document.querySelector('#trouble').innerText.includes('model-1')")
        assert tab.text("#status") == "Live"
