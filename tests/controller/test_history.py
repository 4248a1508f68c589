"""What was counted in the last minutes, by class."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from prometheus_client import CollectorRegistry, Counter, Histogram

from sluice.controller.observability.history import History
from sluice.controller.observability.metrics import samples_of
from sluice.controller.observability.metrics_hub import MetricsHub
from sluice.protocol.requests import ResponseTail
from sluice.router.metrics.instruments import Outcome, RequestFigures, RouterMetrics
from sluice.router.tenancy.limits import ANYONE
from sluice.scheduling.batching import make_policy
from sluice.scheduling.request.objective import SLO, TokenClock
from sluice.simulation.metrics import deadline_gain, stages
from sluice.simulation.run import simulate
from sluice.simulation.workload import Arrival
from tests.controller.fleet import newer_push
from tests.simulation.loads import MODEL, of

BUCKETS = (0.1, 0.2, 0.4)
SERIES = (
    *("requests_per_s", "prompt_tokens_per_s", "generated_tokens_per_s"),
    *("ttft_p50_ms", "ttft_p95_ms", "tpot_p50_ms", "tpot_p95_ms", "e2e_p50_ms", "e2e_p95_ms"),
)


class Router:
    """What a router counts, with its names."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.registry = CollectorRegistry()

        def counter(what: str, *labels: str) -> Counter:
            return Counter(f"sluice_{what}", what, ["class", *labels], registry=self.registry)

        self.requests = counter("requests", "outcome", "endpoint")
        self.stated = counter("slo_requests", "priority")
        self.attained = counter("attained", "priority")
        self.gain = counter("tdg_gain", "priority", "tokens")
        self.ideal = counter("tdg_ideal", "priority", "tokens")
        self.admissions = counter("admissions", "admission")
        self.promises = counter("promises", "outcome")
        self.tokens = counter("tokens", "type")
        self.ttft = self.histogram("ttft")
        self.e2e = self.histogram("e2e")

    def histogram(self, name: str) -> Histogram:
        return Histogram(
            f"sluice_{name}_seconds", name, ["class"], buckets=BUCKETS, registry=self.registry
        )

    def served(self, name: str = "chat", in_time: bool = True, ttft_s: float = 0.15) -> None:
        self.requests.labels(name, "ok", "chat").inc()
        self.stated.labels(name, "1").inc()
        self.ideal.labels(name, "1", "later").inc(10)
        self.admissions.labels(name, "guaranteed").inc()
        self.promises.labels(name, "kept" if in_time else "missed").inc()
        self.ttft.labels(name).observe(ttft_s)
        self.e2e.labels(name).observe(2 * ttft_s)
        self.tokens.labels(name, "prompt").inc(100)
        self.tokens.labels(name, "generated").inc(20)
        if in_time:
            self.attained.labels(name, "2").inc()
            self.gain.labels(name, "1", "later").inc(10)

    def refused(self, name: str = "chat") -> None:
        self.requests.labels(name, "refused", "chat").inc()


def call_of(arrival: Arrival) -> Any:
    """What the metrics ask of a chat request."""
    return SimpleNamespace(
        scheduled=True,
        slo=arrival.slo,
        endpoint="chat",
        client=ANYONE,
        model="local",
        received_s=arrival.arrival_s,
        clamped={},
        degraded={},
    )


class Side:
    """The hub and the history as the controller uses them."""

    def __init__(self) -> None:
        self.hub, self.history = MetricsHub(), History(period_s=10, window_s=60)

    def push(self, router: Router, now_s: float) -> None:
        self.push_registry(router.name, router.registry, now_s)

    def push_registry(self, name: str, registry: CollectorRegistry, now_s: float) -> None:
        push = newer_push(name, samples_of(registry))
        self.history.joined(self.hub.push(push, now_s))
        self.history.note(self.hub, now_s)

    def recent(self, now_s: float, name: str = "chat") -> dict[str, Any]:
        found = self.history.recent(self.hub, now_s)["classes"]
        (row,) = [each for each in found if each["class"] == name]
        return dict(row)


def test_the_last_minutes_are_what_came_in_them() -> None:
    side, router = Side(), Router("r")
    side.push(router, 0)
    for _ in range(3):
        router.served()
    router.served(in_time=False, ttft_s=0.3)
    router.refused()
    side.push(router, 10)
    row = side.recent(20)
    assert (row["requests"], row["stated"], row["attainment"], row["tdg"]) == (5, 4, 0.75, 0.75)
    assert (row["asked"], row["asked_per_s"]) == (5, pytest.approx(0.25))
    assert row["promises"] == {"kept": 3, "missed": 1}
    assert row["admission"] == {"guaranteed": 4, "best_effort": 0, "refused": 1}
    assert row["outcomes"]["ok"] == 4
    assert row["ttft_ms"] == {"p50": pytest.approx(166.667), "p95": pytest.approx(360)}
    assert row["trend"][0] == 0.75


