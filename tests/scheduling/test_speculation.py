"""Speculation lengths against a search of all of them, what they do to plans, and acceptance rates
against chance."""

import random
from functools import partial
from itertools import product
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.scheduling.latency import speculation as solver
from sluice.scheduling.latency.model import (
    LatencyModel,
    LinearLatency,
    PrefillDecodeLatency,
    RooflineLatency,
)
from sluice.scheduling.latency.speculation import (
    CREDIT,
    MAX_CLASSES,
    MAX_LENGTH,
    MEMORY_TRIALS,
    PRIOR_ACCEPTANCE,
    AcceptanceRates,
    AdaptiveLengths,
    AllDrafts,
    Lengths,
    accepted_tokens,
    for_decodes,
    for_prefills,
    within_s,
)
from sluice.scheduling.request.kernels import FIXED, PREFILL_TOKENS, Ints, work_s
from sluice.scheduling.request.objective import SLO, Anchor
from sluice.scheduling.request.queue import RequestView
from tests.examples import examples
from tests.scheduling import views
from tests.scheduling.views import ROOMY, decode, prefill, queue_of

MODEL = LinearLatency(a=0.02, b=0.0001)
MODELS = (
    MODEL,
    LinearLatency(a=0.0, b=0.001),
    LinearLatency(a=0.05, b=0.00001, c=1e-7, d=1e-9),
    PrefillDecodeLatency(1e-9, 1e-8, 1e-4, 1e-7, 2e-4, 0.01),
    RooflineLatency(0.0001, 0.0, 0.0, 0.00001, 0.0, 0.04),
)


class Decodes:
    """Some decodes as the solver has them."""

    def __init__(self, rows: list[tuple[float, float, float, int, int, bool]]) -> None:
        tpot, ahead, alpha, context, most, binds = map(list, zip(*rows, strict=True))
        self.tpot_s = np.array(tpot)
        self.left_s = self.tpot_s * np.array(ahead)
        self.alpha = np.array(alpha)
        self.context = np.array(context, np.float64)
        self.most = np.array(most)
        self.binds = np.array(binds)
        self.floor_s = float(self.tpot_s.min())

    def solved(self, most: Ints) -> solver.Decodes:
        return solver.Decodes(
            self.left_s, self.tpot_s, self.tpot_s, self.alpha, self.context, most, self.binds
        )

    def within_s(self, row: int, length: int) -> float:
        return float(within_s(self.left_s[row], self.tpot_s[row], self.alpha[row], length))

    def output(self, row: int, length: int) -> float:
        return float(accepted_tokens(length, self.alpha[row]))


decodes_of = st.builds(
    Decodes,
    st.lists(
        st.tuples(
            st.floats(0.02, 0.3),
            st.floats(0.0, 2.5),
            st.sampled_from([0.0, 0.1, 0.5, 0.7, 0.9]),
            st.integers(0, 4_000),
            st.integers(1, MAX_LENGTH),
            st.booleans(),
        ),
        min_size=1,
        max_size=3,
    ),
)


def prefill_rate(
    decodes: Decodes, lengths: tuple[int, ...], latency: LatencyModel, draft_s: float
) -> float:
    """Most prefill tokens per second by the definition, over all batch times; none where a pace
    could be kept and is not."""
    held = [decodes.within_s(row, n) for row, n in enumerate(lengths)]
    binding = np.flatnonzero(decodes.binds)
    left_s = min(decodes.left_s[binding], default=0.0)
    floor_s = max(decodes.floor_s, left_s)
    most_s = max(floor_s, min((held[row] for row in binding), default=floor_s))
    best = -inf
    for batch_s in {floor_s, most_s, *(h for h in held if floor_s <= h <= most_s)}:
        kept = zip(held, lengths, decodes.most, strict=True)
        if any(h < batch_s and n < m for h, n, m in kept):
            continue
        rates = []
        for piece in latency.pieces:
            load = sum(
                work_s(piece, float(n), decodes.context[row])
                / (decodes.output(row, n) * decodes.tpot_s[row])
                for row, n in enumerate(lengths)
            )
            spare = 1 - load - (piece[FIXED] + draft_s * (max(lengths) - 1)) / batch_s
            rates.append(spare / piece[PREFILL_TOKENS])
        best = max(best, float(min(rates)))
    return best


