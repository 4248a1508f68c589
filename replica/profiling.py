"""The latency model of an engine, measured at its start, and a sweep over the shapes of its steps.

The result is kept on disk for the same model on the same hardware. The sweep runs through the
contract of any engine and reads step times from the engine's batch log; a second, random set of
loads tests the accuracy of a fit on shapes that it has not seen."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import platform
import random
import selectors
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from math import exp, log
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sluice.protocol.requests import EngineRequest
from sluice.replica.config import EngineConfig
from sluice.replica.engine import Engine, EngineInfo, status_of
from sluice.replica.scheduler.local_scheduler import DEFAULT_MODEL
from sluice.replica.scheduler.state_table import StateTable
from sluice.replica.scheduler.xargs import RequestArgs, to_xargs
from sluice.scheduling.latency.model import StepSample
from sluice.scheduling.latency.profile import FitReport, LatencyProfile, best_fit
from sluice.scheduling.request.objective import SLO


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer; only for code without external input."""

    def __init__(self) -> None:
        self._now_s = 0.0
        super().__init__(_Jumping(self))

    def time(self) -> float:
        """Seconds since the loop was made."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self._now_s += seconds


class _Jumping(selectors.DefaultSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is not None and timeout > 0:
            self._loop.advance(timeout)
            timeout = 0
        return super().select(timeout)


MAX_SEQUENCES = 256  # Max sequences of one load; the engine's own limit may be lower

_TOKENS = range(16, 256)  # Token ids of the prompts: every vocabulary has them, and few are special

_LOAD_BATCHES = 2


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
    """Every shape that a fit needs: fresh prefills alone and several at once, prefills on a
    context, decode batches on short and long contexts, and both at once."""
    tokens = info.max_batch_tokens
    prefills = [(Group(1, int(share * tokens), 1),) for share in (0.06, 0.25, 0.5, 1.0)]
    prefills += [(Group(4, tokens // 4, 1),), (Group(1, _LOAD_BATCHES * tokens, 1),)]
    sizes = [4**power for power in range(6) if 4**power <= min(MAX_SEQUENCES, info.max_sequences)]
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

    most = min(MAX_SEQUENCES, info.max_sequences)
    loads = [
        tuple(
            Group(
                between(1, most),
                between(8, _LOAD_BATCHES * info.max_batch_tokens),
                between(1, 2 * _DECODE_STEPS),
            )
            for _ in range(chance.randint(1, 3))
        )
        for _ in range(16)
    ]
    return [_cut(load, info) for load in loads]


def _cut(load: Load, info: EngineInfo) -> Load:
    """The part of ``load`` that fits without preemption, with few batches for its prefill."""
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
    """Runs loads on a started engine whose batch log is ``log``. Request names identify a load's
    steps in the log, so it does not matter when a line is written."""

    def __init__(self, engine: Engine, info: EngineInfo, log: Path, seed: int = 0) -> None:
        self._engine = engine
        self._model = info.model
        self._log = log
        self._chance = random.Random(seed)
        self._serial = 0

    async def run(
        self, stage: str, loads: Sequence[Load], done: Callable[[Load], None] = lambda load: None
    ) -> None:
        """Run ``loads`` in turn. ``stage``: letters only, the name for ``samples``. Raises
        SweepError: a request was refused. Raises EngineDeadError: the engine died."""
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
        """The steps of a stage, once the engine has stopped. Raises SweepError: none; OSError."""
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


logger = logging.getLogger(__name__)

_PROMPT_SHARES = (0.06, 0.25, 1.0, 0.5, 0.12)
"""Prompt lengths, as shares of the batch's token limit."""

_DECODE_BATCHES = ((1, 64), (8, 16), (2, 512), (24, 128), (4, 1024), (16, 400))
"""Decode batches: (sequences, prompt tokens of each)."""

_SLO = SLO(service_class="profile")
"""A separate service class: these output lengths must not affect predictions for clients."""


_DECODE_STEPS = 12

BUDGET_S = 5.0
"""Max duration of a measurement at start, seconds."""


