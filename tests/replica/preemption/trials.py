"""A real engine in which requests arrive at given checks of a prefill.

``python -m tests.replica.preemption.trials 200`` runs so many trials of prefills stopped at random
checks, and counts whose tokens are those of undisturbed runs.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from math import isclose
from pathlib import Path
from typing import Any

from sluice.replica.vllm.local_model import local_model
from tests.replica.engines import Result, Work
from tests.replica.preemption.waits import WHOLE, PreemptiveEngine, random_prompt

CHUNK = 128
_STOP_LIMIT_S = 60.0
_DEFAULTS: dict[str, Any] = {
    "max_model_len": 1024,
    "max_num_batched_tokens": 1024,
    "kv_cache_memory_bytes": 16 << 20,
    "enforce_eager": True,
}


class CheckedEngine(PreemptiveEngine):
    """The same engine, whose checks are counted, and in which requests arrive at given ones.
    ``stops``: how often a check waited for its stop signal; ``adapters``: LoRA adapters, by name
    of a request."""

    def __init__(self, model: Path, directory: Path, **args: Any) -> None:
        super().__init__(model, directory, **(_DEFAULTS | args))
        self.stops = 0
        self.adapters: dict[str, Any] = {}

    def check_idle(self) -> None:
        """Nothing is in flight, and all KV blocks are free."""
        scheduler = self.scheduler
        assert self.stack == ()
        assert not (scheduler.requests or scheduler.in_flight or scheduler.ending)
        self.reset()
        pool = scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1  # one is vLLM's null block

    def fail_at(self, at: int) -> None:
        """Have an operator fail after so many checks from now, until the next :meth:`run` ends."""
        check, seen = self._checks.check, []

        def failing() -> None:
            seen.append(True)
            if len(seen) == at:
                raise ArithmeticError("as if an operator failed")
            check()

        self._checks.check = failing

    def _request(self, work: Any, arrived_s: float | None, **more: Any) -> tuple[Any, ...]:
        request = super()._request(work, arrived_s, **more)
        return *request, None, self.adapters.get(work.name)

    def abort(self, names: Sequence[str]) -> None:
        """Stop requests; on the engine's thread."""
        self._llm.llm_engine.abort_request(list(names))

    def run(self) -> dict[str, Result]:
        """Run until no request is left; what :meth:`at_checks` asked for ends."""
        results = super().run()
        vars(self._checks).pop("check", None)
        return results

    def at_checks(
        self, actions: Mapping[int, Callable[[], None]], waits: Collection[int] | None = None
    ) -> None:
        """Run each of ``actions`` on the engine's thread when preemptible prefills have passed its
        number of checks in total, counted from now, until the next :meth:`run` ends. Those checks,
        or ``waits``, wait until their task receives the stop signal, so that it stops there."""
        checks, words = self._checks, self.executor.words
        check = type(checks).check
        waits = actions.keys() if waits is None else waits
        passed = 0

        def checked() -> None:
            nonlocal passed
            passed += 1
            here = passed
            if here in actions:
                self.post(actions[here])
            if here in waits:
                limit_s = time.monotonic() + _STOP_LIMIT_S
                while not words.stops(checks.task):
                    if time.monotonic() > limit_s:
                        raise TimeoutError(f"the task at check {here} received no stop signal")
                    time.sleep(0)
                self.stops += 1
            check(checks)

        checks.check = checked


def random_trials(engine: CheckedEngine, trials: int, seed: int) -> dict[str, int]:
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


def check_trials(engine: CheckedEngine, trials: int, seed: int) -> None:
    """All have the tokens of runs alone, and prefills were stopped."""
    found = random_trials(engine, trials, seed)
    assert found["same"] == trials
    assert found["stops"] >= trials


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
    """Whether the tokens are the same, and the first one's probability but for what the shape of
    a batch changes, which on a busy machine is another one."""
    first = zip(result.logprobs[:1], expected.logprobs[:1], strict=True)
    return result.tokens == expected.tokens and all(isclose(*each, abs_tol=1e-3) for each in first)


def main() -> None:
    """As the module says."""
    with tempfile.TemporaryDirectory() as folder:
        model = local_model(Path(folder), layers=4, hidden=128)
        engine = CheckedEngine(model, Path(folder))
        print(random_trials(engine, int(sys.argv[1]), 0))
        engine.close()


if __name__ == "__main__":
    main()
