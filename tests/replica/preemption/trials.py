"""Prefills stopped at random checks, and whether their tokens are those of undisturbed runs.

``python -m tests.replica.preemption.trials 200`` runs so many trials on each of several engines.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from sluice.replica.vllm.local_model import local_model
from tests.replica.engines import EngineProcess, Result, Work
from tests.replica.preemption.engine import CheckedEngine
from tests.replica.preemption.waits import WHOLE, random_prompt

CHUNK = 128

ENGINES: Mapping[str, Mapping[str, Any]] = {
    "one worker": {},
    "compiled": {"enforce_eager": False, "dtype": "float32"},
    "experts": {"experts": 4, "dtype": "float32"},
    "two workers": {"ranks": 2},
}
"""Engines under test, each in a process of its own. Decodes of several requests share a batch. Its
rounding differs from that of one request alone where code is compiled or tokens are sorted by
expert: in 16 bits the two best of a random model's tokens are too often nearly equal."""

Found = dict[str, int]
"""How many ``trials``, how many times a prefill stopped (``stops``), and how many trials had the
``same`` tokens as runs alone."""


def all_trials(trials: int, seed: int, directory: Path) -> dict[str, Found]:
    """``trials`` trials on each of :data:`ENGINES`."""
    found = {}
    for name, options in ENGINES.items():
        process = EngineProcess(partial(make_engine, directory, **options))
        try:
            some = random_trials if options.get("ranks", 1) == 1 else trials_of_several_workers
            found[name] = process.call(some, trials, seed)
        finally:
            process.close()
    return found


def make_engine(
    directory: Path,
    experts: int = 0,
    ranks: int = 1,
    **args: Any,
) -> CheckedEngine:
    """A small engine in which three prefills can be suspended."""
    model = local_model(directory, layers=4, hidden=128, experts=experts)
    return CheckedEngine(model, directory, ranks, **args)


def random_trials(engine: CheckedEngine, trials: int, seed: int) -> Found:
    """Stop prefills at random checks, nested one to three deep, whole and in chunks, some with a
    common prefix."""
    chance = random.Random(seed)
    same = stops = 0
    for trial in range(trials):
        chunk = (WHOLE, CHUNK)[trial % 2]
        checks = engine.use(chunk_tokens=chunk)
        # Prefix-cache blocks of a finished chunk would change the shape of the others' batches.
        shared = 96 * chance.randrange(2) if chunk == WHOLE else 0
        made = nested_work(chance, 1 + trial % 3, shared)
        expected = {work.name: engine.alone(work) for work in made}
        engine.reset()
        before = engine.stops
        results = run_nested(engine, made, chance, checks)
        stops += engine.stops - before
        same += all(matches(results[work.name], expected[work.name]) for work in made)
    return {"trials": trials, "stops": stops, "same": same}


def trials_of_several_workers(engine: CheckedEngine, trials: int, seed: int) -> Found:
    """The same where workers agree on a later check: soon after a random one, so that not every
    stop is in time. All prompts are long and have checks left at that point."""
    chance = random.Random(seed)
    same = stops = 0
    for trial in range(trials):
        chunk = (WHOLE, CHUNK)[trial % 2]
        engine.bound(chunk_tokens=chunk)
        made = [
            work._replace(prompt=random_prompt(chance, chance.randrange(300, 700)))
            for work in nested_work(chance, 1 + trial % 3)
        ]
        expected = {work.name: engine.alone(work) for work in made}
        engine.reset()
        before = engine.stats.suspensions
        last = engine.executor.checks // 2
        watcher = engine.after_checks(
            [(chance.randrange(1, last + 1), partial(engine.add, work)) for work in made[1:]]
        )
        engine.add(made[0])
        results = engine.run()
        watcher.join()
        results |= engine.run()
        stops += engine.stats.suspensions - before
        same += all(matches(results[work.name], expected[work.name]) for work in made)
    return {"trials": trials, "stops": stops, "same": same}


def nested_work(chance: random.Random, nested: int, shared: int = 0, output: int = 3) -> list[Work]:
    """A long prompt and ``nested`` others, each more urgent than the one before. The first
    ``shared`` tokens are the same in all."""
    prefix = random_prompt(chance, shared)
    made = []
    for index in range(nested + 1):
        length = chance.randrange(64, 200) if index else chance.randrange(300, 700)
        prompt = prefix + random_prompt(chance, length)
        made.append(Work(f"w{index}", prompt, output, 4000.0 / 2**index))
    return made


def run_nested(
    engine: CheckedEngine, made: list[Work], chance: random.Random, checks: int
) -> dict[str, Result]:
    """Run ``made`` so that each stops the one before it at a random one of its first ``checks``
    checks."""
    actions: dict[int, Callable[[], None]] = {}
    at = 0
    for work in made[1:]:
        at += chance.randrange(1, checks + 1)
        actions[at] = partial(engine.add, work)
    engine.at_checks(actions)
    engine.add(made[0])
    return engine.run()


def matches(result: Result, expected: Result) -> bool:
    """Whether the tokens are the same, and the first one's probability to the last bit."""
    return result.tokens == expected.tokens and result.logprobs[:1] == expected.logprobs[:1]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for name, found in all_trials(int(sys.argv[1]), 0, Path(folder)).items():
            print(name, found)