@settings(max_examples=examples(60))
@given(
    decodes=decodes_of,
    draft_s=st.sampled_from([0.0, 0.001, 0.01]),
    latency=st.sampled_from(MODELS),
)
def test_no_other_lengths_leave_more_prefill(
    decodes: Decodes, draft_s: float, latency: LatencyModel
) -> None:
    found, lengths = max(
        (
            for_prefills(
                latency.pieces,
                decodes.solved(np.minimum(decodes.most, cap)),
                decodes.floor_s,
                draft_s,
            )
            # With a draft model the longest length has a price, so each is tried.
            for cap in (range(1, MAX_LENGTH + 1) if draft_s else (MAX_LENGTH,))
        ),
        key=lambda pair: pair[0],
    )
    if not draft_s:
        rate = prefill_rate(decodes, tuple(lengths.tolist()), latency, draft_s)
        assert found == pytest.approx(rate)
    best = max(
        prefill_rate(decodes, every, latency, draft_s)
        for every in product(*(range(1, most + 1) for most in decodes.most))
    )
    assert found >= best - 1e-6 * abs(best)


def test_with_one_tier_it_is_the_problem_of_the_paper() -> None:
    # SLOs-Serve appendix D: (time2bs(T) - n sl) / T with T = TPOT Acc(sl).
    tpot_s, alpha, count = 0.05, 0.7, 20
    decodes = Decodes([(tpot_s, 1.0, alpha, 0, MAX_LENGTH, True)] * count)
    found, lengths = for_prefills(MODEL.pieces, decodes.solved(decodes.most), tpot_s, 0.0)
    expected = {}
    for length in range(1, MAX_LENGTH + 1):
        batch_s = tpot_s * (1 - alpha**length) / (1 - alpha)
        expected[length] = ((batch_s - 0.02) / 0.0001 - count * length) / batch_s
    assert found == pytest.approx(max(expected.values()))
    assert set(lengths) == {max(expected, key=lambda length: expected[length])}


@settings(max_examples=examples(60))
@given(
    decodes=decodes_of,
    draft_s=st.sampled_from([0.0, 0.001]),
    latency=st.sampled_from(MODELS[:3]),
)
def test_decodes_alone_get_nearly_the_most_output_per_second(
    decodes: Decodes, draft_s: float, latency: LatencyModel
) -> None:
    def rate(lengths: tuple[int, ...]) -> float:
        seconds = max(
            piece[FIXED]
            + sum(work_s(piece, float(n), c) for n, c in zip(lengths, decodes.context, strict=True))
            for piece in latency.pieces
        )
        seconds += draft_s * (max(lengths) - 1)
        return float(sum(decodes.output(row, n) for row, n in enumerate(lengths)) / seconds)

    slack = np.full(len(decodes.most), inf)
    found, lengths = max(
        (
            for_decodes(
                latency.pieces,
                decodes.solved(np.minimum(decodes.most, cap))._replace(left_s=slack),
                draft_s,
            )
            for cap in range(1, MAX_LENGTH + 1)
        ),
        key=lambda pair: pair[0],
    )
    assert found == pytest.approx(rate(tuple(lengths.tolist())))
    best = max(map(rate, product(*(range(1, most + 1) for most in decodes.most))))
    assert best * 0.95 <= found <= best * (1 + 1e-9)


def test_expected_tokens_of_a_step() -> None:
    assert accepted_tokens(1, 0.7) == pytest.approx(1)
    assert accepted_tokens(3, 0.5) == pytest.approx(1.75)
    assert accepted_tokens(10, 0.0) == 1


