"""What serving a request was worth, by each gain function of ProServe Table 1.

A gain function maps the emission times of one request's tokens and its objective to a number; a
system maximises the sum over its requests (ProServe §2). The table claims for each function whether
it tells priorities apart, sees the time of every token, tells the first token from the later ones,
and gives no reason to discard or to postpone work; the tests hold each to those claims.

Every function is ``O(tokens)``, vectorised over them, and has the form of :class:`GainFunction`.
"""

from __future__ import annotations

from math import nan
from typing import Protocol

import numpy as np

from sluice.scheduling.request.kernels import Floats, compiled, next_due_s
from sluice.scheduling.request.objective import SLO, Anchor, GainWeights

PLAIN = GainWeights()


class GainFunction(Protocol):
    """The gain of one request."""

    def __call__(
        self, slo: SLO, arrival_s: float, emitted_s: Floats, weights: GainWeights = PLAIN
    ) -> float:
        """The gain.

        Args:
            slo: its objective and its priority.
            arrival_s: its arrival, seconds.
            emitted_s: ``float64[tokens]``: when each of its tokens left, ascending, on the same
                clock. Tokens that never left are not in it.
            weights: of a first and of a later token, where the function tells them apart.
        """


def slo_attainment(
    slo: SLO, arrival_s: float, emitted_s: Floats, weights: GainWeights = PLAIN
) -> float:
    """1 if every stated objective was met, TPOT being the mean over the tokens after the first;
    else 0. The table's "vanilla SLO".

    Our readings: a request without any token has missed; one with a single token has no TPOT.
    """
    tokens = len(emitted_s)
    if tokens == 0:
        return 0.0
    ttft_s, tpot_s, e2e_s, _ = slo.columns
    first_s, last_s = float(emitted_s[0]), float(emitted_s[-1])
    mean_s = (last_s - first_s) / (tokens - 1) if tokens > 1 else 0.0
    met = first_s - arrival_s <= ttft_s and mean_s <= tpot_s and last_s - arrival_s <= e2e_s
    return float(met)


def weighted_slo(
    slo: SLO, arrival_s: float, emitted_s: Floats, weights: GainWeights = PLAIN
) -> float:
    """Attainment times the priority. ProServe Eq. 1."""
    return slo.priority * slo_attainment(slo, arrival_s, emitted_s)


def tempo(slo: SLO, arrival_s: float, emitted_s: Floats, weights: GainWeights = PLAIN) -> float:
    """Tokens that kept their time to the token before. The table's "Tempo".

    ProServe gives no formula for it; it says that TA-SLO is inspired by it and that it differs by
    not knowing priorities. So our reading is TA-SLO at priority 1.
    """
    ttft_s, tpot_s, e2e_s, _ = slo.columns
    between_s = np.diff(emitted_s, prepend=arrival_s)
    allowed_s = np.full(len(emitted_s), tpot_s)
    allowed_s[:1] = ttft_s
    timely = (between_s < allowed_s) & (emitted_s - arrival_s < e2e_s)
    return float(timely @ _weights(len(emitted_s), weights))


def ta_slo(slo: SLO, arrival_s: float, emitted_s: Floats, weights: GainWeights = PLAIN) -> float:
    """Tokens that kept their time to the token before, weighted and times the priority: ProServe
    Eq. 2, token-level accumulated SLO, with our TPOT as its time between tokens.

    Our reading where a request states an end-to-end objective: no token after it counts.
    """
    return slo.priority * tempo(slo, arrival_s, emitted_s, weights)


def tdg(
    slo: SLO,
    arrival_s: float,
    emitted_s: Floats,
    weights: GainWeights = PLAIN,
    anchor: Anchor = Anchor.ENVELOPE,
) -> float:
    """Tokens that left before their deadline, weighted and times the priority: ProServe Eq. 3,
    token-level deadline-aware gain.

    Args:
        anchor: where the deadlines of later tokens start. ``ENVELOPE`` is the paper's, and the only
            one with the properties that it claims; ``FIRST_TOKEN`` is its footnote 2.
    """
    timely = emitted_s < deadlines_s(slo, arrival_s, emitted_s, anchor)
    return slo.priority * float(timely @ _weights(len(emitted_s), weights))


def deadlines_s(
    slo: SLO, arrival_s: float, emitted_s: Floats, anchor: Anchor = Anchor.ENVELOPE
) -> Floats:
    """Deadline of each token, :meth:`~sluice.scheduling.request.objective.SLO.deadline_s` of all at
    once."""
    ttft_s, tpot_s, e2e_s, _ = slo.columns
    return token_deadlines_s(
        arrival_s, ttft_s, tpot_s, e2e_s, np.asarray(emitted_s, float), anchor.code
    )


@compiled
def token_deadlines_s(
    arrival_s: float, ttft_s: float, tpot_s: float, e2e_s: float, emitted_s: Floats, anchor: int
) -> Floats:
    """The same with the objectives as numbers: infinite where none is stated."""
    due_s = np.empty(emitted_s.shape[0])
    for token in range(emitted_s.shape[0]):
        first_s = emitted_s[0] if token > 0 else nan
        last_s = emitted_s[token - 1] if token > 0 else nan
        due_s[token] = next_due_s(token, arrival_s, ttft_s, tpot_s, e2e_s, first_s, last_s, anchor)
    return due_s


def ideal_gain(
    function: GainFunction, slo: SLO, tokens: int, weights: GainWeights = PLAIN
) -> float:
    """The most that ``function`` can give for ``tokens`` tokens: all leave at once on arrival.
    The TDG ratio of ProServe §5.1 is the sum of gains over the sum of these."""
    return function(slo, 0.0, np.zeros(tokens), weights)


def _weights(tokens: int, weights: GainWeights) -> Floats:
    values: Floats = np.full(tokens, weights.later)
    values[:1] = weights.first
    return values


GAINS: dict[str, GainFunction] = {
    "slo": slo_attainment,
    "weighted_slo": weighted_slo,
    "tempo": tempo,
    "ta_slo": ta_slo,
    "tdg": tdg,
}
"""The functions of ProServe Table 1, in its order."""
