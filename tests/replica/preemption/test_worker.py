"""The worker's stack of tasks, with steps that pass checks in place of a model; and the watchdog
over its progress."""

from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.replica.preemption.checks import Checks
from sluice.replica.preemption.messages import (
    ControlWords,
    Discarded,
    DiscardTask,
    Done,
    Exit,
    Failed,
    ResumeTask,
    RunTask,
    mark,
)
from sluice.replica.preemption.stats import StalledError, TaskWatchdog
from sluice.replica.preemption.worker import TaskRunner

pytestmark = pytest.mark.vllm  # it is there that torch has been imported


class Step(NamedTuple):
    """A task: what runs inside it at each of its checks, and how it ends.

    ``ends`` is "done", "failed", or "discarded" at its last stop.
    """

    number: int
    nested: Sequence[Sequence["Step"]]
    ends: str

    @property
    def given_up(self) -> bool:
        return self.ends == "discarded" and any(self.nested)


class Lanes:
    """Lanes that know whose they are."""

    nested = staticmethod(nullcontext)

    def __init__(self, depth: int) -> None:
        self.stock = "stock"
        self.private = [f"private {index}" for index in range(depth)]
        self.used: list[str] = []

    def enter(self, lane: str, batch: Step) -> None:
        assert lane not in self.used, "its state is still needed"
        self.used.append(lane)

    def leave(self, lane: str) -> None:
        assert self.used.pop() == lane


class Worker:
    """Passes the checks of a step, and has itself stopped where something is nested."""

    def __init__(self, words: ControlWords, checks: Checks) -> None:
        self.model_runner = "stock"
        self._words = words
        self._checks = checks
        self.trace: list[tuple[int, int]] = []
        self._drafted: list[int] = []

    def execute_model(self, step: Step) -> None:
        lane = self.model_runner
        for at, nested in enumerate(step.nested):
            if nested:
                self._words.stop(step.number)
            if self._checks.task:
                self._checks.check()
            assert self.model_runner == lane
            self.trace.append((step.number, at))
        if step.ends == "failed":
            raise ArithmeticError(step.number)
        self._drafted[:] = [step.number]

    def sample_tokens(self, grammar: None) -> str:
        return self.model_runner

    def take_draft_token_ids(self) -> SimpleNamespace:
        """With the list of requests itself, which later tasks change."""
        return SimpleNamespace(req_ids=self._drafted)


def number(shape, counter):
    checks, ends = shape
    own = next(counter)
    return Step(own, [[number(each, counter) for each in nested] for nested in checks], ends)


ends = st.sampled_from(["done", "done", "failed", "discarded"])
leaves = st.tuples(st.lists(st.just([]), max_size=3), ends)
shapes = st.recursive(
    leaves,
    lambda inner: st.tuples(st.lists(st.lists(inner, max_size=2), max_size=3), ends),
    max_leaves=8,
)


def depth(step):
    return max((1 + depth(each) for nested in step.nested for each in nested), default=0)


def commands(step):
    """What the engine sends, and the answers that it gets."""
    sent, answers = [RunTask(step.number, step, None, True)], []
    stops = [nested for nested in step.nested if nested]
    for index, nested in enumerate(stops):
        for each in nested:
            inner_sent, inner_answers = commands(each)
            sent += inner_sent
            answers += inner_answers
        last = index == len(stops) - 1
        sent.append((DiscardTask if step.given_up and last else ResumeTask)(step.number))
    kinds = {"done": Done, "failed": Failed, "discarded": Discarded if step.given_up else Done}
    return sent, [*answers, (step.number, kinds[step.ends])]


def run(sent, deepest):
    words = ControlWords.create()
    queue, answers = iter(sent), []
    runner = TaskRunner(words, lambda: next(queue), answers.append)
    lanes, worker = Lanes(deepest + 1), Worker(words, runner.checks)
    runner.attach(worker, lanes)
    runner.serve()
    assert lanes.used == []
    assert worker.model_runner == "stock"
    return answers, worker.trace


@given(shapes)
def test_every_task_is_answered_once_the_last_started_first(shape):
    step = number(shape, iter(range(1, 1000)))
    sent, expected = commands(step)
    answers, trace = run([*sent, Exit()], depth(step))
    assert [(answer.task, type(answer)) for answer in answers] == expected
    for answer in answers:
        if isinstance(answer, Done):
            passed = [at for task, at in trace if task == answer.task]
            assert passed == list(range(len(passed)))
            assert answer.timing.busy_s >= 0
            assert answer.drafts.req_ids == [answer.task]


@given(shapes, st.data())
def test_an_exit_at_any_time_gives_up_all_that_is_suspended(shape, data):
    step = number(shape, iter(range(1, 1000)))
    sent, _ = commands(step)
    sent = sent[: data.draw(st.integers(0, len(sent)))]
    started = {each.task for each in sent if isinstance(each, RunTask)}
    answers, _ = run([*sent, Exit()], depth(step))
    assert sorted(answer.task for answer in answers) == sorted(started)


def test_a_task_that_cannot_be_preempted_runs_in_the_stock_lane_without_checks():
    step = Step(1, [[], []], "done")
    answers, _ = run([RunTask(1, step, None, False), Exit()], 0)
    assert answers[0].output == "stock"


def test_commands_for_another_task_are_ignored():
    inner = Step(2, [[]], "done")
    step = Step(1, [[inner]], "done")
    sent = [
        ResumeTask(7),
        RunTask(1, step, None, True),
        DiscardTask(9),
        RunTask(2, inner, None, True),
        ResumeTask(2),
        ResumeTask(1),
        DiscardTask(1),
        Exit(),
    ]
    answers, _ = run(sent, 1)
    assert [type(answer) for answer in answers] == [Done, Done]


def test_a_late_word_stops_nothing():
    words = ControlWords.create()
    stopped = []
    checks = Checks(words, lambda: stopped.append(True))
    words.stop(7)
    with checks.running(8):
        checks.check()
    assert not stopped
    with checks.running(7):
        checks.check()
        checks.check()
    assert stopped == [True]


def test_two_tasks_can_be_told_before_either_has_seen_it():
    words = ControlWords.create()
    stopped = []
    checks = Checks(words, lambda: stopped.append(checks.task))
    words.stop(1)
    words.stop(2)
    for task in (2, 1):
        with checks.running(task):
            for _ in range(3):
                checks.check()
            assert words.reached() == mark(task, 3)
    assert stopped == [2, 1]


def test_words_are_shared_by_file(tmp_path):
    path = tmp_path / "words"
    made = ControlWords.create(path)
    opened = ControlWords.open(path)
    made.stop(5)
    assert opened.cells.tolist() == made.cells.tolist()
    (tmp_path / "short").write_bytes(b"12345678")
    with pytest.raises(ValueError, match="size"):
        ControlWords.open(tmp_path / "short")


@given(st.lists(st.tuples(st.floats(0.0, 9.9), st.integers(1, 3), st.integers(0, 3))))
def test_it_raises_only_where_nothing_has_changed_for_the_limit(looks):
    now_s, since_s, last = 0.0, 0.0, None
    watchdog = TaskWatchdog(10.0, clock=lambda: now_s)
    for pause_s, task, reached in looks:
        now_s += pause_s
        if (task, reached) != last:
            last, since_s = (task, reached), now_s
        if now_s - since_s >= 10.0:
            with pytest.raises(StalledError, match=f"no progress with task {task} for 10 s"):
                watchdog.look(task, reached)
        else:
            assert watchdog.look(task, reached) == pytest.approx(since_s + 10.0 - now_s)
