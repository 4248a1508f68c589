"""Loads a policy's compiled loops early: a first call compiles for seconds."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from math import nan
from typing import Any

import numpy as np

from sluice.scheduling.batching import make_policy
from sluice.scheduling.batching.batch import BatchBudget
from sluice.scheduling.latency.model import LinearLatency, StepSample
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.request.queue import QueueView, RequestView
from sluice.scheduling.tenancy.usage import ACCOUNT, EngineUsage

_LATENCY = LinearLatency(a=0.005, b=0.0002, c=0.000001, d=0.0000001)
_NOW_S = 1000.0
_BLOCK_TOKENS = 16
_OBJECTIVES = (
    SLO(),
    SLO(ttft_s=1.0, tpot_s=0.05, priority=2),
    SLO(ttft_s=0.2, tpot_s=0.02),
    SLO(e2e_s=20.0),
)
_AGES_S = (0.0, 0.5, 100.0)
_BUDGETS = (
    BatchBudget(tokens=8192, sequences=256, kv_blocks=10_000, block_tokens=_BLOCK_TOKENS),
    BatchBudget(tokens=256, sequences=40, kv_blocks=0, block_tokens=_BLOCK_TOKENS),
)


def warm_up(name: str, options: Mapping[str, Any] | None = None, drafts: bool = True) -> None:
    """Plan toy queues that reach the policy's loops with every type; without ``drafts`` not those
    that choose how many are verified. Raises ValueError as ``make_policy``."""
    policy = make_policy(name, options)
    waiting = [_prefill(i, slo, age_s, 0) for i, (slo, age_s) in _cases(0)]
    begun = [_prefill(i, slo, age_s, 64) for i, (slo, age_s) in _cases(1)]
    decoding = [_decode(i, slo, age_s, 0) for i, (slo, age_s) in _cases(2)]
    preempted = [_decode(i, slo, age_s, 90) for i, (slo, age_s) in _cases(3)]
    queues: tuple[list[RequestView], ...] = (
        waiting,
        decoding,
        [*begun, *waiting],
        [*decoding, *begun, *waiting, *preempted],
        [*decoding, *waiting[1:]],
        [*decoding[::2], *_best_effort(decoding[1::2]), *_best_effort(waiting)],
        [*waiting, *_best_effort(begun), *_best_effort(decoding), *_best_effort(preempted)],
        _best_effort(waiting),
        # The oldest of them is an aged prefill.
        [*decoding, *_best_effort(waiting)],
        _promised([*decoding, *waiting]),
        _programs([*decoding, *waiting]),
        _programs(_best_effort(waiting)),
    )
    if drafts:
        queues += (_drafting(decoding), [*_drafting(decoding), *waiting])
    ones = np.ones(1, np.int64)
    EngineUsage(np.zeros(1, ACCOUNT), 2).shares(_LATENCY.pieces, ones, ones, ones, _BLOCK_TOKENS)
    for budget in _BUDGETS:
        for step, queue in enumerate(queues):
            plan = policy.plan(QueueView(queue), _NOW_S + 0.1 * step, _LATENCY, budget)
            # What an engine says of the batch that it ran.
            StepSample.of_arrays(plan.tokens, plan.tokens)


def _best_effort(views: list[RequestView]) -> list[RequestView]:
    """The same requests as best effort, of two tenants."""
    return [view._replace(best_effort=True, tenant=at % 2) for at, view in enumerate(views)]


def _promised(views: list[RequestView]) -> list[RequestView]:
    return [view._replace(promised=True) for view in views]


def _programs(views: list[RequestView]) -> list[RequestView]:
    return [view._replace(program=1 + at) for at, view in enumerate(views)]


def _drafting(views: list[RequestView]) -> list[RequestView]:
    return [view._replace(drafted_tokens=4, acceptance=0.7) for view in views]


def _cases(group: int) -> list[tuple[str, tuple[SLO, float]]]:
    return [
        (f"{group}-{number}", case) for number, case in enumerate(product(_OBJECTIVES, _AGES_S))
    ]


def _prefill(request_id: str, slo: SLO, age_s: float, computed: int) -> RequestView:
    return RequestView(
        request_id,
        slo,
        _NOW_S - age_s,
        prompt_tokens=500,
        computed_tokens=computed,
        pending_tokens=500 - computed,
        kv_blocks=-(-computed // _BLOCK_TOKENS),
        running=computed > 0,
        expected_tokens=nan if slo.priority == 1 else 100.0,
    )


def _decode(request_id: str, slo: SLO, age_s: float, lost: int) -> RequestView:
    """A decode, or one that must compute ``lost`` tokens again."""
    return RequestView(
        request_id,
        slo,
        _NOW_S - age_s - 1.0,
        prompt_tokens=81,
        computed_tokens=90 - lost,
        pending_tokens=1 + lost,
        emitted_tokens=10,
        first_token_s=_NOW_S - age_s,
        kv_blocks=-(-(90 - lost) // _BLOCK_TOKENS),
        running=not lost,
        last_token_s=_NOW_S - min(age_s, 0.02),
        expected_tokens=100.0,
    )
