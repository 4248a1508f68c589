"""The gain functions: by hand, and each property that ProServe Table 1 claims or denies them.

A property is shown for all inputs that hypothesis can find. A property that is denied is shown by a
counter-example, or, where the denial is that the function cannot see something, for all inputs.
"""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec.structs import replace

from sluice.scheduling.request.kernels import Floats
from sluice.scheduling.request.objective import SLO, Anchor, GainWeights, TokenClock
from sluice.simulation.metrics import token_deadlines_s
from tests.scheduling.views import slos

PLAIN = GainWeights()


GainFunction = Callable[[SLO, float, Floats, GainWeights], float]
"""The gain of one request: its objective, its arrival and when its tokens left, seconds, and the
weights of a first and of a later token."""


def slo_attainment(
    slo: SLO, arrival_s: float, emitted_s: Floats, weights: GainWeights = PLAIN
) -> float:
    """1 if every stated objective was met, TPOT being the mean over the tokens after the first;
    else 0. The table's "vanilla SLO". A request without any token has missed."""
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
    """Tokens that kept their time to the token before. The table's "Tempo", for which ProServe
    gives no formula: our reading is TA-SLO at priority 1."""
    ttft_s, tpot_s, e2e_s, _ = slo.columns
    between_s = np.diff(emitted_s, prepend=arrival_s)
    allowed_s = np.full(len(emitted_s), tpot_s)
    allowed_s[:1] = ttft_s
    timely = (between_s < allowed_s) & (emitted_s - arrival_s < e2e_s)
    return float(timely @ _weights(len(emitted_s), weights))


def ta_slo(slo: SLO, arrival_s: float, emitted_s: Floats, weights: GainWeights = PLAIN) -> float:
    """Tokens that kept their time to the token before, weighted and times the priority: ProServe
    Eq. 2, token-level accumulated SLO. No token after a stated end-to-end objective counts."""
    return slo.priority * tempo(slo, arrival_s, emitted_s, weights)


def tdg(
    slo: SLO,
    arrival_s: float,
    emitted_s: Floats,
    weights: GainWeights = PLAIN,
    anchor: Anchor = Anchor.ENVELOPE,
) -> float:
    """Tokens that left before their deadline, weighted and times the priority: ProServe Eq. 3,
    token-level deadline-aware gain. Anchor ``FIRST_TOKEN`` is its footnote 2."""
    timely = emitted_s < deadlines_s(slo, arrival_s, emitted_s, anchor)
    return slo.priority * float(timely @ _weights(len(emitted_s), weights))


def deadlines_s(
    slo: SLO, arrival_s: float, emitted_s: Floats, anchor: Anchor = Anchor.ENVELOPE
) -> Floats:
    """Deadline of each token, :meth:`SLO.deadline_s` of all at once."""
    ttft_s, tpot_s, e2e_s, _ = slo.columns
    return token_deadlines_s(
        arrival_s, ttft_s, tpot_s, e2e_s, np.asarray(emitted_s, float), anchor.code
    )


def ideal_gain(
    function: GainFunction, slo: SLO, tokens: int, weights: GainWeights = PLAIN
) -> float:
    """The most that ``function`` can give for ``tokens`` tokens: all leave at once on arrival."""
    return function(slo, 0.0, np.zeros(tokens), weights)


def _weights(tokens: int, weights: GainWeights) -> Floats:
    values: Floats = np.full(tokens, weights.later)
    values[:1] = weights.first
    return values


WEIGHTS = GainWeights(first=30.0, later=1.0)
CHAT = SLO(ttft_s=1.0, tpot_s=0.1)

# The paper's setting: both objectives stated, and no other.
papers_slos = st.builds(
    SLO, ttft_s=st.floats(0.01, 5), tpot_s=st.floats(0.001, 1), priority=st.integers(1, 10)
)
weights = st.builds(GainWeights, first=st.floats(0.1, 100), later=st.floats(0.1, 10))

GAINS: dict[str, GainFunction] = {
    "slo": slo_attainment,
    "weighted_slo": weighted_slo,
    "tempo": tempo,
    "ta_slo": ta_slo,
    "tdg": tdg,
}
"""The functions of ProServe Table 1, in its order."""

TOKEN_LEVEL = (tempo, ta_slo, tdg)
REQUEST_LEVEL = (slo_attainment, weighted_slo)
WITH_PRIORITY = (weighted_slo, ta_slo, tdg)
WITHOUT_PRIORITY = (slo_attainment, tempo)


@st.composite
def emissions(draw: st.DrawFn, least: int = 0, most: int = 40) -> Floats:
    """Ascending times from 0, of bursts, steady tokens and stalls."""
    gaps = st.sampled_from([0.0, 0.001, 0.01, 0.05, 0.2, 1.0, 3.0])
    return np.cumsum(np.array(draw(st.lists(gaps, min_size=least, max_size=most))))


def at(*times: float) -> Floats:
    return np.array(times)


