"""One fault under an open load: what was offered, its outcomes, and the time to recover."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from math import inf
from typing import Any

import httpx
import ray
from ray.exceptions import RayError

from sluice.benchmarks.live.client import End, Outcome, replay, text_body
from sluice.controller.discovery import NAMESPACE, observer_actor_name
from sluice.deploy.config import SluiceConfig
from sluice.simulation.workload import Arrival, Workload
from tests import injuries
from tests.e2e.conftest import System, system_alone, wait_until
from tests.faults.load import Load

RECOVERY_S = 240.0
"""Longest wait for a system to be whole again, seconds."""

COUNTED = {
    "ended": "sluice_requests_total",
    "resumed": "sluice_resumes_total",
    "retried": "sluice_retries_total",
    "undecided": "sluice_fallback_total",
}
"""What is read of the routers' metrics."""

_LOOK_EVERY_S = 0.05


@dataclass(frozen=True)
class Setting:
    """A system that several scenarios share; ``exact`` if its engines are simulated."""

    fields: dict[str, Any]
    exact: bool = True

    @property
    def name(self) -> str:
        return str(self.fields["name"])

    @contextmanager
    def open(self) -> Iterator[Trial]:
        with system_alone(self.fields) as serving:
            yield Trial.of(serving)


@dataclass(frozen=True)
class Span:
    """When the fault comes, and how long requests do, seconds from the first one."""

    fault_s: float
    load_s: float


FULL = Span(fault_s=6.0, load_s=20.0)
QUICK = Span(fault_s=1.0, load_s=4.0)


@dataclass(frozen=True)
class Scenario:
    """A fault and what may come of it. That nothing is lost holds for all.

    Attributes:
        injure: does the damage, undoes what does not heal by itself, and returns what recovery
            means beyond :meth:`Trial.is_whole`.
        resumes: whether a stream must have resumed on another replica.
        forgets: whether a router dies, and with it its counts.
        undecided: whether requests must have gone by Serve's own choice.
        tidy: whether every reservation must end by a report or a release, none by its age.
        planned: whether an operator does it: then no stream may break.
        ends_s: within how long each request must have an end, seconds; 0: within the client's wait.
        longer_s: how much longer than others' its load lasts, seconds.
        quick: whether the tests run it.
        missing: says what it needs and is not on this machine."""

    name: str
    setting: Setting
    injure: Callable[[Trial], Callable[[], bool]]
    load: Load = field(default_factory=Load)
    resumes: bool = False
    may_fail: bool = False
    may_refuse: bool = False
    forgets: bool = False
    undecided: bool = False
    tidy: bool = False
    planned: bool = False
    ends_s: float = 0.0
    longer_s: float = 0.0
    quick: bool = True
    missing: Callable[[], str] = lambda: ""


