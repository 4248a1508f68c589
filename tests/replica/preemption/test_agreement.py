"""Several workers agree on a check at which all of them stop, whatever way they interleave."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.replica.preemption.checks import Checks, NoChecksError, distance
from sluice.replica.preemption.messages import ControlWords, mark

LAYERS = 6

layers = st.lists(st.booleans(), min_size=1, max_size=7).map(lambda reduces: [*reduces, True])
"""Whether workers wait for each other in each operator of a layer. What a layer hands on is
reduced."""


def counts(layer):
    names = [f"layers.{index}" for index in range(LAYERS)]
    return (
        Counter({name: len(layer) for name in names}),
        Counter({name: sum(layer) for name in names}),
    )


class Ranks:
    """Workers that compute one task, each a few operators ahead of the others at times."""

    def __init__(self, ranks, layer, task):
        self.words = ControlWords.create()
        self.stops = [[] for _ in range(ranks)]
        self.entered = [0] * ranks
        self.going = [self._compute(rank, ranks, layer, task) for rank in range(ranks)]

    def _compute(self, rank, ranks, layer, task):
        checks = Checks(self.words, lambda: self.stops[rank].append(checks.passed), rank, ranks)
        checks.ahead = distance(*counts(layer))
        with checks.running(task):
            for reduces in layer * LAYERS:
                checks.check()
                yield
                if reduces:
                    self.entered[rank] += 1
                    while min(self.entered) < self.entered[rank]:
                        yield

    def step(self, rank):
        """Let one of those that still compute go on to its next operator."""
        generator = self.going[rank % len(self.going)]
        if next(generator, "ended") == "ended":
            self.going.remove(generator)


@given(
    layers,
    st.integers(2, 4),
    st.lists(st.integers(0, 3), min_size=1, max_size=120),
    st.sets(st.integers(0, 119), max_size=4),
)
def test_all_stop_at_the_same_checks(layer, ranks, turns, signals):
    task = 77
    workers = Ranks(ranks, layer, task)
    for at, turn in enumerate(turns):
        if at in signals:
            workers.words.stop(task)
        if workers.going:
            workers.step(turn)
    while workers.going:
        for rank in range(ranks):
            if workers.going:
                workers.step(rank)
    assert all(stops == workers.stops[0] for stops in workers.stops)
    if workers.stops[0]:
        assert workers.words.stopped(ranks) == (mark(task, workers.stops[0][-1]),) * ranks


@given(layers, st.integers(2, 4))
def test_a_task_that_has_just_begun_stops_within_the_distance(layer, ranks):
    workers = Ranks(ranks, layer, 5)
    workers.words.stop(5)
    while workers.going:
        for rank in range(ranks):
            if workers.going:
                workers.step(rank)
    assert workers.stops == [[1 + distance(*counts(layer))]] * ranks


def test_without_reductions_nobody_can_agree():
    checks = Counter({"layers.0": 5, "layers.1": 5})
    with pytest.raises(NoChecksError, match=r"layers\.1 has no reduction"):
        distance(checks, Counter({"layers.0": 2}))
