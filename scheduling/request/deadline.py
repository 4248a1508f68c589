"""When the next token is due, what TPOT an end-to-end time sets, and whether a prefill is needed:
one rule each (FairBatching §3.1, ProServe Eq. 3). Plain Python that ``request.kernels`` compiles.
An objective that is not stated is infinite, an unknown time is nan."""

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
    """Deadline of the token after ``emitted`` ones, on the clock of ``arrival_s``. Our reading:
    without TTFT the first token is due by the end-to-end deadline, which bounds every token's;
    later ones start from its real time."""
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
    """The TTFT and the TPOT, seconds, that also hold an end-to-end objective with ``tokens`` of
    output: the TTFT shrinks if the others need it, to half of the whole time at least."""
    later = tokens - 1.0
    if e2e_s == inf:
        return ttft_s, tpot_s
    if later <= 0.0:
        return min(ttft_s, e2e_s), tpot_s
    latest_s = e2e_s - later * tpot_s
    first_s = min(ttft_s, max(e2e_s / 2.0, latest_s))
    return first_s, tpot_s if first_s <= latest_s else (e2e_s - first_s) / later


def resumed_ttft_s(ttft_s: float, tpot_s: float, emitted: float, waited_s: float) -> float:
    """The TTFT of a request resumed after ``emitted`` tokens at the age ``waited_s``: by its
    objective, or as soon as a new request's."""
    due_s = ttft_s + emitted * tpot_s if tpot_s < inf else 0.0
    return max(due_s, waited_s + ttft_s)


def needs_prefill(emitted: float, pending: float) -> bool:
    """Whether the next token needs more than a decode step: no output yet, or the KV was lost."""
    return emitted == 0 or pending > 1