class Trial:
    """The system under load, as an injury sees it; on the Ray that this process has joined."""

    def __init__(self, config: SluiceConfig, url: str) -> None:
        self.config = config
        self.app = config.name
        self.url = url
        self.model = config.fleets[0].model
        self.undo = ExitStack()
        """What must not outlast the scenario, however it ends."""

    @classmethod
    def of(cls, serving: System) -> Trial:
        return cls(serving.config, serving.url)

    def snapshot(self) -> dict[str, Any]:
        with suppress(RayError, ValueError, TimeoutError):
            actor = ray.get_actor(observer_actor_name(self.app), namespace=NAMESPACE)
            found: dict[str, Any] | None = ray.get(actor.snapshot.remote(), timeout=1.0)
            if found is not None:
                return found
        return {"replicas": [], "reservations": None}

    def fresh(self) -> list[str]:
        rows = self.snapshot()["replicas"]
        return [row["replica_id"] for row in rows if row["condition"] == "fresh"]

    def busiest(self, least: int, what: str = "running") -> str:
        found: list[str] = []

        def look() -> bool:
            rows = [row for row in self.snapshot()["replicas"] if row["condition"] == "fresh"]
            most = max(rows, key=lambda row: int(row[what]), default=None)
            found[:] = [most["replica_id"]] if most is not None and most[what] >= least else []
            return bool(found)

        wait_until(look, f"a replica has {least} {what}", show=self.snapshot)
        return found[0]

    def replaced(self, *lost: str) -> Callable[[], bool]:
        return lambda: not set(lost) & set(self.fresh())

    def ask(self) -> bool:
        body = {"model": self.model, "prompt": "one", "max_tokens": 1}
        with suppress(httpx.HTTPError):
            answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=10)
            return answer.status_code == 200
        return False

    def is_whole(self) -> bool:
        # One that is gone is remembered for a while.
        rows = [row for row in self.snapshot()["replicas"] if row["condition"] != "gone"]
        if any(row["condition"] == "quarantined" for row in rows):
            self.ask()  # it leaves quarantine by a request that it answers
            return False
        wanted = self._replicas()
        fresh = [row for row in rows if row["condition"] == "fresh" and row["drain"] is None]
        return (
            len(rows) == len(fresh) == wanted
            and self.routers() == self.config.router.replicas
            and self._answers()
        )

    def _replicas(self) -> int:
        return sum(pool.replica.count for fleet in self.config.fleets for pool in fleet.pools)

    def routers(self) -> int:
        return len(injuries.routers(self.app))

    def is_idle(self) -> bool:
        snapshot = self.snapshot()
        rows = [row for row in snapshot["replicas"] if row["condition"] != "gone"]
        return snapshot["reservations"] == 0 and not any(map(_live, rows))

    def counted(self) -> dict[str, float]:
        found: dict[str, float] = {}

        def look() -> bool:
            found.clear()
            found.update(self.metrics())
            # A controller that has just started shows no counters yet.
            settled = bool(found.get("sluice_controller_up")) and "sluice_retries_total" in found
            return settled and self.has_heard_of_all()

        wait_until(look, "there is a page of metrics", RECOVERY_S, every_s=0.2)
        return {column: found.get(metric, 0.0) for column, metric in COUNTED.items()}

    def metrics(self) -> dict[str, float]:
        found: defaultdict[str, float] = defaultdict(float)
        with suppress(httpx.HTTPError):
            page = httpx.get(f"{self.url}/metrics", timeout=5).text
            for line in page.splitlines():
                series, _, value = line.rpartition(" ")
                if not line.startswith("#"):
                    found[series.partition("{")[0]] += float(value)
        return dict(found)

    def has_heard_of_all(self) -> bool:
        wanted = self._replicas() + self.config.router.replicas
        return bool(self.snapshot().get("metric_sources", 0) >= wanted)

    def expired(self) -> int:
        return int(self.snapshot().get("reservations_expired", 0))

    def _answers(self) -> bool:
        with suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}/health", timeout=1).status_code == 200
        return False


@dataclass
class Row:
    """What became of a scenario's requests.

    Attributes:
        failed: of these, the connection of ``cut`` ended in the middle of an answer.
        lost: neither answered nor ended with an error; must be 0.
        before, during, after: SLO attainment of requests that had ended before the fault, of the
            others, and of those sent after recovery. ``None`` where there are none.
        longest_s: from the sending of a request until its end, the longest.
        gap_s: the longest between two tokens of a stream that had not ended before the fault.
        undecided: requests that went by Serve's own choice.
        missed_s: from the fault until the last request was sent that missed its objective.
        whole_s: from the fault until every part was there again.
        problems: what does not hold, a sentence each."""

    name: str
    offered: int
    completed: int
    resumed: int
    retried: int
    refused: int
    failed: int
    cut: int
    lost: int
    reasons: dict[str, int]
    before: float | None
    during: float | None
    after: float | None
    longest_s: float
    gap_s: float
    undecided: int
    missed_s: float
    whole_s: float
    problems: list[str] = field(default_factory=list)


def run(trial: Trial, scenario: Scenario, span: Span) -> Row:
    """Break a system under load as ``scenario`` says, and wait until it is well again."""
    wait_until(trial.is_whole, "the system is whole", RECOVERY_S, trial.snapshot, _LOOK_EVERY_S)
    before = trial.counted()
    expired = trial.expired()
    client = _Client(trial, scenario, span)
    threads = ThreadPoolExecutor(1)
    outcomes = threads.submit(client.run)
    threads.shutdown(wait=False)  # a run that is stopped does not wait for its load
    with trial.undo:
        wait_until(lambda: client.now_s() >= span.fault_s, "it is time", every_s=0.002)
        fault_s = client.now_s()
        recovered = scenario.injure(trial)
        wait_until(
            lambda: recovered() and trial.is_whole(),
            f"{scenario.name} is overcome",
            RECOVERY_S,
            trial.snapshot,
            _LOOK_EVERY_S,
        )
        whole_s = client.now_s()
        ended = outcomes.result()
    row = _row(scenario, ended, fault_s, whole_s)
    _count(row, trial, before, scenario)
    row.problems += _problems(scenario, row)
    if scenario.tidy and trial.expired() not in (0, expired):
        row.problems.append("a reservation ended by its age")
    return row


