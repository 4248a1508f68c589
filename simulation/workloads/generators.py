"""Seeded workloads of task classes: lengths, objectives and stages drawn per class."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from sluice.scheduling.request.objective import SLO
from sluice.simulation.workload import Arrival, Stage, Workload
from sluice.simulation.workloads.arrivals import ArrivalProcess
from sluice.simulation.workloads.lengths import LengthDistribution

Objective = Callable[[int], SLO]
"""The objective of a request, or of a stage, by its new prompt tokens."""


def always(slo: SLO) -> Objective:
    """The same objective for every length."""
    return lambda _: slo


@dataclass(frozen=True, slots=True)
class Slowdown:
    """A TTFT objective as a multiple of the time that the prompt takes alone (SLOs-Serve Table 3).

    Args:
        factor: the multiple.
        zero_load_s: seconds to the first token of a prompt of n tokens on an idle engine.
        floor_s: least TTFT objective, seconds. The multiple of a short prompt can be less than
            one decode step of a full batch, which no replica can meet.
        tpot_s: the TPOT objective, seconds.
    """

    factor: float
    zero_load_s: Callable[[int], float]
    floor_s: float
    tpot_s: float

    def __call__(self, prompt_tokens: int) -> SLO:
        """The objective of a prompt of ``prompt_tokens`` new tokens."""
        ttft_s = max(self.factor * self.zero_load_s(prompt_tokens), self.floor_s)
        return SLO(ttft_s=ttft_s, tpot_s=self.tpot_s)


class TaskClass(Protocol):
    """Requests of one kind."""

    @property
    def name(self) -> str:
        """The task class in each arrival."""

    @property
    def share(self) -> float:
        """Its share of the requests, relative to the other classes."""

    def requests(self, count: int, rng: np.random.Generator) -> list[Arrival]:
        """``count`` requests, all at time 0."""


@dataclass(frozen=True, slots=True)
class Task:
    """Requests of one stage; prompt and output lengths are independent.

    Args:
        name: the task class in each arrival.
        prompt: distribution of prompt lengths.
        output: distribution of output lengths.
        objective: gives each request its objective.
        share: share of the requests, relative to the other classes.
    """

    name: str
    prompt: LengthDistribution
    output: LengthDistribution
    objective: Objective
    share: float = 1.0

    def requests(self, count: int, rng: np.random.Generator) -> list[Arrival]:
        """``count`` requests, all at time 0."""
        prompts = self.prompt.draw(count, rng).tolist()
        outputs = self.output.draw(count, rng).tolist()
        return [
            Arrival(0.0, prompt, output, self.objective(prompt), self.name)
            for prompt, output in zip(prompts, outputs, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Requests that think and then answer: two stages, the second without a new prompt.

    Args:
        name: the task class in each arrival.
        prompt: distribution of prompt lengths.
        thinking: distribution of the first stage's output.
        answer: distribution of the second stage's output.
        objective: of the prompt and the thinking.
        answer_tpot_s: pace of the answer, seconds per token. Its first token, which is a decode
            step like the others, is due as long after the last one of the thinking.
        share: share of the requests, relative to the other classes.
    """

    name: str
    prompt: LengthDistribution
    thinking: LengthDistribution
    answer: LengthDistribution
    objective: Objective
    answer_tpot_s: float
    share: float = 1.0

    def requests(self, count: int, rng: np.random.Generator) -> list[Arrival]:
        """``count`` requests, all at time 0."""
        prompts = self.prompt.draw(count, rng).tolist()
        thinking = self.thinking.draw(count, rng).tolist()
        answers = self.answer.draw(count, rng).tolist()
        slo = SLO(ttft_s=self.answer_tpot_s, tpot_s=self.answer_tpot_s)
        return [
            Arrival.of_stages(
                0.0, prompt, (Stage(first, self.objective(prompt)), Stage(second, slo)), self.name
            )
            for prompt, first, second in zip(prompts, thinking, answers, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class ToolLoop:
    """Requests that call tools: rounds of prefill and decode, the last of which is the answer.

    The number of rounds is normal, rounded, from 1 to ``most_rounds``; lengths are independent in
    every round. The tools themselves take no time.

    Args:
        name: the task class in each arrival.
        prompt: distribution of the new prompt tokens of a round.
        output: distribution of the output tokens of a round.
        calling: objective of every round but the last.
        answering: objective of the last round.
        mean_rounds: mean number of rounds, before rounding and cutting.
        std_rounds: its standard deviation.
        most_rounds: largest number of rounds.
        share: share of the requests, relative to the other classes.
    """

    name: str
    prompt: LengthDistribution
    output: LengthDistribution
    calling: Objective
    answering: Objective
    mean_rounds: float
    std_rounds: float
    most_rounds: int = 8
    share: float = 1.0

    def requests(self, count: int, rng: np.random.Generator) -> list[Arrival]:
        """``count`` requests, all at time 0."""
        drawn = np.rint(rng.normal(self.mean_rounds, self.std_rounds, count))
        rounds = np.clip(drawn, 1, self.most_rounds).astype(int).tolist()
        prompts = iter(self.prompt.draw(sum(rounds), rng).tolist())
        outputs = iter(self.output.draw(sum(rounds), rng).tolist())
        return [self._request(number, prompts, outputs) for number in rounds]

    def _request(self, rounds: int, prompts: Iterator[int], outputs: Iterator[int]) -> Arrival:
        entering = [next(prompts) for _ in range(rounds)]
        objectives = [self.calling] * (rounds - 1) + [self.answering]
        stages = [
            Stage(next(outputs), objective(prompt), prompt if index else 0)
            for index, (prompt, objective) in enumerate(zip(entering, objectives, strict=True))
        ]
        return Arrival.of_stages(0.0, entering[0], stages, self.name)


def generate(
    name: str,
    tasks: Sequence[TaskClass],
    arrivals: ArrivalProcess,
    requests: int,
    seed: int,
    description: str = "",
) -> Workload:
    """A workload of ``requests`` requests, each of a task class drawn by share.

    The classes, each class's requests and the arrival times have random streams of their own:
    with one seed, another rate or process brings the same requests at other times.

    Raises:
        ValueError: no tasks, a share that is not positive, or no requests.
    """
    if requests < 1:
        raise ValueError(f"requests must be at least 1, got {requests}")
    shares = np.array([task.share for task in tasks], dtype=np.float64)
    if not len(shares) or not (np.isfinite(shares).all() and (shares > 0).all()):
        raise ValueError(f"workload {name} needs tasks with positive shares, got {shares.tolist()}")
    clock, chooser, *streams = np.random.default_rng(seed).spawn(2 + len(tasks))
    times = arrivals.times(requests, clock).tolist()
    kinds = chooser.choice(len(tasks), size=requests, p=shares / shares.sum())
    drawn = [
        iter(task.requests(int((kinds == kind).sum()), stream))
        for kind, (task, stream) in enumerate(zip(tasks, streams, strict=True))
    ]
    return Workload(
        name,
        tuple(
            next(drawn[kind])._replace(arrival_s=at_s)
            for at_s, kind in zip(times, kinds.tolist(), strict=True)
        ),
        scaling=f"generated: {arrivals.description} (seed {seed})",
        description=description,
    )


def fixed(
    prompt_tokens: int,
    output_tokens: int,
    arrivals: ArrivalProcess,
    requests: int,
    seed: int,
    slo: SLO | None = None,
) -> Workload:
    """Requests that are all alike; with Poisson arrivals and one output token, an M/D/1 queue."""
    task = Task(
        "fixed",
        LengthDistribution.fixed(prompt_tokens),
        LengthDistribution.fixed(output_tokens),
        always(slo or SLO()),
    )
    words = f"Every request has {prompt_tokens} prompt and {output_tokens} output tokens."
    return generate("fixed", [task], arrivals, requests, seed, words)
