"""The measurement of speculation lengths in a real engine: its load, and how it makes its rates."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.scheduling.latency.model import LinearLatency
from sluice.scheduling.request.objective import SLO, Anchor
from sluice.scheduling.request.queue import QueueView, RequestView
from tests.examples import examples
from tests.replica.speculation_rates import KINDS, FixedLengths, arrivals, rate_at


@settings(max_examples=examples(20))
@given(rate=st.floats(0.5, 50), step_s=st.floats(0.001, 0.1), seed=st.text(max_size=5))
def test_the_load_is_what_was_asked_for(rate, step_s, seed):
    drawn = arrivals(step_s, rate, 400, seed)
    assert drawn == arrivals(step_s, rate, 400, seed)
    assert len(drawn) == 400
    times = [each.at_s for each in drawn]
    assert times == sorted(times) and times[0] == 0
    assert times[-1] == pytest.approx(400 / rate, rel=0.35)
    assert len({each.name for each in drawn}) == len(drawn)
    for each in drawn:
        kind = KINDS[each.slo.service_class]
        assert kind.prompt[0] <= len(each.prompt) <= kind.prompt[1]
        assert kind.output[0] <= each.output <= kind.output[1]
        assert each.slo.tpot_s == kind.tpot * step_s
        assert (each.temperature == 0) is kind.repetitive
        if kind.repetitive:
            assert len(set(each.prompt)) <= 8
    for name, kind in KINDS.items():
        share = sum(each.slo.service_class == name for each in drawn) / len(drawn)
        assert share == pytest.approx(kind.share, abs=0.15)


@pytest.mark.parametrize(
    ("shares", "rate"),
    [
        ([(1.0, 1.0), (2.0, 0.95)], 2.0),
        ([(1.0, 1.0), (2.0, 0.8)], 1.5),
        ([(1.0, 0.95), (2.0, 0.85), (3.0, 1.0)], 1.5),
        ([(1.0, 0.8)], 0.5),
        ([(1.0, 0.9)], 1.0),
        ([(2.0, 0.0)], 0.2),
    ],
)
def test_the_rate_at_which_enough_attain_lies_between_measured_ones(shares, rate):
    assert rate_at(shares, 0.9) == pytest.approx(rate)


@given(
    st.lists(st.integers(0, 8), min_size=1, max_size=8),
    st.integers(0, 8),
)
def test_fixed_lengths_check_what_is_drafted_up_to_them(drafted, most):
    decodes = [
        RequestView(str(number), SLO(), 0.0, 10, 12, 1, 3, 1.0, 1, True, 2.0, drafted_tokens=drafts)
        for number, drafts in enumerate(drafted)
    ]
    lengths = FixedLengths(most).choose(
        QueueView(decodes), 3.0, LinearLatency(0.01, 0.001), 1000, 0.0, Anchor.FIRST_TOKEN
    )
    assert lengths.drafts.tolist() == np.minimum(drafted, most).tolist()
