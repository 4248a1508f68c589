"""Launches stay near the device, and several workers agree on a check at which all of them stop,
whatever they do; with a device that is a queue."""

from collections import Counter
from contextlib import nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.replica.preemption.checks import (
    Checks,
    Immediate,
    NoChecksError,
    Paced,
    distance,
    pacer_for,
)
from sluice.replica.preemption.messages import ControlWords, Done, Exit, ResumeTask, RunTask
from sluice.replica.preemption.worker import TaskRunner

pytestmark = pytest.mark.vllm  # it is there that torch has been imported


class Device:
    """Computes what is queued, in order, when it is let to, or waited for."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.queued = []
        self.done = 0

    def launch(self, seconds):
        """An operator."""
        self.queued.append(seconds)

    def compute(self, until):
        """Until so many are through."""
        while self.done < until:
            self.now_s += self.queued[self.done]
            self.done += 1

    @property
    def behind(self):
        return len(self.queued) - self.done

    def event(self):
        return Event(self)


class Event:
    """A mark in the queue."""

    def __init__(self, device):
        self._device = device
        self._at = None
        self._recorded_s = None

    def record(self):
        self._at = len(self._device.queued)
        self._recorded_s = self._device.now_s

    def synchronize(self):
        assert self._at is not None, "it would not wait at all"
        self._device.compute(self._at)

    @property
    def at_s(self):
        """A device without work comes to a mark as soon as it is set."""
        assert self._device.done >= self._at, "not ready"
        return max(self._recorded_s, sum(self._device.queued[: self._at]))

    def elapsed_time(self, other):
        return 1e3 * (other.at_s - self.at_s)


seconds = st.integers(1, 50).map(float)
aheads = st.integers(0, 8)


@given(aheads, st.lists(st.tuples(seconds, st.integers(0, 12)), max_size=60))
def test_a_check_is_never_further_ahead_and_waits_no_longer_than_it_must(ahead, operators):
    device = Device()
    pacer = Paced(ahead, device.event)
    for seconds, computed in operators:
        pending = device.behind
        pacer.pace()
        assert device.behind <= ahead
        assert device.behind == min(pending, ahead), "it waited for more"
        device.launch(seconds)
        device.compute(min(device.done + computed, len(device.queued)))


@given(aheads, st.lists(seconds, min_size=1, max_size=30), st.data())
def test_a_stop_is_timed_on_the_device(ahead, operators, data):
    """The host stops where launches are; the device is later there, and not idle before."""
    device = Device()
    pacer = Paced(ahead, device.event, clock=lambda: 1000.0 + device.now_s)
    device.launch(data.draw(seconds))
    pacer.start()
    assert device.behind == 0
    stop = data.draw(st.integers(0, len(operators) - 1))
    for index, each in enumerate(operators):
        pacer.pace()
        if index == stop:
            stopped_s = pacer.stop()
            at_s = sum(device.queued)
        device.launch(each)
    device.compute(len(device.queued))
    assert stopped_s() == pytest.approx(1000.0 + at_s)


def test_a_nested_task_waits_behind_what_the_suspended_one_has_queued():
    """And how long one was suspended is told from the moment when the device had come to its
    stop."""
    device = Device()
    words = ControlWords.create()
    commands = iter(
        [RunTask(1, "long", None, True), RunTask(2, "short", None, True), ResumeTask(1), Exit()]
    )
    answers = []
    clock = lambda: device.now_s  # noqa: E731
    runner = TaskRunner(words, lambda: next(commands), answers.append, clock)
    runner.checks.pacer = Paced(2, device.event, clock)

    class Worker:
        model_runner = None

        def execute_model(self, batch):
            for at in range(10):
                if (batch, at) == ("long", 5):
                    words.stop(1)
                runner.checks.check()
                assert device.behind <= 2
                device.launch(10.0 if batch == "long" else 1.0)
            device.compute(len(device.queued))  # as its tokens are copied

        def sample_tokens(self, grammar):
            return "tokens"

        def take_draft_token_ids(self):
            return None

    class Lanes:
        stock, private = "stock", ("first", "second")
        nested = staticmethod(nullcontext)

        def enter(self, lane, batch):
            pass

        def leave(self, lane):
            pass

    runner.attach(Worker(), Lanes())
    runner.serve()
    short, long = answers
    assert isinstance(short, Done)
    assert isinstance(long, Done)
    assert short.timing.started_s == 30.0  # two operators are still queued
    assert long.timing.stopped_s == (50.0,)
    assert long.timing.suspended_s == 10.0
    assert long.timing.busy_s == 100.0


def distance_of(layer):
    names = [f"layers.{index}" for index in range(6)]
    counts = (dict.fromkeys(names, each) for each in (len(layer), sum(layer)))
    return distance(*map(Counter, counts))


class Ranks:
    """Workers that compute one task, each on a device that others' wait for in reductions."""

    def __init__(self, ranks, layer, ahead, task):
        self.words = ControlWords.create()
        self.stops = [[] for _ in range(ranks)]
        self.launched = [0] * ranks
        self.done = [0] * ranks
        self.operators = layer * 6
        self.hosts = [self._host(rank, ranks, layer, ahead, task) for rank in range(ranks)]

    def _host(self, rank, ranks, layer, ahead, task):
        checks = Checks(self.words, lambda: self.stops[rank].append(checks.passed), rank, ranks)
        checks.ahead = ahead + distance_of(layer)
        with checks.running(task):
            for _ in self.operators:
                while self.launched[rank] - self.done[rank] > ahead:
                    yield
                checks.check()
                self.launched[rank] += 1
                yield

    def compute(self, rank):
        """A device goes on to its next operator; a reduction ends where all have begun it."""
        at = self.done[rank]
        if at < self.launched[rank]:
            begun = all(
                done >= at and launched > at
                for done, launched in zip(self.done, self.launched, strict=True)
            )
            self.done[rank] += begun or not self.operators[at]

    def go(self, rank):
        next(self.hosts[rank], None)

    @property
    def computing(self):
        return min(self.done) < len(self.operators)

    def finish(self):
        while self.computing:
            for rank in range(len(self.done)):
                self.go(rank)
                self.compute(rank)


