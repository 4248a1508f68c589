"""Streams that say that their promise is going to be missed, before it is.

The open attempts are looked at a few times a second, so tokens cost nothing. A first token is
announced as late when its deadline is about to pass: neither the engine's plan nor the controller
knows it earlier with any certainty, as most that are late are late by less than one step. Later
tokens are late once the stream could not be in time at :data:`FASTER` of the shortest time per
token that it has had: engines hurry what is behind, so its recent rate says little."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Final

from sluice.router.dispatch.attempt import Announcement, Answer, Attempt, OpenAttempts
from sluice.router.request.prompt import outputs_of
from sluice.scheduling.request.objective import MIN_TPOT_TOKENS, Objective

LOOK_S: Final = 0.25
"""Longest time between two looks, seconds."""

FIRST_SHARE: Final = 0.002
"""A first token that has not come this share of its TTFT before its deadline, and
:data:`FIRST_LEAD_S` at least, is announced as late."""

FIRST_LEAD_S: Final = 0.001

FASTER: Final = 0.5
LONGER: Final = 3.0
"""A stream may become this many times as long again, and no longer than it may be."""


@dataclass(frozen=True, slots=True)
class Announcements:
    """The announcements of one router process and model. Runs on its event loop."""

    attempts: OpenAttempts
    clock: Callable[[], float]

    def look(self) -> None:
        """Look at all promised streams. ``O(open attempts)``."""
        now_s = self.clock()
        for attempt, answer in self.attempts.items():
            if answer.say is None or not answer.promises or attempt.tail is not None:
                continue
            known = answer.announcement
            if known is None:
                known = answer.announcement = Announcement()
            if known.said or answer.clock.slo.stages:
                continue
            if answer.clock.first_token_s is None:
                self._await_first(attempt, answer, known, now_s)
            elif (missed := late(answer, known, now_s)) is not None:
                known.said = True
                answer.say(missed, answer, attempt)

    def _await_first(
        self, attempt: Attempt, answer: Answer, known: Announcement, now_s: float
    ) -> None:
        """Say it shortly before the deadline, unless the token comes."""
        ttft_s = answer.clock.slo.ttft_s
        if ttft_s is None or known.timer is not None:
            return
        lead_s = max(FIRST_SHARE * ttft_s, FIRST_LEAD_S)
        left_s = answer.call.received_s + ttft_s - lead_s - now_s
        if left_s < 2 * LOOK_S:
            loop = asyncio.get_running_loop()
            known.timer = loop.call_later(max(0.0, left_s), first_is_late, attempt, answer)


def first_is_late(attempt: Attempt, answer: Answer) -> None:
    """The deadline of a first token is about to pass."""
    known = answer.announcement
    if known is not None and answer.clock.first_token_s is None and answer.say is not None:
        known.said = True
        answer.say("ttft", answer, attempt)


def late(answer: Answer, known: Announcement, now_s: float) -> Objective | None:
    """The objective that a stream with tokens can no longer meet, or ``None``."""
    clock, call = answer.clock, answer.call
    first_s, last_s, tokens = clock.first_token_s, clock.last_token_s, clock.tokens
    assert first_s is not None and last_s is not None
    if tokens > known.tokens:
        if known.tokens:
            pace_s = (last_s - known.at_s) / (tokens - known.tokens)
            known.best_s = min(known.best_s, pace_s)
        known.tokens, known.at_s = tokens, last_s
    most = call.output_tokens // outputs_of(call.endpoint, call.body) or inf
    left = min(most - tokens, LONGER * tokens)
    if left <= 0 or known.best_s == inf:
        return None
    ends_s = now_s + FASTER * known.best_s * left
    _, tpot_s, e2e_s, _ = clock.slo.columns
    # One slow step says nothing of few tokens.
    behind = tokens >= MIN_TPOT_TOKENS and now_s > first_s + (tokens - 1) * tpot_s
    if behind and ends_s > first_s + (tokens + left - 1) * tpot_s:
        return "tpot"
    return "e2e" if ends_s > clock.arrival_s + e2e_s else None