TIGHT, LOOSE = SLO(ttft_s=5.0, tpot_s=0.03), SLO(ttft_s=5.0, tpot_s=0.2)
PROMPT = prefill("prompt", 20_000, SLO(ttft_s=60.0))


def drafting(
    name: str, slo: SLO, alpha: float = 0.8, drafted: int = 9, left: float = 1.0
) -> RequestView:
    """A decode whose next token is due in ``left`` TPOTs from time 0."""
    assert slo.tpot_s is not None
    made = decode(name, slo, first_token_s=(left - 1) * slo.tpot_s, arrival_s=-5.0)
    made = made._replace(last_token_s=made.first_token_s)
    return made._replace(drafted_tokens=drafted, acceptance=alpha)


def lengths_of(
    *requests: RequestView,
    latency: LatencyModel = MODEL,
    tokens: int = 8_192,
    draft_s: float = 0.0,
    anchor: Anchor = Anchor.FIRST_TOKEN,
    by: AdaptiveLengths | None = None,
) -> Lengths:
    """Lengths for requests whose TPOT all count, at time 0."""
    held = np.ones(len(requests), np.bool_)
    by = by or AdaptiveLengths()
    return by.choose(queue_of(*requests), 0.0, latency, tokens, draft_s, anchor, 0.0, held)


def test_it_speculates_for_the_tight_tier_where_the_step_is_mostly_fixed_time() -> None:
    # 30 ms against 20 ms of fixed time leave little; two tokens of the tight tier's step allow
    # 54 ms and leave more. The loose tier keeps its pace without.
    both = [drafting(f"t{n}", TIGHT) for n in range(5)] + [
        drafting(f"l{n}", LOOSE) for n in range(5)
    ]
    found = lengths_of(*both, PROMPT)
    assert min(found.drafts[:5]) >= 1
    assert not found.drafts[5:].any()
    assert found.output[0] == pytest.approx(accepted_tokens(1 + found.drafts[0], 0.8))
    assert found.credit_s[0] == pytest.approx(CREDIT * (found.output[0] - 1) * 0.03)


def test_it_does_not_where_nothing_is_accepted_or_drafting_is_dear() -> None:
    hopeless = [drafting(f"t{n}", TIGHT, alpha=0.0) for n in range(5)]
    assert not lengths_of(*hopeless, PROMPT).drafts.any()
    assert not lengths_of(*hopeless).drafts.any()
    hopeful = [drafting(f"t{n}", TIGHT) for n in range(5)]
    assert not lengths_of(*hopeful, PROMPT, draft_s=0.05).drafts.any()
    assert not lengths_of(*hopeful, draft_s=0.05).drafts.any()


def test_nothing_is_checked_where_no_tpot_bounds_the_batch_and_drafts_only_cost() -> None:
    free = [drafting(f"d{n}", LOOSE) for n in range(5)]
    chosen = AdaptiveLengths().choose(
        queue_of(*free, PROMPT), 0.0, MODEL, 8_192, 0.0, Anchor.FIRST_TOKEN
    )
    assert not chosen.drafts.any()
    # Where reading the context is dear, one reading for several tokens is cheaper.
    reading = LinearLatency(a=0.02, b=1e-6, c=1e-5)
    chosen = AdaptiveLengths().choose(
        queue_of(*free, PROMPT), 0.0, reading, 8_192, 0.0, Anchor.FIRST_TOKEN
    )
    assert chosen.drafts[:5].all()


def test_alone_few_decodes_check_much_and_many_little() -> None:
    few = [drafting(f"d{n}", LOOSE) for n in range(2)]
    many = [drafting(f"d{n}", LOOSE) for n in range(400)]
    heavy = LinearLatency(a=0.02, b=0.001)
    assert min(lengths_of(*few, latency=heavy).drafts) >= 3
    assert max(lengths_of(*many, latency=heavy).drafts) < min(lengths_of(*few).drafts)


