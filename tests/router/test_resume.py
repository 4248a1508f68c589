"""Streams that go on on another replica, with simulated engines behind a real router."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.protocol.requests import (
    EngineRequest,
    ResponseChunk,
    ResponseHead,
    ResponseTail,
    request_key,
)
from sluice.replica.config import EngineConfig, SimulatedEngineConfig
from sluice.replica.simulated.engine import SimulatedEngine
from sluice.router.config import RouterConfig
from sluice.router.dispatch.attempt import Piece, Transcript
from sluice.router.dispatch.suspicion import CLEARED_S
from sluice.router.request.call import Call
from sluice.router.request.prompt import PromptSize
from sluice.scheduling.request.job import RouteDecision, Tier
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.request.stages import Stage
from tests.examples import examples
from tests.router.far_side import (
    CHAT_BODY,
    COMPLETION_BODY,
    DIED,
    Behaviour,
    Clock,
    Edge,
    FarController,
    FarSide,
    Items,
    answer,
    hang,
)
from tests.router.virtual_time import virtual

TOKENS = 8
PATHS = {"/v1/completions": COMPLETION_BODY, "/v1/chat/completions": CHAT_BODY}
NEVER = 1000
TRUTH = SimulatedEngineConfig(step_s=0.01)
"""A step takes time, in which what came of the one before it is read: a token an event."""


def simulated(
    cut: int = NEVER, prefill_cut: int = NEVER, outlives: Callable[[], None] = lambda: None
) -> Behaviour:
    """A replica with a simulated engine that dies when it has sent so many items, the head
    included; of prompts that it computes for another one ``prefill_cut``.

    ``outlives`` is called before, to let time pass: the call is not to be blamed for the death.
    """

    async def behaviour(side: FarSide, name: str, request: EngineRequest) -> Items:
        config = EngineConfig(kind="simulated", model="m", policy="fcfs", simulated=TRUTH)
        engine = SimulatedEngine(config, name, 8, asyncio.get_running_loop().time)
        await engine.start()
        left = prefill_cut if request.prefill_only else cut
        try:
            async for item in engine.generate(request):
                if left <= 0:
                    outlives()
                    raise DIED
                left -= 1
                yield item._replace(replica_id=name) if isinstance(item, ResponseHead) else item
                # The other side has it before this one dies.
                await side.let_go()
            if left <= 0:
                outlives()
                raise DIED
        finally:
            await engine.stop()

    return behaviour


class AgeingClock(Clock):
    """Lets each attempt last longer than all before it."""

    lasts_s = CLEARED_S

    def outlives(self) -> None:
        self.lasts_s *= 3
        self.now_s += self.lasts_s


def edge(*cuts: int, config: RouterConfig | None = None, **extra: Behaviour) -> Edge:
    """Replicas ``r0``, ``r1``... in turn, which die at these cuts, and then one that does not."""
    clock = AgeingClock()
    behaviours = {
        f"r{index}": simulated(cut, outlives=clock.outlives)
        for index, cut in enumerate((*cuts, NEVER))
    } | extra
    config = config or RouterConfig(max_attempts=10)
    return Edge(FarSide(**behaviours), FarController(*behaviours), config, clock)


async def text(router: Edge, path: str, **body: Any) -> str:
    """What the client gets of a stream."""
    asked = {**PATHS[path], "stream": True, "max_tokens": TOKENS, **body}
    async with router.client() as client:
        response = await client.post(path, json=asked)
    assert response.status_code == 200
    return response.text


def without_time_and_name(stream: str) -> str:
    """The stream without its date and its id, of which all events have the same."""
    for pattern in (r'"created": (\d+)', r'"id": "[a-z]+-([0-9a-f-]+)"'):
        (value,) = set(re.findall(pattern, stream))
        stream = stream.replace(value, "")
    return stream


@pytest.mark.parametrize("path", PATHS)
@given(cuts=st.lists(st.integers(1, TOKENS + 5), max_size=5))
@settings(max_examples=examples(25), deadline=None)
@virtual
async def test_a_client_sees_nothing_of_any_sequence_of_deaths(path: str, cuts: list[int]) -> None:
    options = {"stream_options": {"include_usage": True}}
    whole = await text(edge(), path, **options)
    resumed = await text(edge(*cuts), path, **options)
    assert without_time_and_name(resumed) == without_time_and_name(whole)


@given(cuts=st.lists(st.tuples(st.integers(1, TOKENS + 5), st.integers(0, 2)), max_size=3))
@settings(max_examples=examples(25), deadline=None)
@virtual
async def test_nor_where_each_part_is_anothers(cuts: list[tuple[int, int]]) -> None:
    """Pairs of replicas, of which the one or the other dies at any place."""
    path = "/v1/chat/completions"
    whole = await text(edge(), path)
    pairs = [*cuts, (NEVER, NEVER)]
    behaviours = {}
    clock = AgeingClock()
    for index, (cut, prefill_cut) in enumerate(pairs):
        behaviours[f"p{index}"] = simulated(prefill_cut=prefill_cut, outlives=clock.outlives)
        behaviours[f"d{index}"] = simulated(cut, outlives=clock.outlives)
    side = FarSide(**behaviours)
    side.roles = ("decode", "prefill")
    decisions = [
        RouteDecision(f"d{index}", "placed", role="decode", prefill_id=f"p{index}")
        for index in range(len(pairs))
    ]
    router = Edge(side, FarController(*decisions), RouterConfig(max_attempts=10), clock)
    resumed = await text(router, path)
    assert without_time_and_name(resumed) == without_time_and_name(whole)


@virtual
async def test_what_a_replica_is_asked_for_and_what_is_counted() -> None:
    router = edge(4)
    await text(router, "/v1/chat/completions")
    (first, asked), (second, again) = router.side.calls
    assert (first, second) == ("r0", "r1")
    assert asked.resumable and asked.resume is None
    # A head, the role, and two tokens.
    assert again.resume is not None and again.resumable
    assert again.resume.token_ids == (0, 1)
    assert again.resume.chunks == (0, 1, 1)
    assert again.resume.response_id == asked.request_id
    assert again.request_id == f"{asked.request_id}-2"
    assert again.body == asked.body
    assert router.controller.gone == ["r0"]
    assert request_key(asked.request_id) in router.controller.released
    queries = router.controller.queries
    assert queries[1].prompt_tokens == queries[0].prompt_tokens + 2
    assert queries[1].output_tokens == TOKENS - 2
    assert router.sample("sluice_resumes_total") == router.sample("sluice_retries_total") == 1
    ok = {"outcome": "ok", "endpoint": "chat", "class": "standard"}
    assert router.sample("sluice_requests_total", **ok) == 1


@pytest.mark.parametrize(
    ("cut", "prefill", "stages"),
    [
        # The head and the role come before the tokens.
        (3, False, (Stage(None, 0.2, tokens=1), Stage(None, 0.1))),
        (4, False, (Stage(None, 0.1),)),
        (4, True, (Stage(None, 0.1),)),
    ],
)
@virtual
async def test_a_stream_continues_in_its_stage(
    cut: int, prefill: bool, stages: tuple[Stage, ...]
) -> None:
    """A P/D pair states the stages to its decode replica, the prompt has none."""
    router = edge(cut)
    if prefill:
        router.side.behaviours["p"] = simulated()
        router.side.roles = ("decode", "prefill")
        pairs = [
            RouteDecision(name, "placed", role="decode", prefill_id="p") for name in ("r0", "r1")
        ]
        router.controller.decisions = list(pairs)
    stated = [
        {"until": {"tokens": 2}, "ttft_ms": 9_000, "tpot_ms": 200},
        {"until": "end", "tpot_ms": 100},
    ]
    await text(router, "/v1/chat/completions", slo={"stages": stated})
    asked = [request for _, request in router.side.calls if not request.prefill_only]
    assert asked[0].slo.stages == (Stage(9.0, 0.2, tokens=2), Stage(None, 0.1))
    again = asked[1]
    assert tuple(stage._replace(ttft_s=None) for stage in again.slo.stages) == stages
    # The prompt is computed again, so the next token has as much time as that of a new request.
    assert again.slo.ttft_s == pytest.approx(again.waited_s + 9.0)
    assert again.slo == router.controller.queries[-1].slo
    prompts = [request.slo.stages for _, request in router.side.calls if request.prefill_only]
    assert prompts == [()] * (2 if prefill else 0)


@virtual
async def test_a_class_that_is_served_only_with_promises_goes_on_without() -> None:
    router = edge(
        4,
        config=RouterConfig.model_validate(
            {
                "classes": {"strict": {"ttft_ms": 100, "when_unattainable": "queue"}},
                "default_class": "strict",
            }
        ),
    )
    stream = await text(router, "/v1/completions")
    assert stream.endswith("data: [DONE]\n\n")
    first, second = (query.tiers for query in router.controller.queries)
    assert first == {Tier.GUARANTEED}
    assert second == set(Tier)


@pytest.mark.parametrize("body", [{"n": 2}, {"prompt": ["a", "b"]}])
@virtual
async def test_what_cannot_go_on_ends_with_an_error(body: dict[str, Any]) -> None:
    router = edge(4)
    stream = await text(router, "/v1/completions", **body)
    last = json.loads(stream.split("data: ")[-1])
    assert last["error"]["code"] == "stream_broken"
    assert "The replica died. No other replica can resume" in last["error"]["message"]
    assert "[DONE]" not in stream
    assert len(router.side.calls) == 1
    assert not router.side.calls[0][1].resumable


@virtual
async def test_nor_does_what_the_engine_does_not_tell_the_tokens_of() -> None:
    async def silent(side: FarSide, name: str, request: EngineRequest) -> Items:
        async for item in simulated(4)(side, name, request):
            yield item._replace(token_ids=()) if isinstance(item, ResponseChunk) else item

    router = edge(r0=silent)
    stream = await text(router, "/v1/completions")
    assert "stream_broken" in stream
    assert len(router.side.calls) == 1


@virtual
async def test_attempts_of_a_stream_are_bounded() -> None:
    router = edge(3, 4, 5, config=RouterConfig(max_attempts=3))
    stream = await text(router, "/v1/completions")
    assert "stream_broken" in stream
    assert [name for name, _ in router.side.calls] == ["r0", "r1", "r2"]
    assert router.sample("sluice_resumes_total") == 2


@virtual
async def test_a_stream_that_is_not_repeated_is_not_handed_on() -> None:
    """Another seed, or another version of the engine."""

    async def other(side: FarSide, name: str, request: EngineRequest) -> Items:
        prompt = {**request.body, "prompt": "something else"}
        async for item in simulated()(side, name, replace(request, body=prompt)):
            yield item

    async def longer(side: FarSide, name: str, request: EngineRequest) -> Items:
        assert request.resume is not None
        resume = request.resume._replace(chunks=(3,), token_ids=(0, 1, 2))
        async for item in simulated()(side, name, replace(request, resume=resume)):
            yield item

    async def ends(side: FarSide, name: str, request: EngineRequest) -> Items:
        yield ResponseHead(200, "text/event-stream", name)
        yield ResponseTail(0, 0)

    for replica in (other, longer, answer(400, b"{}"), ends):
        router = edge(4, r1=replica)
        stream = await text(router, "/v1/completions")
        assert "stream_broken" in stream
        assert len(stream.split("data: ")) == 1 + 3 + 1, "what was sent before, and the error"


@virtual
async def test_a_prompt_that_is_refused_in_mid_stream_is_not_handed_on() -> None:
    side = FarSide(d=simulated(4), p=answer(400, b"refused"), d2=simulated())
    side.roles = ("decode", "prefill")
    whole = RouteDecision("d", "placed", role="decode")
    pair = RouteDecision("d2", "placed", role="decode", prefill_id="p")
    stream = await text(Edge(side, FarController(whole, pair), clock=Clock()), "/v1/completions")
    assert "refused" not in stream
    assert "stream_broken" in stream


@virtual
async def test_a_client_that_leaves_while_its_stream_is_resumed_stops_that() -> None:
    router = edge(4, r1=hang)
    body = {**COMPLETION_BODY, "stream": True, "max_tokens": TOKENS}
    call = Call("r", "completions", body, SLO(), PromptSize(11), 100.0)
    opened = await router.dispatcher.open(call)

    async def read() -> list[Piece]:
        return [piece async for piece in router.dispatcher.pieces(opened)]

    task = asyncio.create_task(read())
    await router.side.until(lambda: router.side.live == {"r-2"})
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    router.dispatcher.close(opened)
    await router.side.until(lambda: not router.side.live)
    assert {request_key("r"), request_key("r-2")} == set(router.controller.released)


@virtual
async def test_the_budget_of_retries_holds_for_streams_and_for_new_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sluice.router.dispatch.retries.WINDOW_S", 3_600)
    spent = RouterConfig(retry_budget=1)
    router = edge(4, 5, config=spent)
    stream = await text(router, "/v1/completions")
    assert "stream_broken" in stream
    assert router.sample("sluice_resumes_total") == 1
    assert router.sample("sluice_retries_refused_total") == 1
    router.side.behaviours["r2"] = simulated(0)
    async with router.client() as client:
        response = await client.post("/v1/completions", json=COMPLETION_BODY)
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "replica_failed"
    assert router.sample("sluice_retries_refused_total") == 2


def chunks(*texts: tuple[bytes, Sequence[int]]) -> list[ResponseChunk]:
    return [ResponseChunk(data, len(ids), tuple(ids)) for data, ids in texts]


def test_a_transcript_starts_anew_while_nothing_was_sent() -> None:
    transcript = Transcript()
    assert transcript.begin("a") is None
    (silent,) = chunks((b"", [5]))
    assert transcript.take(silent) == (b"", 1, 0)
    assert transcript.begin("b") is None
    (first, second) = chunks((b'{"created":11}', [5]), (b'{"created":11} x', [6, 7]))
    assert transcript.take(first) == (first.data, 1, 0)
    assert transcript.take(second) == (second.data, 2, 0)
    resume = transcript.begin("c")
    assert resume is not None
    assert resume == ((5, 6, 7), (1, 2), "b")
    again = chunks(
        (b'{"created":12}', [5]), (b'{"created":12} x', [6, 7]), (b'{"created":12}', [8])
    )
    assert transcript.take(again[0]) == transcript.take(again[1]) == (b"", 0, 0)
    assert transcript.repeated
    assert transcript.take(again[2]) == (b'{"created":11}', 1, 0), "one date in all events"
