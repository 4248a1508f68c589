"""A sweep over the shapes of an engine's steps, measured from outside the engine.

Prefill lengths, contexts and decode batches run one after the other through the engine's contract,
so any engine can be swept. The steps that ran and their times are read from its batch log. A second
set of loads is drawn at random: steps of shapes that no fit has seen, to test the accuracy of a
fit.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from math import exp, log
from pathlib import Path
from typing import Any, NamedTuple

from sluice.protocol.requests import EngineRequest
from sluice.replica.engine import Engine, EngineInfo, status_of
from sluice.scheduling.latency.model import StepSample
from sluice.scheduling.request.objective import SLO

MOST_SEQUENCES = 256
"""Max sequences of one load; the engine's own limit may be lower."""

_TOKENS = range(16, 256)
"""Token ids of the prompts: every vocabulary has them, and few are special."""

_DECODE_STEPS = 12
_LOAD_BATCHES = 2
_RANDOM_LOADS = 16
_SLO = SLO(service_class="profile")


class Group(NamedTuple):
    """Equal requests that are sent together."""

    sequences: int
    prompt_tokens: int
    output_tokens: int


Load = tuple[Group, ...]
"""Groups that are sent at one moment. A load is over when all of its requests are."""


class SweepError(RuntimeError):
    """The engine refused a request of the sweep, or logged no steps; the message says why."""


def grid(info: EngineInfo) -> list[Load]:
    """Every shape that a fit needs, for an engine with these limits: fresh prefills alone and
    several at once, prefills on a context, decode batches on short and long contexts, and both at
    once."""
    tokens = info.max_batch_tokens
    prefills = [(Group(1, int(share * tokens), 1),) for share in (0.06, 0.25, 0.5, 1.0)]
    prefills += [(Group(4, tokens // 4, 1),), (Group(1, _LOAD_BATCHES * tokens, 1),)]
    sizes = [4**power for power in range(6) if 4**power <= min(MOST_SEQUENCES, info.max_sequences)]
    decodes = [
        (Group(size, context, _DECODE_STEPS),)
        for size in sizes
        for context in (32, _LOAD_BATCHES * tokens // size)
    ]
    mixed = [
        (Group(size, 32, 2 * _DECODE_STEPS), Group(2, tokens, 1))
        for size in (4, 16)
        if size <= info.max_sequences
    ]
    return [_cut(load, info) for load in (*prefills, *decodes, *mixed)]


def random_loads(info: EngineInfo, seed: int = 0) -> list[Load]:
    """Loads of one to three groups, their sizes log-uniform within the engine's limits."""
    chance = random.Random(seed)

    def between(low: int, high: int) -> int:
        return round(exp(chance.uniform(log(low), log(max(low, high)))))

    most = min(MOST_SEQUENCES, info.max_sequences)
    loads = [
        tuple(
            Group(
                between(1, most),
                between(8, _LOAD_BATCHES * info.max_batch_tokens),
                between(1, 2 * _DECODE_STEPS),
            )
            for _ in range(chance.randint(1, 3))
        )
        for _ in range(_RANDOM_LOADS)
    ]
    return [_cut(load, info) for load in loads]


def _cut(load: Load, info: EngineInfo) -> Load:
    """The part of ``load`` that the engine can hold without preemption and prefill in a few
    batches."""
    share = len(load)
    kv_tokens = info.kv_blocks * info.block_tokens // (2 * share)
    work = _LOAD_BATCHES * info.max_batch_tokens // share
    groups = []
    for sequences, prompt, output in load:
        longest = min(info.max_model_tokens - output, kv_tokens - output, work)
        prompt = max(2, min(prompt, longest))
        room = min(kv_tokens // (prompt + output), max(1, work // prompt))
        groups.append(Group(max(1, min(sequences, info.max_sequences, room)), prompt, output))
    return tuple(groups)


class Sweep:
    """Runs loads on a started engine whose batch log is ``log``.

    Request names distinguish the loads' steps in the log, so it does not matter when a line is
    written.
    """

    def __init__(self, engine: Engine, info: EngineInfo, log: Path, seed: int = 0) -> None:
        self._engine = engine
        self._model = info.model
        self._log = log
        self._chance = random.Random(seed)
        self._serial = 0

    async def run(
        self, stage: str, loads: Sequence[Load], done: Callable[[Load], None] = lambda load: None
    ) -> None:
        """Run ``loads`` one after the other; ``done`` is called after each.

        Args:
            stage: by which :meth:`samples` finds their steps; letters only.

        Raises:
            SweepError: the engine refused a request.
            EngineDeadError: the engine died.
        """
        for load in loads:
            try:
                async with asyncio.TaskGroup() as tasks:
                    for group in load:
                        for _ in range(group.sequences):
                            tasks.create_task(self._request(stage, group))
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None
            done(load)

    async def _request(self, stage: str, group: Group) -> None:
        self._serial += 1
        body: dict[str, Any] = {
            "model": self._model,
            # Random, so that no prefix is found in a cache.
            "prompt": self._chance.choices(_TOKENS, k=group.prompt_tokens),
            "max_tokens": group.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        request = EngineRequest(f"{stage}-{self._serial}", "completions", body, _SLO)
        status, answer = await status_of(self._engine.generate(request))
        if status != 200:
            text = answer.decode(errors="replace")
            raise SweepError(f"the engine refused a request of the sweep ({status}): {text}")

    def samples(self, stage: str) -> list[StepSample]:
        """The steps of a stage, in order. Complete once the engine has stopped.

        Raises:
            SweepError: the stage has no steps.
            OSError: the batch log cannot be read.
        """
        found = []
        with self._log.open(encoding="utf-8") as lines:
            for line in lines:
                step = json.loads(line)
                ran = step["ran"]
                mine = ran and all(name.startswith(f"{stage}-") for name, _, _ in ran)
                if mine and step["seconds"] > 0:
                    parts = [(tokens, computed) for _, tokens, computed in ran]
                    found.append(StepSample.of(parts, step["seconds"]))
        if not found:
            raise SweepError(f"the engine logged no steps of the stage {stage!r}")
        return found