def test_one_that_fell_behind_takes_more_of_the_batch_and_makes_it_shorter() -> None:
    others = [drafting(f"t{n}", TIGHT) for n in range(5)]
    on_pace = lengths_of(drafting("x", TIGHT), *others, PROMPT)
    behind = lengths_of(drafting("x", TIGHT, left=0.2), *others, PROMPT)
    assert on_pace.drafts[0] == behind.drafts[0] == MAX_LENGTH - 1
    # It has no more to give, so the batch ends as much earlier as it is behind.
    assert max(behind.drafts[1:6]) < max(on_pace.drafts[1:6])
    slack = [drafting("x", TIGHT, left=0.2), *(drafting(f"t{n}", TIGHT, left=2) for n in range(5))]
    mixed = lengths_of(*slack, PROMPT)
    assert mixed.drafts[0] > max(mixed.drafts[1:6])


@pytest.mark.parametrize("anchor", [Anchor.FIRST_TOKEN, Anchor.LAST_TOKEN])
def test_a_step_that_ran_on_time_is_no_reason_for_drafts_that_cost_more_than_they_give(
    anchor: Anchor,
) -> None:
    # A plan is made a moment after the tokens left, so less than a TPOT is left.
    hopeless = [drafting(f"t{n}", TIGHT, alpha=0.1, left=0.99) for n in range(20)]
    assert not lengths_of(*hopeless, PROMPT, anchor=anchor).drafts.any()


def test_what_a_window_is_behind_is_remembered_until_it_is_paid_off() -> None:
    by = AdaptiveLengths()

    def at(emitted: int, last_s: float) -> float:
        """How far it is behind at the time of its last token."""
        request = drafting("x", TIGHT)._replace(emitted_tokens=emitted, last_token_s=last_s)
        queue = queue_of(request, PROMPT)
        held = np.ones(2, np.bool_)
        found = by.choose(queue, last_s, MODEL, 8_192, 0.0, Anchor.LAST_TOKEN, 0.0, held)
        again = by.choose(queue, last_s, MODEL, 8_192, 0.0, Anchor.LAST_TOKEN, 0.0, held)
        assert again.credit_s[0] == found.credit_s[0]
        return max(0.0, -float(found.credit_s[0]))

    assert at(1, 0.0) == 0
    # One token in two TPOTs, then three in one: one TPOT late, then not.
    assert at(2, 0.06) == pytest.approx(0.03)
    assert at(3, 0.09) == pytest.approx(0.03)
    assert at(6, 0.12) == 0
    # What came early is no credit.
    assert at(7, 0.18) == pytest.approx(0.03)


def test_drafts_leave_tokens_to_others() -> None:
    crowd = [drafting(f"t{n}", TIGHT, alpha=0.9) for n in range(60)]
    for tokens in (60, 61, 100, 200, 400):
        assert lengths_of(*crowd, PROMPT, tokens=tokens).drafts.sum() <= (tokens - 60) // 2
        assert lengths_of(*crowd, tokens=tokens).drafts.sum() <= tokens - 60
    every = AllDrafts().choose(queue_of(*crowd), 0.0, MODEL, 8_192, 0.0, Anchor.FIRST_TOKEN)
    assert set(every.drafts) == {9}


planned = partial(views.planned, now_s=0.0, latency=MODEL)


@pytest.mark.parametrize("name", ["slos_serve", "deadline_triage"])
def test_what_is_accepted_makes_room_for_prefill(name: str) -> None:
    def prompt_tokens(alpha: float) -> tuple[int, float]:
        decodes = [drafting(f"t{n}", TIGHT, alpha=alpha) for n in range(5)]
        plan = planned(name, *decodes, PROMPT)
        return plan.tokens_of["prompt"], plan.predicted_s

    without, tight_s = prompt_tokens(0.0)
    beside, long_s = prompt_tokens(0.8)
    assert tight_s <= 0.03 < long_s
    assert beside > 2 * without


