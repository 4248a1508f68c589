"""Refuses grammars that are malformed or cost too much, before an engine sees them.

A process that has imported vLLM and built the tokenizer's tables forks for each grammar. The system
enforces the limit on the fork's CPU time, so compiled code is stopped, too, and a busy machine
causes no refusals. A walk of a few hundred tokens cannot prove a grammar harmless:
:mod:`sluice.replica.grammar.bound` stops costly ones in the engine."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import resource
import signal
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from inspect import signature
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from sluice.protocol.errors import RequestError
from sluice.replica.grammar.backends import backend_type, constrain, usable
from sluice.replica.processes import EngineContext, end_with_parent

WALK_TOKENS: Final = 192  # Tokens of each walk

MEMORY_BYTES: Final = 2 << 30  # Max memory of one grammar beyond that of the process, bytes

WALL_FACTOR: Final = 15.0
"""A grammar's process is ended after this many times its CPU limit of wall-clock time."""

MAX_MESSAGE: Final = 500  # Max characters of a backend's message that are forwarded

Fault = Literal["malformed", "costly", "unknown"]
"""``unknown``: it could not be checked."""


class Constraint(NamedTuple):
    """vLLM's ``StructuredOutputsParams`` of one output, and the tokens that end it."""

    params: Any
    stop_token_ids: frozenset[int]


class Result(NamedTuple):
    """The fault of a grammar, if it has one, with a message, or the backend that enforces it."""

    fault: Fault | None
    message: str = ""
    backend: str = ""