def test_the_gain_is_that_of_the_simulator_on_the_same_requests() -> None:
    """By ProServe's weights."""
    slo = SLO(ttft_s=0.2, tpot_s=0.01, service_class="chat", priority=2)
    arrived = [
        Arrival(n * 0.05, 400 + 80 * (n % 7), 60 + n % 31, replace(slo, priority=1 + n % 2))
        for n in range(60)
    ]
    requests = simulate(of(arrived), make_policy("fcfs"), MODEL).requests
    side = Side()
    metrics = RouterMetrics()
    side.push_registry("r", metrics.registry, 0)
    for key, arrival in enumerate(arrived):
        clock = TokenClock(arrival.slo, arrival.arrival_s)
        times = requests.emitted_s[requests.offsets[key] : requests.offsets[key + 1]]
        for time_s in times:
            clock.emit(1, float(time_s))
        tail = ResponseTail(prompt_tokens=arrival.prompt_tokens, output_tokens=len(times))
        figures = RequestFigures.of(clock, Outcome.OK, float(times[-1]), tail)
        metrics.ended(call_of(arrival), figures)
    side.push_registry("r", metrics.registry, 10)
    expected = deadline_gain(requests, stages(requests)).ratio
    assert 0.1 < expected < 0.9
    assert side.recent(20)["tdg"] == pytest.approx(expected, abs=1e-4)


def test_what_is_older_than_the_window_no_longer_counts() -> None:
    side, router = Side(), Router("r")
    side.push(router, 0)
    router.served(in_time=False)
    for now_s in range(10, 70, 10):
        side.push(router, now_s)
    assert side.recent(60)["attainment"] == 0
    router.served()
    side.push(router, 80)
    row = side.recent(80)
    assert (row["requests"], row["attainment"]) == (1, 1)
    assert side.history.recent(side.hub, 80)["window_ms"] <= 60_000


def test_the_past_of_a_router_is_not_the_last_minutes_of_a_controller_that_restarted() -> None:
    side, old, new = Side(), Router("old"), Router("new")
    for _ in range(1_000):
        old.served(in_time=False)
    new.served()
    side.push(new, 0)
    side.push(old, 1)
    old.served()
    side.push(old, 2)
    row = side.recent(5)
    assert (row["requests"], row["attainment"]) == (1, 1)


def test_a_first_request_is_seen_though_its_series_is_new() -> None:
    side, router = Side(), Router("r")
    side.push(router, 0)
    router.served("first")
    side.push(router, 1)
    assert side.recent(2, "first")["requests"] == 1


def test_nothing_counted_is_nothing_told() -> None:
    side = Side()
    assert side.history.recent(side.hub, 5) == {
        "window_ms": 0,
        "period_ms": 10_000,
        "series": {name: [] for name in SERIES},
        "classes": [],
    }
    router = Router("r")
    router.refused()
    side.push(router, 0)
    row = side.recent(0)
    assert (row["attainment"], row["tdg"], row["asked_per_s"]) == (None, None, None)
    assert row["ttft_ms"] == {"p50": None, "p95": None}


@given(st.lists(st.tuples(st.integers(0, 1), st.booleans(), st.integers(1, 25)), max_size=30))
def test_two_routers_add_up_whatever_the_order(events: list[tuple[int, bool, int]]) -> None:
    side, routers = Side(), [Router("a"), Router("b")]
    for router in routers:
        side.push(router, 0)
    now_s, made = 0.0, []
    for which, in_time, wait_s in events:
        now_s += wait_s
        routers[which].served(in_time=in_time)
        side.push(routers[which], now_s)
        made.append((now_s, in_time))
    if not made:
        return
    row = side.recent(now_s)
    # The window begins at an entry of the ring, so at most a period of it may be missing.
    least = [each for each in made if each[0] > now_s - 60 + 10 + 25]
    most = [each for each in made if each[0] >= now_s - 60]
    assert len(least) <= row["requests"] <= len(most)
    assert 0 <= row["attainment"] <= 1 if row["stated"] else row["attainment"] is None


def test_rates_and_times_of_all_classes_together_run_over_time() -> None:
    side, router = Side(), Router("r")
    side.push(router, 0)
    for name in ("chat", "batch"):
        router.served(name)
    router.refused()
    side.push(router, 10)
    side.push(router, 20)
    router.served(ttft_s=0.3)
    side.push(router, 30)
    series = side.history.recent(side.hub, 40)["series"]
    assert set(series) == set(SERIES)
    assert series["requests_per_s"] == [0.3, 0, 0.1, 0]
    assert series["prompt_tokens_per_s"] == [20, 0, 10, 0]
    assert series["generated_tokens_per_s"] == [4, 0, 2, 0]
    assert series["ttft_p50_ms"] == [150, None, 300, None]
    assert series["e2e_p95_ms"] == [pytest.approx(390), None, 400, None]
    assert series["tpot_p50_ms"] == [None] * 4
    row = side.recent(40)
    assert row["tokens"] == {"prompt": 200, "cached": 0, "generated": 40}
    assert row["e2e_ms"]["p50"] is not None and row["tpot_ms"] == {"p50": None, "p95": None}


def test_a_period_that_has_just_begun_counts_with_the_one_before() -> None:
    side, router = Side(), Router("r")
    for now_s in (0, 10):
        router.served()
        side.push(router, now_s)
    router.served()
    side.push(router, 11)
    rates = side.history.recent(side.hub, 12)["series"]["requests_per_s"]
    assert rates == [pytest.approx(2 / 12, abs=1e-3)]
    assert len(side.history.recent(side.hub, 16)["series"]["requests_per_s"]) == 2
