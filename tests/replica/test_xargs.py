"""The objective survives its way through the engine's extra arguments."""

from __future__ import annotations

import json
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.protocol.requests import Turn
from sluice.replica.scheduler.xargs import (
    ARGS,
    ID,
    RequestArgs,
    SchedulerSettings,
    from_xargs,
    reserved_keys,
    to_xargs,
)
from sluice.scheduling.fleet.prefix import CHUNK_ENDS, NO_PREFIX, PromptPrefix
from sluice.scheduling.request.job import MAX_CHUNKS, MAX_MESSAGE_ENDS
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.request.stages import Stage

_objective = st.none() | st.floats(min_value=1e-6, max_value=1e6)
_stages = st.builds(Stage, _objective, _objective, _objective, st.integers(0, 9), st.just(0)).map(
    lambda stage: (stage, stage._replace(tokens=0))
)
_slos = st.builds(
    SLO,
    ttft_s=_objective,
    tpot_s=_objective,
    e2e_s=_objective,
    priority=st.integers(1, 10),
    service_class=st.text(min_size=1, max_size=20),
    stages=st.just(()) | _stages,
)
_hashes = st.lists(st.integers(1, 2**63 - 1), min_size=1, max_size=MAX_CHUNKS)
_prefixes = st.just(NO_PREFIX) | st.builds(
    lambda hashes, more, ends: PromptPrefix(
        tuple(hashes), CHUNK_ENDS[len(hashes) - 1] + more, tuple(ends)
    ),
    _hashes,
    st.integers(0, 2**40),
    st.lists(st.integers(1, 2**63 - 1), max_size=MAX_MESSAGE_ENDS),
)


@given(
    st.text(min_size=1),
    st.floats(0, 1e9),
    _slos,
    st.booleans(),
    _prefixes,
    st.dictionaries(st.text(), st.integers()),
    st.integers(1, 2**63 - 1),
    st.floats(0.001, 1_000),
)
def test_round_trip(request_id, arrival_s, slo, best_effort, prefix, others, tenant, weight):
    others = {key: value for key, value in others.items() if not key.startswith("sluice_")}
    ends = frozenset({7, 1 << 30}) if slo.stages else frozenset()
    turn = Turn(tenant, 1, 2) if best_effort else None
    args = RequestArgs(
        *(request_id, arrival_s, slo, best_effort, prefix, tenant, weight, True, ends, turn)
    )
    xargs = to_xargs(args)
    assert all(isinstance(value, str) for value in xargs.values())
    assert from_xargs({**others, **xargs}, "engine-id", now_s=2e9) == args


@pytest.mark.parametrize("xargs", [None, {}, {"session_id": "abc"}])
def test_a_direct_request_has_no_objective_and_arrives_now(xargs):
    assert from_xargs(xargs, "engine-id", now_s=12.5) == RequestArgs("engine-id", 12.5, SLO())


def changed(**fields):
    """The keys of a request, with these fields as JSON has them."""
    args = RequestArgs("x", 0.0, SLO(ttft_s=1.0), prefix=PromptPrefix((1,), 1 << 20))
    plain = msgspec.to_builtins(args._asdict()) | fields
    return {ID: "x", ARGS: json.dumps(list(plain.values()))}


def test_a_request_cannot_arrive_in_the_future():
    assert from_xargs(changed(arrival_s=99.0), "x", now_s=10.0).arrival_s == 10.0


@pytest.mark.parametrize(
    ("xargs", "named"),
    [
        ({"sluice_id": "x"}, "sluice_args"),
        ({"sluice_args": 3}, "sluice_args"),
        ({"sluice_args": "[x]"}, "sluice_args"),
        ({"sluice_tfft_s": 3}, "sluice_tfft_s"),
        (changed(request_id=3), "Expected `str`"),
        (changed(arrival_s=math.inf), "malformed"),
        (changed(slo=["soon"]), "Expected `float"),
        (changed(slo=[math.nan]), "malformed"),
        (changed(slo=[-1.0]), "ttft_s must be positive"),
        (changed(slo=[None, None, None, 11]), "priority must be an integer"),
        (changed(slo=[None, None, None, 1.5]), "Expected `int`"),
        (changed(slo=[None, None, None, 1, "a", "mean", 3]), "Expected `array`"),
        (changed(slo=[*[None] * 3, 1, "a", "mean", [[-1.0, None, None, 0, 0]]]), "times must be"),
        (changed(reasoning_ends=["x"]), "Expected `int`"),
        (changed(tenant="7"), "Expected `int`"),
        (changed(tenant=1 << 63), "sluice_args"),
        (changed(turn=[1 << 63]), "sluice_args"),
        (changed(weight=0.0), "> 0"),
        (changed(prefix=3), "Expected `array`"),
        (changed(prefix=[[1 << 63], 1 << 20]), "63 bits"),
        (changed(prefix=[[0], 1 << 20]), "none of 0"),
        (changed(prefix=[[1], 511]), "size 511 does not have 1 chunks"),
        (changed(prefix=[[1] * 65, 1 << 30]), "at most 64 chunks"),
        (changed(prefix=[[1], 1 << 20, [1] * 17]), "16 ends of messages"),
        (changed(prefix=[[1], 1 << 20, [0]]), "none of 0"),
    ],
)
def test_a_wrong_value_is_named(xargs, named):
    with pytest.raises(ValueError, match=named):
        from_xargs(xargs, "x", now_s=0.0)


def test_reserved_keys():
    assert reserved_keys({"sluice_id": "a", "session_id": "b"}) == ["sluice_id"]
    assert reserved_keys(None) == []


def test_the_path_of_a_state_table_may_begin_with_a_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FOLDER_OF_TABLES", "/dev/shm/one")
    stated = {"state_table": "$FOLDER_OF_TABLES/state", "policy": "fcfs"}
    settings = SchedulerSettings.from_additional_config({"sluice": stated})
    assert str(settings.state_table) == "/dev/shm/one/state"
    for wrong in (None, 5, {}):
        with pytest.raises(ValueError, match="state_table"):
            SchedulerSettings.from_additional_config({"sluice": {**stated, "state_table": wrong}})
