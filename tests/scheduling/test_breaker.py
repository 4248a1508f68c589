"""The breaker of a replica: when it opens, that it is always tried again, and by one at a time."""

from math import inf

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sluice.scheduling.fleet.breaker import (
    FAILURES,
    FAILURES_WITHIN_S,
    MAX_OPEN_S,
    MIN_OPEN_S,
    PROBE_S,
    Breaker,
    BreakerState,
    ReplicaFault,
)


def opened(fault: ReplicaFault = ReplicaFault.HUNG, now_s: float = 0.0) -> Breaker:
    breaker = Breaker()
    assert breaker.fault(fault, now_s, stepping=False) == (fault is ReplicaFault.HUNG)
    return breaker


def half_open(breaker: Breaker) -> float:
    """Wait for it to be half-open; when that is."""
    now_s = breaker.due_s
    breaker.advance(now_s)
    assert breaker.state is BreakerState.HALF_OPEN
    return now_s


def cured(breaker: Breaker) -> float:
    """Let a probe through; when it was."""
    now_s = half_open(breaker)
    breaker.send(1, now_s)
    breaker.close(now_s)
    assert breaker.state is BreakerState.CLOSED
    return now_s


def fail(breaker: Breaker, *times_s: float, ended: int = 0) -> list[bool]:
    """Failures, with so many requests that ended before each."""
    found = []
    for now_s in times_s:
        breaker.report(False, ended, now_s)
        found.append(breaker.fault(ReplicaFault.FAILED, now_s, stepping=True))
    return found


def test_failures_open_it_when_they_are_nearly_all_that_ends() -> None:
    assert fail(Breaker(), 0.0, 1.0, 2.0) == [False, False, True]
    assert fail(Breaker(), 0.0, 1.0, 2.0, ended=1) == [False, False, True]
    # Failures are among what ends; of more than that, others end well.
    assert fail(Breaker(), *range(20), ended=2) == [False] * 20
    assert fail(Breaker(), 0.0, 1.0, FAILURES_WITHIN_S + 0.5) == [False] * 3


def test_a_closed_one_is_on_trial_until_requests_have_ended() -> None:
    breaker = opened()
    now_s = cured(breaker)
    assert fail(breaker, now_s + 5.0) == [True]
    assert breaker.due_s == now_s + 5.0 + 2 * MIN_OPEN_S
    now_s = cured(breaker)
    breaker.report(False, FAILURES + 1, now_s)
    assert fail(breaker, now_s + 1.0) == [False], "it has served others meanwhile"
    assert not breaker.forgettable(now_s + 5.0)
    assert breaker.forgettable(now_s + 2.0 + FAILURES_WITHIN_S)
    # What was long ago counts no more.
    assert breaker.fault(ReplicaFault.HUNG, now_s + 100.0, stepping=False)
    assert breaker.due_s == now_s + 100.0 + MIN_OPEN_S


def test_a_probe_is_sent_when_it_may_be() -> None:
    for breaker in (Breaker(), opened()):
        with pytest.raises(RuntimeError, match="no probe may be sent"):
            breaker.send(1, 0.0)
    breaker = opened()
    now_s = half_open(breaker)
    breaker.send(1, now_s)
    with pytest.raises(RuntimeError, match="probe 1"):
        breaker.send(2, now_s)
    breaker.advance(now_s + PROBE_S)
    breaker.send(2, now_s + PROBE_S)
    assert breaker.probe == 2, "the first was lost"


TIMES_S = st.floats(0.001, 100.0)


class Conversations(RuleBasedStateMachine):
    """Whatever is said in whatever order."""

    @initialize()
    def begin(self) -> None:
        self.breaker = Breaker()
        self.now_s = 0.0
        self.hangs = False
        self.keys = 0
        self.open_until_s = -inf

    def note(self, opened: bool) -> None:
        if opened:
            assert self.breaker.state is BreakerState.OPEN
            self.open_until_s = self.now_s + MIN_OPEN_S

    @rule(seconds=TIMES_S)
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.breaker.advance(self.now_s)

    @rule(fault=st.sampled_from(ReplicaFault), stepping=st.booleans())
    def fault(self, fault: ReplicaFault, stepping: bool) -> None:
        self.note(self.breaker.fault(fault, self.now_s, stepping))

    @rule(hangs=st.booleans(), ended=st.integers(0, 9))
    def report(self, hangs: bool, ended: int) -> None:
        was, self.hangs = self.hangs, hangs
        self.note(self.breaker.report(hangs, ended, self.now_s))
        if was and not hangs:
            self.open_until_s = self.now_s

    @precondition(
        lambda self: self.breaker.state is BreakerState.HALF_OPEN and self.breaker.probe is None
    )
    @rule()
    def send(self) -> None:
        assert self.now_s >= self.open_until_s, "it was left alone first"
        self.keys += 1
        self.breaker.send(self.keys, self.now_s)

    @rule()
    def end_probe(self) -> None:
        self.breaker.ended(self.now_s)

    @rule()
    def close(self) -> None:
        probed = self.breaker.probe is not None
        was = self.breaker.state
        self.breaker.close(self.now_s)
        assert self.breaker.state is (BreakerState.CLOSED if probed else was)

    @invariant()
    def a_probe_is_under_way_while_half_open_only(self) -> None:
        assert self.breaker.probe is None or self.breaker.state is BreakerState.HALF_OPEN

    @invariant()
    def one_that_says_that_it_hangs_gets_nothing(self) -> None:
        assert not self.hangs or self.breaker.state is BreakerState.OPEN

    @invariant()
    def it_is_tried_again_in_bounded_time(self) -> None:
        """Unless it says that it hangs: either a probe may go now, or that is not far."""
        breaker = self.breaker
        if breaker.state is BreakerState.OPEN and not self.hangs:
            assert breaker.due_s <= self.now_s + MAX_OPEN_S
        if breaker.probe is not None:
            assert breaker.due_s <= self.now_s + PROBE_S

    @invariant()
    def a_forgotten_one_would_do_the_same(self) -> None:
        if self.breaker.forgettable(self.now_s):
            assert self.breaker.state is BreakerState.CLOSED and not self.hangs


TestConversations = Conversations.TestCase