def test_the_functions_by_hand() -> None:
    # TTFT met by 0.2 s; the second token is on time, the third stalls, the fourth catches up.
    slo, times = replace(CHAT, priority=3), at(10.8, 10.85, 11.25, 11.29)
    gains = {name: gain(slo, 10.0, times, WEIGHTS) for name, gain in GAINS.items()}
    # Mean TPOT 0.49 / 3 is above 0.1; deadlines 11, 11.1, 11.2, 11.3.
    assert gains == {
        "slo": 0,
        "weighted_slo": 0,
        "tempo": 30 + 1 + 0 + 1,
        "ta_slo": 3 * 32,
        "tdg": 3 * (30 + 1 + 0 + 1),
    }
    assert slo_attainment(slo, 10.0, times[:2]) == 1
    assert weighted_slo(slo, 10.0, times[:2]) == 3


@pytest.mark.parametrize("gain", GAINS.values())
def test_nothing_emitted_gains_nothing(gain: GainFunction) -> None:
    assert gain(CHAT, 0.0, at(), WEIGHTS) == 0
    assert gain(SLO(), 0.0, at(), WEIGHTS) == 0


@pytest.mark.parametrize("gain", GAINS.values())
@given(slo=slos, times=emissions(least=1), weights=weights)
def test_no_emission_gains_more_than_the_ideal(
    gain: GainFunction, slo: SLO, times: Floats, weights: GainWeights
) -> None:
    ideal = ideal_gain(gain, slo, len(times), weights)
    assert 0 <= gain(slo, 0.0, times, weights) <= ideal
    expected = weights.first + weights.later * (len(times) - 1) if gain in TOKEN_LEVEL else 1.0
    assert ideal == pytest.approx(expected * (slo.priority if gain in WITH_PRIORITY else 1))


@given(slo=slos, times=emissions(), weights=weights, anchor=st.sampled_from(Anchor))
def test_tdg_is_what_a_token_clock_counts(
    slo: SLO, times: Floats, weights: GainWeights, anchor: Anchor
) -> None:
    clock = TokenClock(slo, 5.0, weights, anchor)
    for now_s in (times + 5.0).tolist():
        clock.emit(1, now_s)
    assert tdg(slo, 5.0, times + 5.0, weights, anchor) == pytest.approx(clock.gain)
    assert ideal_gain(tdg, slo, len(times), weights) == pytest.approx(clock.ideal_gain)


@given(slo=slos, times=emissions(), anchor=st.sampled_from(Anchor))
def test_deadlines_are_the_objectives(slo: SLO, times: Floats, anchor: Anchor) -> None:
    expected = [
        slo.deadline_s(
            index + 1,
            5.0,
            times[0] + 5.0 if index else None,
            anchor,
            times[index - 1] + 5.0 if index else None,
        )
        for index in range(len(times))
    ]
    assert deadlines_s(slo, 5.0, times + 5.0, anchor).tolist() == pytest.approx(expected)


# Row 1: distinguishes request priority.


@pytest.mark.parametrize("gain", WITH_PRIORITY)
@given(slo=papers_slos, times=emissions(), weights=weights, priority=st.integers(1, 10))
def test_gain_is_proportional_to_priority(
    gain: GainFunction, slo: SLO, times: Floats, weights: GainWeights, priority: int
) -> None:
    other = gain(replace(slo, priority=priority), 0.0, times, weights)
    assert other * slo.priority == pytest.approx(gain(slo, 0.0, times, weights) * priority)


@pytest.mark.parametrize("gain", WITHOUT_PRIORITY)
@given(slo=papers_slos, times=emissions(), priority=st.integers(1, 10))
def test_gain_is_blind_to_priority(
    gain: GainFunction, slo: SLO, times: Floats, priority: int
) -> None:
    assert gain(replace(slo, priority=priority), 0.0, times) == gain(slo, 0.0, times)


# Row 2: aware of per-token latency.


@pytest.mark.parametrize("gain", TOKEN_LEVEL)
def test_gain_sees_a_stall_behind_an_equal_mean(gain: GainFunction) -> None:
    # Equal first and last token, but in one case all waits fall together.
    late = np.concatenate([[0.5], np.full(10, 1.9)])
    tight = replace(CHAT, tpot_s=0.15)
    steady = 0.5 + 0.14 * np.arange(11)
    assert slo_attainment(tight, 0.0, late) == slo_attainment(tight, 0.0, steady) == 1
    assert gain(tight, 0.0, late, WEIGHTS) < gain(tight, 0.0, steady, WEIGHTS)


@pytest.mark.parametrize("gain", REQUEST_LEVEL)
@given(slo=papers_slos, times=emissions(least=3), data=st.data())
def test_gain_sees_only_the_ends(
    gain: GainFunction, slo: SLO, times: Floats, data: st.DataObject
) -> None:
    moved = times.copy()
    inner = st.floats(float(times[0]), float(times[-1]))
    moved[1:-1] = sorted(data.draw(inner) for _ in times[1:-1])
    assert gain(slo, 0.0, moved) == gain(slo, 0.0, times)


