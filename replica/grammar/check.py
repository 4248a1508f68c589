"""Refuses grammars that are malformed or cost too much, before an engine sees them.

It is called where vLLM's serving layers pass a request to the engine. There every way to constrain
an output (``response_format``, ``structured_outputs``, tools that must be called, reasoning
parsers' structural tags) has become the same few parameters, and the tokenizer is known. The router
has neither.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import multiprocessing
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from sluice.protocol.errors import RequestError
from sluice.replica.grammar.process import (
    UNKNOWN,
    WALL_FACTOR,
    Constraint,
    Verdict,
    constraint_key,
    serve,
)

logger = logging.getLogger(__name__)

REMEMBERED: Final = 4_096
"""Max cached verdicts; the least recently used one is dropped first."""

MAX_WAITING: Final = 32
"""Max grammars that wait for their check, one after the other; further requests get 503."""

START_S: Final = 300.0
"""Max start-up time of the process, seconds."""

ANSWER_PARTS: Final = 2
"""The process may take this many times its own wall-clock limit to answer; then it is replaced."""


def structural_tags(body: Mapping[str, Any]) -> list[str]:
    """The structural tags in an API body, as JSON. ``O(1)`` where there are none."""
    tags = []
    constraint = body.get("structured_outputs")
    if isinstance(constraint, Mapping) and isinstance(constraint.get("structural_tag"), str):
        tags.append(constraint["structural_tag"])
    form = body.get("response_format")
    if isinstance(form, Mapping) and form.get("type") == "structural_tag":
        tags.append(json.dumps(form))
    return [tag for tag in tags if tag]


class GrammarCheck:
    """Checks each grammar once, in a process beside the engine. One per engine.

    A known grammar costs a digest of its text. New ones are checked one at a time: in parallel they
    would only compete with the engine for its cores.

    Args:
        vllm_config: of the engine.
        limit_s: CPU time limit of each phase of a check, seconds.
    """

    def __init__(self, vllm_config: Any, limit_s: float) -> None:
        self._config = vllm_config
        self._limit_s = limit_s
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()
        self._trials: dict[bytes, asyncio.Task[Verdict]] = {}
        # The system ends the process with the thread that started it: this one.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar-check")
        self._process: Any = None
        self._connection: Any = None

    def start(self) -> None:
        """Start the process in the background. Returns at once."""
        self._thread.submit(self._running)

    async def check(self, params: Any, stop_token_ids: frozenset[int]) -> str:
        """Return the backend that enforces this constraint, if an engine may take it.

        Args:
            params: vLLM's ``StructuredOutputsParams``.

        Raises:
            RequestError: 400: it is malformed, or takes too long; 503: it could not be tried now.
        """
        key = hashlib.sha256(constraint_key(params, stop_token_ids)).digest()
        verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = await asyncio.shield(self._trial(key, Constraint(params, stop_token_ids)))
        else:
            self._verdicts.move_to_end(key)
        if verdict.fault == UNKNOWN:
            raise RequestError(
                f"The grammar or schema could not be checked: {verdict.message}. Try again later.",
                None,
                503,
            )
        if verdict.fault is not None:
            raise RequestError(
                f"The grammar or schema of this request is {verdict.fault}: {verdict.message}.",
                None,
            )
        return verdict.backend

    def _trial(self, key: bytes, constraint: Constraint) -> asyncio.Task[Verdict]:
        """The check of a grammar, shared by all requests that wait for it."""
        task = self._trials.get(key)
        if task is None:
            if len(self._trials) >= MAX_WAITING:
                raise RequestError(
                    f"{MAX_WAITING} grammars are waiting for their check. Try again later.",
                    None,
                    503,
                )
            task = asyncio.create_task(self._try(key, constraint), name="grammar-check")
            self._trials[key] = task
        return task

    async def _try(self, key: bytes, constraint: Constraint) -> Verdict:
        loop = asyncio.get_running_loop()
        try:
            verdict = await loop.run_in_executor(self._thread, self._ask, constraint)
        finally:
            del self._trials[key]
        if verdict.fault != UNKNOWN:
            self._verdicts[key] = verdict
            if len(self._verdicts) > REMEMBERED:
                self._verdicts.popitem(last=False)
        return verdict

    def _ask(self, constraint: Constraint) -> Verdict:
        """The process's verdict. Runs in the thread."""
        try:
            if self._running():
                self._connection.send(constraint)
                if self._connection.poll(ANSWER_PARTS * WALL_FACTOR * self._limit_s):
                    verdict: Verdict = self._connection.recv()
                    return verdict
        except (EOFError, OSError):
            pass
        logger.error("the grammar check process does not answer; restarting it")
        self._end()
        return Verdict(UNKNOWN, "the process that checks it does not answer")

    def _running(self) -> bool:
        """Start the process unless it runs; returns whether it runs. Runs in the thread."""
        if self._process is not None and self._process.is_alive():
            return True
        self._end()
        context = multiprocessing.get_context("spawn")
        self._connection, its = context.Pipe()
        self._process = context.Process(
            target=serve, args=(its, self._config, self._limit_s), daemon=True
        )
        self._process.start()
        its.close()
        if self._connection.poll(START_S):
            self._connection.recv()
            return True
        # Otherwise its late ready message would be taken for its first verdict.
        self._end()
        return False

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._connection.close()
        self._process = None

    def stop(self) -> None:
        """End the process. Idempotent; checks in progress end without a verdict."""
        process = self._process
        if process is not None:
            process.kill()  # a thread that waits for it returns
        self._thread.shutdown(wait=False, cancel_futures=True)