layers = st.lists(st.booleans(), max_size=6).map(lambda reduces: [*reduces, True])
"""Whether workers wait for each other in each operator of a layer. What a layer hands on is
reduced."""


@given(
    layers,
    st.integers(2, 4),
    st.integers(0, 4),
    st.lists(st.tuples(st.booleans(), st.integers(0, 3)), max_size=150),
    st.sets(st.integers(0, 149), max_size=4),
)
def test_workers_agree_where_all_of_them_stop(layer, ranks, ahead, turns, signals):
    workers = Ranks(ranks, layer, ahead, task=77)
    for at, (launches, rank) in enumerate(turns):
        if at in signals:
            workers.words.stop(77)
        (workers.go if launches else workers.compute)(rank % ranks)
    workers.finish()
    assert all(stops == workers.stops[0] for stops in workers.stops)


@given(layers, st.integers(2, 4), st.integers(0, 4))
def test_a_task_that_has_just_begun_stops_within_the_distance(layer, ranks, ahead):
    workers = Ranks(ranks, layer, ahead, task=5)
    workers.words.stop(5)
    workers.finish()
    last = 1 + distance_of(layer) + ahead
    assert workers.stops == [[last] if last <= len(workers.operators) else []] * ranks


def test_without_reductions_nobody_can_agree():
    checks = Counter({"layers.0": 5, "layers.1": 5})
    with pytest.raises(NoChecksError, match=r"layers\.1 has no reduction"):
        distance(checks, Counter({"layers.0": 2}))


def test_a_cpu_is_never_behind():
    import torch

    assert isinstance(pacer_for(torch.device("cpu")), Immediate)
