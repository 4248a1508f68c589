"""The process of the shadow policies: what it records, and what it makes of it."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from pydantic import ValidationError

from sluice.controller.config import ShadowConfig
from sluice.controller.observability.traffic import Traffic
from sluice.deploy import shadow
from sluice.deploy.app import build
from sluice.deploy.config import SluiceConfig, parse_config
from sluice.deploy.shadow import Recording, ShadowReplays, policies_of
from sluice.protocol.messages import RequestEnding
from sluice.scheduling.request.job import RouteQuery
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.request.stages import Stage
from tests.controller.fleet import PROFILE, hello, summary

REPLICA = hello("a"), summary()
Asked = tuple[float, RouteQuery]


def config(**shadow_policies: Any) -> SluiceConfig:
    return parse_config({"controller": {"shadow": shadow_policies}})


def asked(request_id: str, arrived_s: float, **changes: Any) -> Asked:
    usual = RouteQuery(1, SLO(ttft_s=1.0), 600, waited_s=0.5, request_id=request_id)
    return arrived_s + 0.5, usual._replace(**changes)


def ended(request_id: str, outcome: str = "ok", tokens: int = 20, **changes: Any) -> RequestEnding:
    usual = RequestEnding(request_id, outcome, (), tokens, 0.1, 0.01, 0.3, kept=True)
    return usual._replace(**changes)


def part(*of: Asked | RequestEnding, **changes: Any) -> Traffic:
    endings = [each for each in of if isinstance(each, RequestEnding)]
    queries = [each for each in of if not isinstance(each, RequestEnding)]
    return Traffic(100.0, queries, endings, 1, {"a": REPLICA})._replace(**changes)


def recorded(*of: Asked | RequestEnding) -> Recording:
    recording = Recording(part())
    recording.add(part(*of))
    return recording


def test_requests_are_joined_with_their_endings_in_order_of_arrival() -> None:
    recording = recorded(
        asked("before", 99.0),
        asked("late", 103.0),
        asked("refused", 102.0),
        asked("kept", 101.0),
        ended("before"),
        ended("kept"),
        ended("late", missed=("ttft",), kept=False),
        ended("refused", "refused", 0, kept=None),
    )
    assert recording.whole and len(recording.endings) == len(recording.queries)
    kept, refused, late = recording.records(16)
    assert (kept.arrival.output_tokens, kept.attained, kept.kept) == (20, True, True)
    assert (late.arrival.output_tokens, late.attained, late.kept) == (20, False, False)
    assert (refused.arrival.output_tokens, refused.attained) == (0, False)


def test_chunks_become_blocks_of_one_size_that_prefixes_share() -> None:
    long = tuple(range(1, 21))  # the chunks after 8,192 characters are longer than the first
    one, other = recorded(
        asked("a", 101.0, prompt_tokens=2_800, prefix=long),
        asked("b", 102.0, prompt_tokens=2_800, prefix=(*long[:18], 98, 99)),
    ).records(16)
    assert len(one.arrival.block_hashes) == 2_800 // 128
    assert one.arrival.block_hashes[:20] == other.arrival.block_hashes[:20]
    assert not set(one.arrival.block_hashes[20:]) & set(other.arrival.block_hashes[20:])
    (none,) = recorded(asked("a", 101.0, prefix=long)).records(48)
    assert none.arrival.block_hashes == (), "128 tokens are no whole number of these blocks"


def test_what_has_stages_is_load_without_an_objective() -> None:
    slo = SLO.of_stages((Stage(1.0, 0.1), Stage(2.0, 0.1)), None, 1, "agent")
    (record,) = recorded(asked("a", 101.0, slo=slo)).records(16)
    assert not record.arrival.slo.stated and record.arrival.slo.service_class == "agent"


@pytest.mark.parametrize("change", [{"lost": True}, {"members": 2}])
def test_traffic_with_a_gap_or_other_replicas_is_not_compared(change: dict[str, Any]) -> None:
    recording = recorded(asked("a", 101.0))
    recording.add(part(**change))
    assert not recording.whole


def test_replicas_are_replayed_as_they_have_learned_and_as_slow_as_they_were() -> None:
    learned = summary()
    learned["fixed_correction"], learned["step_spread"] = 1.2, 0.05
    prefill, decode = hello("p", role="prefill"), hello("d", role="decode")
    first = {"d": (decode, summary()), "p": (prefill, learned.copy())}
    learned["steps"], learned["step_ratio_sum"] = 10, 15.0
    last = {"d": (decode, summary(total_kv_blocks=9)), "p": (prefill, learned)}
    recording = Recording(part(replicas=first), part(replicas=last))
    data = {"controller": {"promise_level": 0.9}, "engine": {"headroom": 1.05}}
    (one, other), cluster = recording.replicas(parse_config(data).fleets[0], {"chat": "queue"})
    assert (cluster.prefillers, cluster.decoders, cluster.promise_level) == (1, 1, 0.9)
    assert cluster.when_unattainable == {"chat": "queue"}
    assert (one.engine.kv_blocks, other.engine.kv_blocks) == (1_000, 9)
    assert (one.truth.noise, one.belief.model.headroom) == (0.05, 1.05)
    assert one.belief.model.fixed_s == pytest.approx(PROFILE.model.fixed_s * 1.2 * 1.05)
    assert one.truth.model.fixed_s == pytest.approx(PROFILE.model.fixed_s * 1.2 * 1.5)
    assert other.truth.model.fixed_s == pytest.approx(PROFILE.model.fixed_s), "it ran no step"


def test_what_is_left_out_is_as_it_is_live() -> None:
    (fleet,) = config(batching="fcfs", admission="none").fleets
    live, other = policies_of(fleet, False), policies_of(fleet, True)
    assert (live.batching("mixed").name, other.batching("mixed").name) == (
        "deadline_triage",
        "fcfs",
    )
    assert live.admission() is not None and other.admission() is None
    assert live.routing().name == other.routing().name


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "name one policy at least"),
        ({"batching": "nope"}, "nope"),
        ({"routing": "nope"}, "nope"),
        ({"admission": "none", "admission_options": {"headroom": 0.2}}, "admission is none"),
        ({"batching": "fcfs", "routing_options": {"alpha": 1}}, "without routing"),
    ],
)
def test_shadow_policies_are_checked_with_the_configuration(data: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**data)


def test_it_needs_one_cell_and_fixed_roles() -> None:
    with pytest.raises(ValueError, match="needs cells: 1"):
        parse_config({"controller": {"shadow": {"batching": "fcfs"}, "cells": 2}})
    with pytest.raises(ValueError, match="not elastic"):
        parse_config(
            {
                "controller": {"shadow": {"batching": "fcfs"}},
                "replica": {"elastic": True, "count": 2},
            }
        )
    with pytest.raises(ValidationError, match="extra"):
        ShadowConfig.model_validate({"batch": "fcfs"})


def test_without_shadow_policies_the_application_has_no_such_process() -> None:
    names = [each._bound_deployment.name for each in build({})._bound_deployment.init_args[5:]]
    assert names == []
    with_some = build(config(batching="fcfs"))._bound_deployment.init_args[5:]
    assert [each._bound_deployment.name for each in with_some] == ["Shadow"]
    code = (
        "import sys; from sluice.deploy.app import build; build({}); "
        "print('sluice.simulation.cluster' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


async def test_what_an_answer_that_did_not_come_had_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shadow, "READ_S", 0.001)
    unread = [part(), part(), part(asked("a", 101.0)), None]

    async def read(with_replicas: bool) -> Traffic | None:
        return unread.pop(0)

    assert await ShadowReplays(config(batching="fcfs").fleets[0], {}, read).record() is None
    assert not unread


async def test_it_records_replays_and_publishes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recording ends when its time is over and its requests have ended."""
    monkeypatch.setattr(shadow, "READ_S", 0.001)
    monkeypatch.setattr(shadow, "RECORD_S", 0.2)
    monkeypatch.setattr("sluice.simulation.shadow.WARM_UP_S", 1.0)
    monkeypatch.setattr("sluice.simulation.shadow.WINDOW_S", 1.0)
    (fleet,) = config(batching="fcfs").fleets
    ids = [f"r{number}" for number in range(40)]
    requests = [asked(each, 100.0 + number / 8) for number, each in enumerate(ids)]
    unread = [part(asked("old", 99.0), more=True), part(), part(), part(*requests[:20])]
    unread += [part(*requests[20:], *map(ended, ids))]
    read_with_replicas = []

    async def read(with_replicas: bool) -> Traffic | None:
        if with_replicas:
            read_with_replicas.append(len(unread))
        found = unread.pop(0) if unread else part()
        return found if with_replicas else found._replace(replicas={})

    replays = ShadowReplays(fleet, {}, read)
    recording = await replays.record()
    assert recording is not None and list(recording.queries) == ids
    assert read_with_replicas == [3, 0], "at its begin and its end"
    assert replays.compare(recording, 1) > 0, "then it rests"

    def value(name: str, **labels: str) -> float | None:
        return replays.metrics.registry.get_sample_value(f"sluice_shadow_{name}", labels)

    assert value("windows") == 3
    assert value("live", figure="attained") == 1.0
    low, change, high = (
        value("difference", figure="attained", bound=each) for each in ("low", "expected", "high")
    )
    assert low is not None and change is not None and high is not None and low <= change <= high
