"""The rows of vLLM's requests, kept from step to step, against each request looked at alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.replica.scheduler.local_scheduler import LocalScheduler
from sluice.replica.scheduler.state_table import StateTable
from sluice.replica.scheduler.xargs import RequestArgs
from sluice.scheduling.batching import make_policy
from sluice.scheduling.request.kernels import COMPUTED
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.request.queue import QueueView, RequestView
from sluice.scheduling.request.stages import Stage

if TYPE_CHECKING:
    from vllm.v1.request import Request

pytestmark = pytest.mark.vllm

BLOCK = 4
BUSY_UNTIL_S = 99.0
STAGES = SLO.of_stages((Stage(1.0, 0.1, tokens=2), Stage(tpot_s=0.5)), 9.0)


class Engine:
    """What the rows ask of a scheduler, with a plain record of when tokens left."""

    def __init__(self) -> None:
        from sluice.replica.vllm.loaded_kv import ExternalKv
        from sluice.replica.vllm.prefix_cache import PrefixHit
        from sluice.replica.vllm.rows import RequestRows

        self.hit = PrefixHit(2, 1)
        self.given = 0
        self.requests: dict[str, Request] = {}
        self.block_size = BLOCK
        self.max_model_len = 64
        self.parallel_config = SimpleNamespace(pipeline_parallel_size=1)
        self.table = StateTable.create(64)
        self.local = LocalScheduler(make_policy("fcfs"), self.table)
        hits = SimpleNamespace(begin_pass=lambda: 8, of=lambda _: self.hit)
        incoming = SimpleNamespace(
            awaits=lambda *_: False, arrived=lambda _: False, upto=lambda _: self.given
        )
        self.external = ExternalKv(None, needed=False)
        self.rows = RequestRows(self, self.local, hits, incoming, self.external, None)
        self.left: dict[str, tuple[float | None, float | None]] = {}
        self.now_s = 0.0
        self.count = 0

    def arrive(self, prompt: int, output: int, staged: bool) -> None:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        self.count += 1
        request_id, slo = f"r{self.count}", STAGES if staged else SLO(1.0, 0.1, priority=2)
        params = SamplingParams(max_tokens=output, ignore_eos=True)
        request = Request(request_id, list(range(prompt)), params, None)
        self.requests[request_id] = request
        args = RequestArgs(request_id, self.now_s, slo, tenant=self.count)
        tracked = self.local.track(request_id, args, self.count, prompt, output)
        self.rows.begin(request, tracked)
        self.left[request_id] = (None, None)

    def leave(self, request_id: str) -> None:
        del self.requests[request_id]
        self.local.forget(request_id)
        self.rows.forget(request_id)

    def preempt(self, request_id: str) -> None:
        from vllm.v1.request import RequestStatus

        request = self.requests[request_id]
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = request.num_output_placeholders = 0

    def schedule(self, request_id: str, tokens: int) -> None:
        """Compute ``tokens``; with the last of those known, another is in flight."""
        from vllm.v1.request import RequestStatus

        request = self.requests[request_id]
        request.status = RequestStatus.RUNNING
        left = request.num_tokens + request.num_output_placeholders - request.num_computed_tokens
        request.num_computed_tokens += max(0, min(tokens, left))
        if 0 < left <= tokens:
            request.num_output_placeholders += 1

    def emit(self, request_id: str) -> None:
        request = self.requests[request_id]
        if not request.num_output_placeholders:
            return
        request.num_output_placeholders -= 1
        request.append_output_token_ids(7)
        self.left[request_id] = (self.left[request_id][0] or self.now_s, self.now_s)
        self.rows.emitted([request_id, "unknown"], self.now_s)
        tracked = self.local.requests[request_id]
        before = tracked.begun
        if tracked.stages and self.local.follow_stages(tracked, 1, self.now_s):
            self.rows.begin_stage(request_id, tracked, tracked.begun - before)
            self.left[request_id] = (None, None)

    def views(self) -> list[RequestView]:
        """Each request by itself."""
        from vllm.v1.request import RequestStatus

        views = []
        for request_id, request in self.requests.items():
            tracked, promised = self.local.requests[request_id], request.num_output_placeholders
            running = request.status == RequestStatus.RUNNING
            known, computed = request.num_tokens + promised, request.num_computed_tokens
            first_s, last_s = self.left[request_id]
            if running:
                known, held = min(known, self.max_model_len - 1), -(-computed // BLOCK)
                most = request.num_prompt_tokens + request.max_tokens
                if known <= computed or (promised and computed + 2 - promised >= most):
                    continue
            else:
                computed, held = self.hit
            if promised:
                first_s, last_s = first_s or BUSY_UNTIL_S, BUSY_UNTIL_S
            views.append(
                RequestView(
                    request_id,
                    tracked.slo,
                    tracked.arrival_s,
                    request.num_prompt_tokens + tracked.begun,
                    computed,
                    known - computed,
                    request.num_output_tokens + promised - tracked.begun,
                    first_s,
                    held,
                    running,
                    last_s,
                    tracked.expected_tokens - tracked.begun,
                    tenant=tracked.args.tenant,
                )
            )
        return views


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("arrive"), st.integers(3, 20), st.integers(1, 9), st.booleans()),
        st.tuples(st.sampled_from(["leave", "preempt", "emit"]), st.integers(0, 99)),
        st.tuples(st.just("schedule"), st.integers(0, 99), st.integers(1, 20)),
    ),
    max_size=60,
)


@given(EVENTS)
def test_the_rows_are_what_each_request_says_by_itself(events):
    engine = Engine()
    for kind, *arguments in events:
        engine.now_s += 1.0
        if kind == "arrive":
            engine.arrive(*arguments)
        elif engine.requests:
            request_id = list(engine.requests)[arguments[0] % len(engine.requests)]
            getattr(engine, kind)(request_id, *arguments[1:])
        queue, expected = engine.rows.queue(BUSY_UNTIL_S), QueueView(engine.views())
        assert queue.request_ids(np.arange(len(queue))) == [r.request_id for r in expected.requests]
        np.testing.assert_array_equal(queue.table, expected.table)
        assert [r.slo for r in queue.requests] == [r.slo for r in expected.requests]


def test_rows_outlive_many_requests_that_have_left():
    engine = Engine()
    for _ in range(40):
        engine.arrive(5, 3, False)
    for turn in range(500):
        engine.leave(next(iter(engine.requests)))
        engine.arrive(5 + turn % 7, 3, False)
        queue = engine.rows.queue(BUSY_UNTIL_S)
        np.testing.assert_array_equal(queue.table, QueueView(engine.views()).table)
    assert len(engine.rows._ids) <= 128


class Cache:
    """A prefix cache that says which requests were looked up."""

    def __init__(self) -> None:
        self.again = 2
        self.looked_up: list[str] = []
        self.hit: tuple[int, int] | None = (0, 0)

    def begin_pass(self) -> int:
        self.looked_up = []
        return self.again

    def of(self, request: Request) -> tuple[int, int] | None:
        self.looked_up.append(request.request_id)
        return self.hit


def test_waiting_requests_are_looked_up_when_new_and_then_a_few_of_the_oldest_again():
    from sluice.replica.vllm.rows import RequestRows

    engine, cache = Engine(), Cache()
    incoming = engine.rows._incoming
    engine.rows = RequestRows(engine, engine.local, cache, incoming, engine.external, None)
    for _ in range(5):
        engine.arrive(9, 3, False)

    def looked_up() -> list[str]:
        engine.rows.queue(BUSY_UNTIL_S)
        return cache.looked_up

    def computed() -> list[float]:
        return engine.rows.queue(BUSY_UNTIL_S).table[:, COMPUTED].tolist()

    assert looked_up() == ["r1", "r2", "r3", "r4", "r5"]
    engine.arrive(9, 3, False)
    assert [looked_up() for _ in range(5)] == [["r6"], [], [], ["r1", "r2"], ["r3", "r4"]]
    cache.again = 0  # no block was filled or freed
    assert looked_up() == []
    # One that ran and was preempted is looked up at once; where the pass may not examine more
    # blocks, an old hit stands, and without one nothing counts as computed.
    engine.schedule("r1", 4)
    assert looked_up() == []
    engine.preempt("r1")
    cache.hit = (4, 1)
    assert looked_up() == ["r1"]
    assert computed() == [4, 0, 0, 0, 0, 0]
    cache.again, cache.hit = 2, None
    engine.arrive(9, 3, False)
    assert [computed() for _ in range(9)] == [[4, 0, 0, 0, 0, 0, 0]] * 9
    cache.hit = (8, 2)
    assert computed() == [8, 8, 0, 0, 0, 0, 8]


def test_the_state_table_gets_what_changed():
    engine = Engine()
    engine.arrive(10, 5, False)
    engine.arrive(6, 5, True)
    for request_id in ("r1", "r2"):
        engine.schedule(request_id, 20)
        engine.emit(request_id)
    engine.now_s = 3.0
    engine.schedule("r2", 1)
    engine.emit("r2")
    engine.local.publish(engine.rows.changed(["r1", "r2", "gone"]))
    names = ["prompt_tokens", "computed_tokens", "pending_tokens", "emitted_tokens", "kv_blocks"]
    first, second = engine.table.read().rows
    assert first[names].tolist() == (10, 10, 1, 1, 3)
    assert second[names].tolist() == (8, 7, 1, 0, 2), "of its second stage"
    assert first["first_token_s"] == 0.0 and np.isnan(second["first_token_s"])
    # KV that is still to come from another engine is no prefill, what it leaves out is.
    engine.arrive(9, 5, False)
    for engine.given in (8, 4):
        engine.local.publish(engine.rows.awaited("r3"))
        row = engine.table.read().rows[2][names].tolist()
        assert row == (9, engine.given, 9 - engine.given, 0, 0)