@pytest.mark.parametrize("name", ["slos_serve", "deadline_triage", "fcfs", "fairbatching"])
def test_a_lone_decode_checks_what_is_drafted(name: str) -> None:
    assert planned(name, drafting("d", TIGHT, drafted=4)).tokens_of == {"d": 5}
    assert planned(name, drafting("d", TIGHT, drafted=4, alpha=0.0)).tokens_of == {"d": 1}


def test_drafts_take_no_block_that_another_needs() -> None:
    def full(name: str) -> RequestView:
        return drafting(name, TIGHT)._replace(computed_tokens=16, kv_blocks=1)

    def tokens(blocks: int) -> list[int]:
        budget = ROOMY._replace(kv_blocks=blocks)
        return planned("fcfs", full("a"), full("b"), budget=budget).tokens.tolist()

    # Each needs a block of 16 for its own token, which leaves room for all of its drafts.
    assert tokens(2) == [10, 10]
    half = [r._replace(computed_tokens=31, kv_blocks=2) for r in (full("a"), full("b"))]
    one = ROOMY._replace(kv_blocks=1)
    assert planned("fcfs", *half, budget=one).tokens.tolist() == [10, 1]
    assert planned("fcfs", *half, full("c"), budget=one).tokens.tolist() == [1, 1, 10]


def test_best_effort_decodes_take_drafts_from_what_is_left() -> None:
    behind = drafting("behind", TIGHT)._replace(best_effort=True)
    alone = planned("deadline_triage", behind).tokens_of
    assert alone["behind"] > 1
    pressed = [drafting(f"t{n}", TIGHT, alpha=0.0) for n in range(5)]
    slow = LinearLatency(a=0.02, b=0.001)
    beside = planned("deadline_triage", *pressed, behind, latency=slow)
    assert beside.predicted_s <= 0.03


def check(rates: AcceptanceRates, name: str, alpha: float, steps: int, checked: int) -> None:
    """``steps`` steps that check ``checked`` tokens, each right with probability ``alpha``."""
    chance = random.Random(steps)
    for _ in range(steps):
        accepted = 0
        while accepted < checked and chance.random() < alpha:
            accepted += 1
        rates.observe(name, checked, accepted)


@settings(max_examples=examples(40))
@given(alpha=st.floats(0, 0.97), checked=st.integers(1, 9))
def test_the_rate_becomes_that_of_the_class_whatever_is_checked(alpha: float, checked: int) -> None:
    rates = AcceptanceRates()
    check(rates, "chat", 0.5, 40, 3)
    check(rates, "chat", alpha, 1_500, checked)
    # Four deviations of a mean of as many trials as are remembered, and the prior's pull.
    assert rates.rate("chat") == pytest.approx(alpha, abs=4 * 0.5 / MEMORY_TRIALS**0.5 + 0.03)
    assert 0 < rates.rate("chat") < 1
    assert rates.rate("another") == PRIOR_ACCEPTANCE


def test_a_class_that_is_no_longer_checked_is_tried_again() -> None:
    rates = AcceptanceRates()
    check(rates, "chat", 0.0, 300, 1)
    assert rates.rate("chat") < 0.05
    for _ in range(6_000):
        rates.observe("chat", 0, 0)
    assert rates.rate("chat") > 0.4


def test_a_bounded_number_of_classes_is_followed() -> None:
    rates = AcceptanceRates()
    for number in range(MAX_CLASSES + 1):
        rates.observe(f"class-{number}", 1, 1)
    assert rates.rate("class-0") == PRIOR_ACCEPTANCE
    assert rates.rate("class-1") > PRIOR_ACCEPTANCE


def test_more_accepted_than_checked_is_refused() -> None:
    with pytest.raises(ValueError, match="from 0 to checked, got 3 and 2 checked"):
        AcceptanceRates().observe("chat", 2, 3)
