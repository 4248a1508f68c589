"""Stages in a body: what they mean, and every way to get them wrong."""

from __future__ import annotations

from typing import Any

import pytest

from sluice.router.config import RouterConfig, ServiceClass
from sluice.router.errors import ApiError
from sluice.router.request.slo import SloReader
from sluice.router.tenancy.limits import TenantLimits
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.request.stages import Stage

READER = SloReader(
    RouterConfig(
        classes={"slow": ServiceClass(ttft_ms=5_000, tpot_ms=200, e2e_ms=60_000)},
        default_class="slow",
    )
)
END = {"until": "end", "tpot_ms": 50}
THINK = {"until": "reasoning_end", "ttft_ms": 500, "tpot_ms": 100}


def read(stages: object, **others: object) -> SLO:
    return READER.read({"slo": {"stages": stages, **others}}, []).slo


def refused(stages: object, **others: object) -> str:
    with pytest.raises(ApiError) as caught:
        read(stages, **others)
    assert caught.value.rule.status == 400
    return str(caught.value)


def test_stages_take_the_place_of_the_class_ttft_and_tpot() -> None:
    slo = read([THINK, {"until": {"tokens": 20}, "e2e_ms": 2_000}, END], priority=3)
    stages = Stage(0.5, 0.1), Stage(e2e_s=2.0, tokens=20), Stage(tpot_s=0.05)
    assert slo == SLO.of_stages(stages, 60.0, 3, "slow")
    assert read(None) == READER.read({}, []).slo


def test_headers_are_overridden_and_the_whole_end_is_not() -> None:
    headers = [(b"x-slo-ttft-ms", b"7"), (b"x-slo-e2e-ms", b"9000")]
    slo = READER.read({"slo": {"stages": [THINK, END]}}, headers).slo
    assert slo.times_s == (0.5, 0.05, 9.0)


@pytest.mark.parametrize("field", ["ttft_ms", "tpot_ms"])
def test_a_time_beside_the_stages_contradicts_them(field: str) -> None:
    assert f"slo.{field} and slo.stages contradict" in refused([END], **{field: 5})
    assert read([END], **{field: None}).tpot_s == 0.05


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ({}, "slo.stages must be a list of 1 to 8 stages, got an object"),
        ([], "slo.stages must be a list of 1 to 8 stages, got 0 of them"),
        ([END] * 9, "got 9 of them"),
        (["end"], "slo.stages[0] must be an object with until"),
        ([{}], "slo.stages[0].until must be"),
        ([THINK, {"until": "done"}], "slo.stages[1].until must be"),
        ([{"until": {"tokens": 0}}, END], "integer N from 1"),
        ([{"until": {"tokens": 2.5}}, END], "integer N from 1"),
        ([{"until": {"tokens": True}}, END], "integer N from 1"),
        ([{"until": {"words": 2}}, END], "integer N from 1"),
        ([{**END, "ttft_ms": 0}], "slo.stages[0].ttft_ms must be a number of milliseconds"),
        ([{**END, "tpot_ms": "5"}], "slo.stages[0].tpot_ms must be"),
        ([{**END, "e2e_ms": float("nan")}], "slo.stages[0].e2e_ms must be"),
        ([{**END, "priority": 3}], "slo.stages[0] has the unknown key 'priority'"),
        ([THINK], 'must have the until "end" in its last stage'),
        ([END, END], 'must have the until "end" in its last stage, and only there'),
        ([THINK, THINK, END], 'the until "reasoning_end" only once'),
    ],
)
def test_what_is_wrong_is_named_with_what_is_allowed(stages: Any, message: str) -> None:
    assert message in refused(stages)


def test_each_stage_is_held_to_the_caps_of_its_key() -> None:
    caps = TenantLimits(min_ttft_ms=600, min_tpot_ms=80)
    found = READER.read({"slo": {"stages": [THINK, END]}}, [], caps)
    assert found.slo.stages == (Stage(0.6, 0.1), Stage(tpot_s=0.08))
    assert found.clamped == {"ttft_ms": "600", "tpot_ms": "80"}
    strict = caps.model_copy(update={"beyond": "refuse"})
    with pytest.raises(ApiError, match=r"slo\.stages\[0\]\.ttft_ms must be at least 600 ms") as no:
        READER.read({"slo": {"stages": [THINK, END]}}, [], strict)
    assert no.value.rule.status == 403