def serve(connection: Connection, vllm_config: Any, limit_s: float) -> None:
    """Answer constraints with results until the other end closes; the first message: this is
    ready. ``limit_s`` is CPU time of the parse, the compilation and the walks, each."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the replica ends this process
    trial = Trial(vllm_config, limit_s)
    connection.send(Result(None))
    while True:
        try:
            constraint = connection.recv()
        except EOFError:
            return
        connection.send(trial.check(constraint))


class Trial:
    """Checks grammars on the tokenizer and the backends of one engine."""

    def __init__(self, vllm_config: Any, limit_s: float) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import StructuredOutputsParams
        from vllm.tokenizers import cached_tokenizer_from_config

        self._config = vllm_config
        self._limit_s = limit_s
        self._tokenizer = cached_tokenizer_from_config(model_config=vllm_config.model_config)
        self._vocabulary = vllm_config.model_config.get_vocab_size()
        texts = self._tokenizer.convert_ids_to_tokens(range(len(self._tokenizer)))
        lengths = [len(text or "") for text in texts][: self._vocabulary]
        self._lengths = np.zeros(self._vocabulary)
        self._lengths[: len(lengths)] = lengths
        self._backends: dict[str, Any] = {}
        # Before any fork: for a large vocabulary that takes a second, and so do imports.
        for name in usable(vllm_config, self._tokenizer):
            try:
                self._backend(name)
            except Exception as error:
                logger.warning("structured output backend %s is not available: %s", name, error)
        with suppress(Exception):
            example = StructuredOutputsParams(json={"type": "null"})
            constrain(SamplingParams(structured_outputs=example), vllm_config, self._tokenizer)

    def check(self, constraint: Constraint) -> Result:
        """Check one grammar in a forked process."""
        ours, its = Pipe(duplex=False)
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if child == 0:
            self._try_and_exit(constraint, its)
        its.close()
        result = Result("unknown", "it could not be tried in time")
        try:
            if wait([ours], WALL_FACTOR * self._limit_s):
                result = ours.recv()
        except EOFError:  # ended by the system, as it exceeded its time or memory
            result = Result(
                "costly",
                f"it takes more than {self._limit_s:g} s of CPU time or {MEMORY_BYTES >> 30} GiB "
                "of memory to read or to compile",
            )
        finally:
            ours.close()
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        return result

    def _try_and_exit(self, constraint: Constraint, connection: Connection) -> NoReturn:
        try:
            signal.signal(signal.SIGPROF, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            _limit_memory()
            connection.send(self._try(constraint))
        except BaseException as error:
            connection.send(Result("unknown", f"{type(error).__name__}: {error}"))
        finally:
            os._exit(0)

    def _try(self, constraint: Constraint) -> Result:
        from vllm import SamplingParams
        from vllm.v1.structured_output.request import get_structured_output_key

        params = SamplingParams(structured_outputs=constraint.params)
        start_timer(self._limit_s)
        try:
            constrain(params, self._config, self._tokenizer)
        except MemoryError:
            return Result("costly", "it takes too much memory to read")
        except Exception as error:  # of many types, by the backend
            return Result("malformed", str(error)[:MAX_MESSAGE])
        start_timer(0)
        name = params.structured_outputs._backend
        backend = self._backend(name)
        start_timer(self._limit_s)
        key = get_structured_output_key(params.structured_outputs)
        named = {"stop_token_ids": set(constraint.stop_token_ids)}
        # Up to vLLM 0.28 it does not mask them.
        if not named.keys() <= signature(backend.compile_grammar).parameters.keys():
            named = {}

        def compiled() -> Any:
            return backend.compile_grammar(*key, **named)

        try:
            compiled()
        except MemoryError:
            return Result("costly", "it takes too much memory to compile")
        except Exception as error:
            return Result("malformed", str(error)[:MAX_MESSAGE])
        start_timer(self._limit_s)
        return self._walk(compiled, backend) or Result(None, "", name)

    def _walk(self, compiled: Callable[[], Any], backend: Any) -> Result | None:
        """Generate texts that reveal costly grammars: of the longest tokens (most characters a
        step), of one token (most ways to read a text), and at random."""
        from sluice.replica.grammar.bound import BURST_S, TOKEN_S, BoundedGrammar

        mask = backend.allocate_token_bitmask(1)
        rng = np.random.default_rng(0)
        for walk in ("longest", "repeated", "random"):
            grammar = BoundedGrammar(compiled())
            last: int | None = None
            for _ in range(WALK_TOKENS):
                if grammar.is_terminated() or grammar.too_costly:
                    break
                grammar.fill_bitmask(mask, 0)
                allowed = _allowed(mask, self._vocabulary)
                if grammar.too_costly:
                    break
                if not allowed.any():
                    return Result("malformed", "a text that it allows cannot be continued or ended")
                if walk == "longest":
                    last = int(np.argmax(allowed * (self._lengths + rng.random(allowed.size))))
                elif walk == "random" or last is None or not allowed[last]:
                    last = int(rng.choice(np.flatnonzero(allowed)))
                if not grammar.accept_tokens("", [last]) and not grammar.too_costly:
                    return Result("malformed", "a token that it allows cannot be taken")
            if grammar.too_costly:
                return Result(
                    "costly",
                    f"it takes more than {1000 * TOKEN_S:g} ms of CPU time per token, and more "
                    f"than {BURST_S:g} s beyond that; it may be ambiguous",
                )
        return None

    def _backend(self, name: str) -> Any:
        if name not in self._backends:
            kind = backend_type(name)
            self._backends[name] = kind(
                self._config, tokenizer=self._tokenizer, vocab_size=self._vocabulary
            )
        return self._backends[name]


def start_timer(seconds: float) -> None:
    """End this process after this much further CPU time; 0: never."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def _limit_memory() -> None:
    """Bound the memory of this process, if the system reports its current use."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    except OSError:
        return
    most = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _allowed(mask: Any, vocabulary: int) -> npt.NDArray[np.bool_]:
    """Which tokens a mask of one row allows."""
    bits = np.unpackbits(mask[0].numpy().view(np.uint8), bitorder="little")
    return bits[:vocabulary].astype(bool)


logger = logging.getLogger(__name__)

REMEMBERED: Final = 4_096  # Max cached results; the least recently used one is dropped first

MAX_WAITING: Final = 32
"""Max grammars that wait for their check, one after the other; further requests get 503."""

START_S: Final = 300.0  # Max start-up time of the process, seconds


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
    """Checks each grammar once, one at a time, in a process beside the engine: in parallel they
    would compete with the engine for its cores. ``limit_s``: CPU seconds of each phase."""

    def __init__(self, vllm_config: Any, limit_s: float) -> None:
        self._config = vllm_config
        self._limit_s = limit_s
        self._results: OrderedDict[bytes, Result] = OrderedDict()
        self._trials: dict[bytes, asyncio.Task[Result]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar-check")
        self._process: Any = None
        self._connection: Any = None

    def start(self) -> None:
        """Start the process in the background. Returns at once."""
        self._thread.submit(self._running)

    async def check(self, params: Any, stop_token_ids: frozenset[int]) -> str:
        """Return the backend that enforces this constraint, if an engine may take it. Raises
        RequestError: 400: it is malformed, or takes too long; 503: it could not be tried now."""
        fields = {name: value for name, value in vars(params).items() if not name.startswith("_")}
        text = json.dumps([fields, sorted(stop_token_ids)], sort_keys=True, default=repr)
        key = hashlib.sha256(text.encode()).digest()
        result = self._results.get(key)
        if result is None:
            result = await asyncio.shield(self._trial(key, Constraint(params, stop_token_ids)))
        else:
            self._results.move_to_end(key)
        if result.fault == "unknown":
            raise RequestError(
                f"The grammar or schema could not be checked: {result.message}. Try again later.",
                None,
                503,
            )
        if result.fault is not None:
            raise RequestError(
                f"The grammar or schema of this request is {result.fault}: {result.message}.",
                None,
            )
        return result.backend

    def _trial(self, key: bytes, constraint: Constraint) -> asyncio.Task[Result]:
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

    async def _try(self, key: bytes, constraint: Constraint) -> Result:
        loop = asyncio.get_running_loop()
        try:
            result = await loop.run_in_executor(self._thread, self._ask, constraint)
        finally:
            del self._trials[key]
        if result.fault != "unknown":
            self._results[key] = result
            if len(self._results) > REMEMBERED:
                self._results.popitem(last=False)
        return result

    def _ask(self, constraint: Constraint) -> Result:
        """The process's result. Runs in the thread."""
        try:
            if self._running():
                self._connection.send(constraint)
                if self._connection.poll(2 * WALL_FACTOR * self._limit_s):
                    result: Result = self._connection.recv()
                    return result
        except (EOFError, OSError):
            pass
        logger.error("the grammar check process does not answer; restarting it")
        self._end()
        return Result("unknown", "the process that checks it does not answer")

    def _running(self) -> bool:
        """Start the process unless it runs; returns whether it runs. Runs in the thread."""
        if self._process is not None and self._process.is_alive():
            return True
        self._end()
        context = EngineContext()
        self._connection, its = context.Pipe()
        self._process = context.Process(
            target=serve, args=(its, self._config, self._limit_s), daemon=True
        )
        self._process.start()
        its.close()
        if self._connection.poll(START_S):
            self._connection.recv()
            return True
        # Otherwise its late ready message would be taken for its first result.
        self._end()
        return False

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._connection.close()
        self._process = None

    def stop(self) -> None:
        """End the process. Idempotent; checks in progress end without a result."""
        process = self._process
        if process is not None:
            process.kill()  # a thread that waits for it returns
        self._thread.shutdown(wait=False, cancel_futures=True)