async def latency_profile(llm: Any, table: StateTable, config: EngineConfig) -> LatencyProfile:
    """The profile kept for this engine, or a new one. If ``BUDGET_S`` is too short for a fit,
    a default model with online correction, which is not kept."""
    key = profile_key(llm.vllm_config, config)
    path = profile_path(config.cache_dir, key)
    kept = read_profile(path, key)
    if kept is not None:
        return kept
    started_s = time.monotonic()
    await measure(llm, table, BUDGET_S)
    try:
        model, report = best_fit(table.samples())
    except ValueError as error:
        logger.warning("no latency profile; planning with a default: %s", error)
        return LatencyProfile.of(key, DEFAULT_MODEL, None)
    profile = LatencyProfile.of(key, model, report)
    logger.info(
        "latency profile in %.1f s: family %s, %r, mean error %.1f %% over %d steps%s",
        time.monotonic() - started_s,
        model.family,
        model,
        100 * report.mape,
        report.samples,
        _held_out(report),
    )
    write_profile(path, profile)
    return profile


def _held_out(report: FitReport) -> str:
    if report.held_out is None or report.held_out_without_context is None:
        return ""
    own, without = 100 * report.held_out, 100 * report.held_out_without_context
    return f", {own:.1f} % on held-out steps ({without:.1f} % by new tokens alone)"


def profile_key(vllm_config: Any, config: EngineConfig) -> str:
    """Key of what a profile depends on: model, engine, hardware, batch limits, policy."""
    import vllm
    from vllm.platforms import current_platform

    model = vllm_config.model_config
    scheduler = vllm_config.scheduler_config
    parallel = vllm_config.parallel_config
    shape = hashlib.sha256(model.hf_config.to_json_string().encode()).hexdigest()[:16]
    parts = {
        "model": config.model,
        "model_config": shape,
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "eager": model.enforce_eager,
        "vllm": vllm.__version__,
        "device": _device_name(),
        # Ray sets it for its workers, also where a GPU computes.
        "threads": os.environ.get("OMP_NUM_THREADS", "") if current_platform.is_cpu() else "",
        "tensor_parallel": parallel.tensor_parallel_size,
        "batch_tokens": scheduler.max_num_batched_tokens,
        "sequences": scheduler.max_num_seqs,
        "kv_dtype": str(vllm_config.cache_config.cache_dtype),
        "block_tokens": vllm_config.cache_config.block_size,
        "async": bool(scheduler.async_scheduling),
        # It is measured under the policy, and valid for the batches that this policy makes.
        "policy": config.policy,
    }
    if parallel.pipeline_parallel_size > 1:
        parts["pipeline_parallel"] = parallel.pipeline_parallel_size
    if parallel.data_parallel_size > 1:
        parts["data_parallel"] = parallel.data_parallel_size
    if config.preemption:
        parts["preemption"] = True
    drafts = vllm_config.speculative_config
    if drafts is not None:
        parts["speculation"] = f"{drafts.method} {drafts.model} {drafts.num_speculative_tokens}"
    if model.runner_type != "generate":
        parts["runner"] = model.runner_type
    if vllm_config.lora_config is not None:
        parts["lora"] = vllm_config.lora_config.max_loras
    return json.dumps(parts, sort_keys=True)


def profile_path(cache_dir: Path, key: str) -> Path:
    """Where the profile of ``key`` is kept."""
    digest = hashlib.sha256(key.encode()).hexdigest()[:24]
    return cache_dir.expanduser() / "profiles" / f"{digest}.json"


def read_profile(path: Path, key: str) -> LatencyProfile | None:
    """The kept profile, or ``None`` if there is no usable one."""
    try:
        profile = LatencyProfile.from_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("replacing the invalid latency profile %s: %s", path, error)
        return None
    if profile.key != key:
        logger.warning("replacing the latency profile %s, which is for another configuration", path)
        return None
    return profile


def write_profile(path: Path, profile: LatencyProfile) -> None:
    """Keep ``profile``. If the directory cannot be written, this only logs a warning."""
    try:
        save_profile(path, profile)
    except OSError as error:
        logger.warning("cannot save the latency profile: %s", error)