# Row 3: distinguishes the importance of first and later tokens.


@pytest.mark.parametrize("gain", TOKEN_LEVEL)
@given(weights=weights, priority=st.integers(1, 10))
def test_a_missed_first_token_costs_its_own_weight(
    gain: GainFunction, weights: GainWeights, priority: int
) -> None:
    slo = replace(CHAT, priority=priority)
    worth = priority if gain in WITH_PRIORITY else 1
    ideal = ideal_gain(gain, slo, 4, weights)
    # Late by 0.01 s; the others are then within their time again.
    first_late = gain(slo, 0.0, at(1.01, 1.05, 1.1, 1.15), weights)
    assert ideal - first_late == pytest.approx(worth * weights.first)
    # The third one late, by its deadline and by its distance.
    third_late = gain(slo, 0.0, at(0.95, 1.04, 1.25, 1.26), weights)
    assert ideal - third_late == pytest.approx(worth * weights.later)


@pytest.mark.parametrize("gain", REQUEST_LEVEL)
@given(slo=papers_slos, times=emissions(), weights=weights)
def test_gain_is_blind_to_which_token_is_late(
    gain: GainFunction, slo: SLO, times: Floats, weights: GainWeights
) -> None:
    assert gain(slo, 0.0, times, weights) == gain(slo, 0.0, times)


# Row 4, first half: no reason to discard a request that is late already.


@pytest.mark.parametrize("gain", TOKEN_LEVEL)
@given(slo=papers_slos, late=st.floats(0.001, 50), weights=weights)
def test_serving_on_a_late_request_still_gains(
    gain: GainFunction, slo: SLO, late: float, weights: GainWeights
) -> None:
    assert slo.ttft_s is not None and slo.tpot_s is not None
    first_s = slo.ttft_s + late
    # Served at once from here on, with as many tokens as there is a deadline still ahead of.
    tokens = int(late / slo.tpot_s) + 3
    assume(tokens < 60_000)
    served = gain(slo, 0.0, np.full(tokens, first_s), weights)
    discarded = gain(slo, 0.0, at(first_s), weights)
    assert discarded == 0
    assert served > 0


@pytest.mark.parametrize("gain", REQUEST_LEVEL)
@given(slo=papers_slos, late=st.floats(0.001, 50), times=emissions())
def test_a_request_that_missed_its_first_token_is_worth_nothing_any_more(
    gain: GainFunction, slo: SLO, late: float, times: Floats
) -> None:
    assert slo.ttft_s is not None
    assert gain(slo, 0.0, slo.ttft_s + late + times) == 0


# Row 4, second half: no reason to postpone a token.


@given(slo=papers_slos, times=emissions(), weights=weights, data=st.data())
def test_tdg_never_falls_when_tokens_leave_earlier(
    slo: SLO, times: Floats, weights: GainWeights, data: st.DataObject
) -> None:
    shares = data.draw(st.lists(st.floats(0, 1), min_size=len(times), max_size=len(times)))
    earlier = np.minimum.accumulate((times * np.array(shares))[::-1])[::-1]
    assert (earlier <= times).all()
    assert tdg(slo, 0.0, earlier, weights) >= tdg(slo, 0.0, times, weights)


@pytest.mark.parametrize("gain", [tempo, ta_slo])
def test_by_time_between_tokens_a_late_token_is_better_postponed(gain: GainFunction) -> None:
    # The second token has missed already, the third cannot leave before 1.3 s.
    now, postponed = at(0.5, 1.1, 1.3), at(0.5, 1.25, 1.3)
    assert gain(CHAT, 0.0, postponed) > gain(CHAT, 0.0, now)
    assert tdg(CHAT, 0.0, postponed) == tdg(CHAT, 0.0, now), "deadlines do not move"


@pytest.mark.parametrize("gain", REQUEST_LEVEL)
def test_by_attainment_the_first_token_is_better_postponed(gain: GainFunction) -> None:
    # Four more tokens leave at 1.3 s whatever happens: 0.2 s each, or 0.085 s.
    now, postponed = at(0.5, 1.3, 1.3, 1.3, 1.3), at(0.96, 1.3, 1.3, 1.3, 1.3)
    assert gain(CHAT, 0.0, postponed) > gain(CHAT, 0.0, now)


def test_the_footnotes_anchor_gives_up_that_property() -> None:
    # An early first token starts the clock of the others.
    early, late = at(0.1, 1.05), at(0.99, 1.05)
    assert tdg(CHAT, 0.0, early) == tdg(CHAT, 0.0, late) == 2
    first_token = {
        name: tdg(CHAT, 0.0, times, anchor=Anchor.FIRST_TOKEN)
        for name, times in (("early", early), ("late", late))
    }
    assert first_token == {"early": 1, "late": 2}