class _Client:
    def __init__(self, trial: Trial, scenario: Scenario, span: Span) -> None:
        self._url = f"{trial.url}/v1/completions"
        self._model = trial.model
        self._exact = scenario.setting.exact
        self._plain = scenario.load.plain
        self._workload: Workload = scenario.load.make(span.load_s + scenario.longer_s)
        self._begun_s: float | None = None

    def run(self) -> list[Outcome]:
        return asyncio.run(
            replay(
                self._url,
                self._model,
                self._workload,
                body=self._body,
                exact=self._exact,
            )
        )

    def now_s(self) -> float:
        return -1.0 if self._begun_s is None else time.monotonic() - self._begun_s

    def _body(self, model: str, number: int, arrival: Arrival) -> dict[str, Any]:
        if self._begun_s is None:
            self._begun_s = time.monotonic() - arrival.arrival_s
        body = text_body(model, number, arrival)
        if not self._exact:
            body |= {"temperature": 0, "ignore_eos": True}
        if self._plain and number % self._plain == 0:
            del body["stream"], body["stream_options"]
        return body


def _row(scenario: Scenario, outcomes: Sequence[Outcome], fault_s: float, whole_s: float) -> Row:
    ends = Counter(outcome.end for outcome in outcomes)
    before, during, after = [], [], []
    missed_s = fault_s
    for outcome in outcomes:
        if outcome.slo.ttft_s is None:
            continue
        if outcome.ended_s is not None and outcome.ended_s < fault_s:
            before.append(outcome.attained)
        elif outcome.sent_s >= whole_s:
            after.append(outcome.attained)
        else:
            during.append(outcome.attained)
        if not outcome.attained:
            missed_s = max(missed_s, outcome.sent_s)
    return Row(
        name=scenario.name,
        offered=len(outcomes),
        completed=ends[End.ANSWERED],
        resumed=0,
        retried=0,
        refused=ends[End.REFUSED],
        failed=ends[End.FAILED] + ends[End.CUT],
        cut=ends[End.CUT],
        lost=ends[End.SILENT],
        reasons=dict(
            Counter(outcome.reason for outcome in outcomes if outcome.end is not End.ANSWERED)
        ),
        before=_share(before),
        during=_share(during),
        after=_share(after),
        longest_s=max(((each.ended_s or inf) - each.sent_s for each in outcomes), default=0.0),
        gap_s=max(
            (each.gap_s for each in outcomes if (each.ended_s or fault_s) >= fault_s), default=0.0
        ),
        undecided=0,
        missed_s=missed_s - fault_s,
        whole_s=whole_s - fault_s,
    )


def _share(attained: Sequence[bool]) -> float | None:
    return sum(attained) / len(attained) if attained else None


def _count(row: Row, trial: Trial, before: dict[str, float], scenario: Scenario) -> None:
    def told() -> bool:
        now = trial.counted()
        # Counters begin anew where all of the system does.
        new = {column: max(0, round(now[column] - before[column])) for column in now}
        row.resumed, row.retried = new["resumed"], new["retried"]
        row.undecided = new["undecided"]
        return new["ended"] >= row.completed or scenario.forgets

    wait_until(trial.is_idle, "nobody works on any request", RECOVERY_S, trial.snapshot)
    wait_until(told, "the routers have told of every request", every_s=0.2)


def _problems(scenario: Scenario, row: Row) -> list[str]:
    found = []
    if row.lost:
        found.append(f"{row.lost} requests were lost")
    if row.completed + row.refused + row.failed + row.lost != row.offered:
        found.append("the ends do not add up to what was offered")
    if row.failed and not scenario.may_fail:
        found.append(f"{row.failed} requests failed")
    if row.refused and not scenario.may_refuse:
        found.append(f"{row.refused} requests were refused")
    if scenario.undecided and not row.undecided:
        found.append("every request went where the controller said")
    if scenario.ends_s and row.longest_s > scenario.ends_s:
        found.append(f"a request ended after {row.longest_s:.0f} s")
    if scenario.planned and row.resumed + row.cut:
        found.append(f"{row.resumed + row.cut} streams broke")
    if scenario.resumes and not row.resumed:
        found.append("no stream went on elsewhere")
    return found


def _live(row: dict[str, Any]) -> int:
    return int(row["waiting"] + row["running"])