def save_profile(path: Path, profile: LatencyProfile) -> None:
    """Write ``profile`` atomically, even if power is lost. Raises OSError: it cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # In a temporary directory, which is removed in any case.
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".") as directory:
        file = Path(directory) / path.name
        with file.open("w", encoding="utf-8") as writing:
            writing.write(profile.to_json())
            writing.flush()
            os.fsync(writing.fileno())
        file.chmod(0o644)
        file.replace(path)


async def measure(llm: Any, table: StateTable, budget_s: float) -> None:
    """Run the load for about ``budget_s`` seconds at most; the samples are in ``table`` then. One
    prompt and one small batch before it are not counted: first steps are slow."""
    load = _Load(llm)
    try:
        async with asyncio.timeout(budget_s):
            await load.run(1, 32, 2)
            await load.run(2, load.batch_tokens // 2, 2)
            table.clear_samples()
            for _ in range(3):
                async for _ in load.round():
                    pass
    except TimeoutError:
        logger.debug("profiling used up its %.1f s", budget_s)


class _Load:
    """Random prompts, so that no prefix is found in a cache."""

    def __init__(self, llm: Any) -> None:
        config = llm.vllm_config
        cache = config.cache_config
        self.batch_tokens: int = config.scheduler_config.max_num_batched_tokens
        self._sequences: int = config.scheduler_config.max_num_seqs
        self._longest: int = config.model_config.max_model_len - 2 * _DECODE_STEPS
        self._kv_tokens = int(cache.num_gpu_blocks * cache.block_size)
        self._vocabulary: int = config.model_config.get_vocab_size()
        self._llm = llm
        self._chance = random.Random(0)
        self._serial = 0

    async def round(self) -> AsyncIterator[None]:
        """Every prompt length and decode batch once, interleaved; then a mixed batch."""
        for share, (sequences, tokens) in zip((*_PROMPT_SHARES, 0.5), _DECODE_BATCHES, strict=True):
            await self.run(1, int(share * self.batch_tokens), 1)
            yield
            await self.run(sequences, tokens, _DECODE_STEPS)
            yield
        # Prefills of several chunks on a growing context, beside decodes.
        decodes = asyncio.ensure_future(self.run(8, 64, 2 * _DECODE_STEPS))
        try:
            await self.run(2, 2 * self.batch_tokens, 1)
            await decodes
        finally:
            decodes.cancel()
        yield

    async def run(self, sequences: int, prompt_tokens: int, output_tokens: int) -> None:
        """Run a batch of equal requests to their end, as far as the engine can hold them."""
        prompt_tokens = max(1, min(prompt_tokens, self._longest, self._kv_tokens // 2))
        each = prompt_tokens + output_tokens
        count = max(1, min(sequences, self._sequences, self._kv_tokens // (2 * each)))
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(self._request(prompt_tokens, output_tokens))

    async def _request(self, prompt_tokens: int, output_tokens: int) -> None:
        from vllm import PoolingParams, SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._serial += 1
        low = min(16, self._vocabulary - 1)
        prompt: dict[str, Any] = {
            "prompt_token_ids": self._chance.choices(range(low, self._vocabulary), k=prompt_tokens)
        }
        if self._llm.vllm_config.model_config.is_encoder_decoder:
            # A prefill of such a model has its encoder's time in it.
            # A second; Whisper takes as long for any audio up to its longest.
            audio = {"prompt": "", "multi_modal_data": {"audio": np.zeros(16_000)}}
            prompt = {"encoder_prompt": audio, "decoder_prompt": prompt}
        name = f"profile-{self._serial}"
        xargs = to_xargs(RequestArgs(name, time.monotonic(), _SLO))
        if self._llm.vllm_config.model_config.runner_type == "pooling":
            task = self._llm.vllm_config.model_config.get_pooling_task(
                await self._llm.get_supported_tasks()
            )
            pooling = PoolingParams(task=task, extra_kwargs=xargs)
            async for _ in self._llm.encode(prompt, pooling, name):
                pass
            return
        params = SamplingParams(
            temperature=0.0,
            max_tokens=output_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args=xargs,
        )
        async for _ in self._llm.generate(prompt, params, name):
            pass


def _device_name() -> str:
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return str(current_platform.get_device_name())
    with open("/proc/cpuinfo", encoding="utf-8") as file:  # noqa: PTH123
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
