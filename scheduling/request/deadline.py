"""When the next token of a request is due, also after a failure, which TPOT an end-to-end time
sets, and whether a request needs a prefill: one rule each, for plans, reports, gains and clocks.

Plain Python on numbers, which :mod:`sluice.scheduling.request.kernels` compiles. An objective that
is not stated is infinite, an unknown time is nan. Sources: FairBatching §3.1 and ProServe Eq. 3."""

from __future__ import annotations

from math import inf
from typing import Final

ENVELOPE: Final = 0
FIRST: Final = 1
LAST: Final = 2
"""The numbers of :class:`Anchor` in compiled loops."""


def next_due_s(
    emitted: float,
    arrival_s: float,
    ttft_s: float,
    tpot_s: float,
    e2e_s: float,
    first_token_s: float,
    last_token_s: float,
    anchor: int,
) -> float:
    """Deadline of the token after ``emitted`` ones, on the clock of ``arrival_s``.

    Our reading: without TTFT the first token is due by the end-to-end deadline, and the later ones
    start from the first token's real time; no token is due after the end-to-end deadline."""
    due_s = arrival_s + ttft_s
    if emitted > 0:
        # A time that is not known is nan: it compares as false, also with itself.
        if anchor == LAST and last_token_s == last_token_s:
            due_s = last_token_s + tpot_s
        else:
            if first_token_s < due_s and (anchor != ENVELOPE or ttft_s == inf):
                due_s = first_token_s
            due_s += emitted * tpot_s
    return min(due_s, arrival_s + e2e_s)


def paced(ttft_s: float, tpot_s: float, e2e_s: float, tokens: float) -> tuple[float, float]:
    """The TTFT and the TPOT, seconds, that hold an end-to-end objective, too, with an output of
    ``tokens``: the first token comes earlier than its TTFT if the others need it, but has half of
    the whole time at least."""
    later = tokens - 1.0
    if e2e_s == inf:
        return ttft_s, tpot_s
    if later <= 0.0:
        return min(ttft_s, e2e_s), tpot_s
    latest_s = e2e_s - later * tpot_s
    first_s = min(ttft_s, max(e2e_s / 2.0, latest_s))
    return first_s, tpot_s if first_s <= latest_s else (e2e_s - first_s) / later


def resumed_ttft_s(ttft_s: float, tpot_s: float, emitted: float, waited_s: float) -> float:
    """The TTFT of the rest of a request that another replica resumes after ``emitted`` tokens at
    the age ``waited_s``: its next token is due by the objective, or as soon as that of a new
    request."""
    due_s = ttft_s + emitted * tpot_s if tpot_s < inf else 0.0
    return max(due_s, waited_s + ttft_s)


def needs_prefill(emitted: float, pending: float) -> bool:
    """Whether the next token needs more than a decode step: there is no output yet, or the KV was
    lost."""
    return emitted == 0 or pending > 1
