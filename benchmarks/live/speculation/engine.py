"""One real vLLM engine in this process that decodes speculatively, with requests that arrive by the
clock, and a model whose text repeats."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Sequence
from math import nan
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sluice.benchmarks.live.engines import OneEngine
from sluice.replica.scheduler.speculation import with_all_lengths
from sluice.replica.scheduler.state_table import StateTable
from sluice.replica.scheduler.xargs import RequestArgs, SchedulerSettings, to_xargs
from sluice.replica.vllm.local_model import local_model
from sluice.scheduling.batching import make_policy
from sluice.scheduling.latency.fit import fit
from sluice.scheduling.latency.speculation import AdaptiveLengths, Speculation
from sluice.scheduling.request.kernels import Ints
from sluice.scheduling.request.objective import SLO, TokenClock

_MOST_LIVE = 4096
_NAP_S = 0.001
_HEADROOM = 1.05
_WORDS = 12


def repeating_model(directory: Path, layers: int, hidden: int, seed: int = 0) -> Path:
    """The folder, in ``directory``, of a model whose greedy text repeats, as a real model's text
    does on code, quotes and forms.

    It is the local model with two changes: its attention has no effect, so that the next token
    follows from the last one alone, and :data:`_WORDS` tokens stand out from all others. So a
    greedy text cycles after a few tokens, while a sampled text uses all tokens and does not. The
    computation and duration of a step are those of the local model.
    """
    from safetensors.torch import load_file, save_file

    target = directory / "repeating"
    shutil.copytree(local_model(directory, layers=layers, hidden=hidden), target)
    (file,) = target.glob("*.safetensors")
    weights = load_file(file)
    for name, weight in weights.items():
        if ".o_proj." in name:
            weight.zero_()
    head = weights["lm_head.weight"]
    words = head.abs().sum(dim=1).nonzero().flatten().tolist()
    for token in set(words) - set(random.Random(seed).sample(words, _WORDS)):
        head[token].zero_()
    save_file(weights, file, metadata={"format": "pt"})
    return target


class Asked(NamedTuple):
    """One request: its name, its arrival, seconds after the first, prompt tokens, number of output
    tokens, objective, and sampling."""

    name: str
    at_s: float
    prompt: Sequence[int]
    output: int
    slo: SLO
    temperature: float


class Ended(NamedTuple):
    """The result of a request. Times are seconds."""

    tokens: tuple[int, ...]
    ttft_s: float
    tpot_s: float
    attained: bool


class Run(NamedTuple):
    """Some requests, from the first arrival to the last token.

    Attributes:
        ended: the requests.
        seconds: how long all took.
        checked, accepted: drafted tokens checked, and accepted.
        offered: decode steps with drafts.
        decodes, decoded: decode steps, and their output tokens.
    """

    ended: list[Ended]
    seconds: float
    checked: int
    accepted: int
    offered: int
    decodes: int
    decoded: int

    @property
    def attained(self) -> float:
        """Share of requests that met their objective."""
        return sum(each.attained for each in self.ended) / len(self.ended)


class FixedLengths(Speculation):
    """Every decode checks all its drafted tokens, up to ``most``."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def _lengths(self, decodes: Any, *others: Any) -> Ints:
        lengths: Ints = 1 + np.minimum(decodes.drafted, self._most).astype(np.int64)
        return lengths


class SpeculatingEngine(OneEngine):
    """An engine with n-grams of the text as drafts.

    Args:
        model: the model's directory.
        directory: its state table is made there.
        policy: the batch policy.
        drafted: max tokens to draft.
    """

    def __init__(self, model: Path, directory: Path, policy: str, drafted: int) -> None:
        super().__init__()
        path = directory / "state"
        self.table = StateTable.create(_MOST_LIVE, path)
        settings = SchedulerSettings(state_table=path, policy=policy)
        ngrams = {
            "method": "ngram",
            "num_speculative_tokens": drafted,
            "prompt_lookup_min": 1,
            "prompt_lookup_max": 3,
        }
        self._start(
            model,
            max_model_len=1024,
            max_num_batched_tokens=512,
            max_num_seqs=64,
            kv_cache_memory_bytes=256 << 20,
            block_size=32,
            dtype="float32",
            enable_prefix_caching=False,
            enforce_eager=True,
            distributed_executor_backend="uni",
            worker_cls="sluice.replica.vllm.cpu_worker.PatchedCpuWorker",
            speculative_config=with_all_lengths(ngrams),
            scheduler_cls="sluice.replica.vllm.scheduler.make_scheduler",
            additional_config=settings.to_additional_config(),
        )
        self._policy = policy
        self._local: Any = self._llm.llm_engine.engine_core.engine_core.scheduler._local

    def use(self, most: int | None) -> None:
        """Use planned lengths from now on, or fixed ones of at most ``most``."""
        policy = make_policy(self._policy)
        policy.speculation = AdaptiveLengths() if most is None else FixedLengths(most)
        self._local._policy = policy

    def learn(self) -> None:
        """Plan with a latency model that is fitted to the latest steps.

        Raises:
            ValueError: the steps are too few, or too similar.
        """
        model, _ = fit(self.table.samples())
        self.table.set_model(model.with_headroom(_HEADROOM))

    def serve(self, arrivals: Sequence[Asked]) -> Run:
        """Serve requests as they arrive, by the clock, until all have ended."""
        engine = self._llm.llm_engine
        before = self.table.read().summary
        clocks: dict[str, TokenClock] = {}
        ended: list[Ended] = []
        waiting = list(reversed(arrivals))
        decodes = decoded = 0
        began_s = time.monotonic()
        while waiting or engine.has_unfinished_requests():
            now_s = time.monotonic()
            while waiting and began_s + waiting[-1].at_s <= now_s:
                asked = waiting.pop()
                self._begin(asked, began_s + asked.at_s)
                clocks[asked.name] = TokenClock(asked.slo, began_s + asked.at_s)
            if not engine.has_unfinished_requests():
                time.sleep(min(_NAP_S, max(0.0, began_s + waiting[-1].at_s - now_s)))
                continue
            outputs = engine.step()
            now_s = time.monotonic()
            for output in outputs:
                clock = clocks[output.request_id]
                tokens = output.outputs[0].token_ids
                new = len(tokens) - clock.tokens
                if clock.tokens:
                    decodes += 1
                    decoded += new
                clock.emit(new, now_s)
                if output.finished:
                    ttft_s, tpot_s = clock.ttft_s, clock.tpot_s
                    attained = clock.attained(now_s)
                    ended.append(Ended(tuple(tokens), ttft_s or nan, tpot_s or nan, attained))
        after = self.table.read().summary
        drafts = ("drafts_checked", "drafts_accepted")
        checked, accepted = (int(after[name] - before[name]) for name in drafts)
        offered = int((after["draft_lengths"] - before["draft_lengths"]).sum())
        seconds = time.monotonic() - began_s
        return Run(ended, seconds, checked, accepted, offered, decodes, decoded)

    def _begin(self, asked: Asked, arrived_s: float) -> None:
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=asked.temperature,
            max_tokens=asked.output,
            ignore_eos=True,
            detokenize=False,
            extra_args=to_xargs(RequestArgs(asked.name, arrived_s, asked.slo)),
        )
        prompt = {"prompt_token_ids": list(asked.prompt)}
        self._llm.llm_engine.add_request(asked.name, prompt, params)
