"""When decodes have a step of their own while prefills run, each in a task of its own, and how long
a prefill's task may be beside them."""

from __future__ import annotations

from math import inf

import numpy as np

from sluice.scheduling.latency.model import UNBOUNDED_TOKENS, LatencyModel
from sluice.scheduling.request.kernels import Floats

MOST_FIXED_SHARE = 0.1
"""A task is not cut so short that more than this part of it is the fixed time of a step."""

USABLE = 0.9
"""The share of the time until its next token is due after which a decode is to have it: stops and
steps vary around what is planned. As the default head-room of ``deadline_triage`` leaves it."""

LEAST_GAP_SHARE = 0.25
"""Prefills have at least this share of a step's time between two steps."""

REMEMBERED_S = 60.0
"""How long the tightest TPOT of decodes bounds the tasks of prefills after it was seen, seconds: a
task that began before such a decode came would not be stopped in time for it."""


def decode_step_due_s(
    first_token_s: Floats,
    emitted: Floats,
    last_token_s: Floats,
    tpot_s: Floats,
    step_s: float,
    gap_s: float,
    stop_s: float = 0.0,
) -> float | None:
    """When a step of all decodes has to begin, so that each has its next token within most of a
    TPOT after its last one, and keeps its TPOT since the first one; None without decodes.
    ``O(decodes)``.

    A step that was late is made up for, by earlier ones that leave prefills
    ``LEAST_GAP_SHARE`` of the step's time at least. What was won is a lead, and covers a later one.

    FlowPrefill §6.5 runs both phases at once on one device; here they take turns.

    Args:
        first_token_s: when each emitted its first token, ``[decodes]``; nan for one that makes
            nothing up.
        emitted: how many tokens each has emitted since, with the first one.
        last_token_s: when each emitted its last token.
        tpot_s: the TPOT of each, seconds.
        step_s: predicted time of the step.
        gap_s: time from the last token to the step for a decode without a TPOT, or with one that is
            not longer than the step: no step could hold it, and prefills would starve.
        stop_s: how long it takes until the running prefill has stopped for the step.
    """
    if not len(last_token_s):
        return None
    ahead_s = first_token_s + emitted * tpot_s - last_token_s
    usable_s = USABLE * np.fmin(ahead_s, tpot_s)
    gaps_s = np.maximum(usable_s - step_s - stop_s, LEAST_GAP_SHARE * step_s)
    gaps_s[~((tpot_s > step_s) & (tpot_s < inf))] = gap_s
    return float((last_token_s + gaps_s).min())


class DecodeTurns:
    """What an engine knows of the stops of its prefills, and of the pace of its decodes.

    A prefill stops before its next operator, so it takes the longer to stop the longer it is. The
    time of stops is known as a share of the stopped tasks'. A task is so short that it stops within
    half of the time that a step leaves of the tightest TPOT: a task that began before a decode came
    would delay each of its steps, and admission promises no TPOT beside it.

    Args:
        checks: how many points a prefill has where it can stop; 0: none stops. Until stops are
            seen, one takes the time between two.
    """

    def __init__(self, checks: int) -> None:
        self._first = 1.0 / checks if checks else 0.0
        self._took_s = self._tasks_s = 0.0
        self._tightest_s = inf
        self._seen_s = -inf

    def stopped(self, took_s: float, task_s: float) -> None:
        """A task of ``task_s`` predicted seconds stopped ``took_s`` after the signal."""
        if not self._tasks_s:
            self._took_s, self._tasks_s = self._first * task_s, task_s
        self._took_s += min(took_s, task_s)
        self._tasks_s += task_s

    def stop_s(self, task_s: float) -> float:
        """The time to plan for the stop of a task of ``task_s`` predicted seconds: twice the mean,
        which most stops do not exceed."""
        share = self._took_s / self._tasks_s if self._tasks_s else self._first
        return 2.0 * share * task_s

    def most_tokens(
        self,
        tpot_s: Floats,
        step_s: float,
        model: LatencyModel,
        computed: int,
        least: int,
        now_s: float,
        gap_s: float = inf,
    ) -> int:
        """Most tokens of a task of prefills.

        Args:
            tpot_s: the TPOT of each guaranteed request that decodes, or will behind its prefill.
            step_s: predicted time of their step, or of the fixed time of one without any.
            model: predicts the task's time.
            computed: tokens of its prompt that are computed.
            least: fewest tokens of a task that can be stopped.
            now_s: the time.
            gap_s: time between two steps of the decodes that may come, but at least twice that of a
                step; infinite where no request decodes.
        """
        held = tpot_s[tpot_s > step_s]
        tightest_s = float(held.min()) if len(held) else inf
        if tightest_s <= self._tightest_s or now_s - self._seen_s > REMEMBERED_S:
            self._tightest_s, self._seen_s = tightest_s, now_s
        stop_s, tightest_s = self.stop_s(1.0), min(self._tightest_s, max(gap_s, 2.0 * step_s))
        if tightest_s == inf or stop_s == 0.0:
            return UNBOUNDED_TOKENS
        task_s = max(0.0, tightest_s - step_s) / 2.0 / stop_s
        work_s = max(task_s, model.fixed_s / MOST_FIXED_SHARE) - model.fixed_s
        return max(least, model.tokens_within(work_s, computed))
