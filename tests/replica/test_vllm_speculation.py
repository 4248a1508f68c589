"""Speculative decoding inside real vLLM: the plan says how many drafted tokens a decode checks, and
the text is that of stock vLLM whatever it says."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from statistics import mean
from types import SimpleNamespace

import numpy as np
import pytest

from sluice.replica.scheduler.local_scheduler import Occupancy, StepTimes
from sluice.replica.scheduler.speculation import with_all_lengths
from sluice.replica.scheduler.xargs import RequestArgs, to_xargs
from sluice.replica.vllm.engine import VllmEngine
from sluice.scheduling.batching import POLICIES
from sluice.scheduling.latency.model import LinearLatency
from sluice.scheduling.latency.speculation import AdaptiveLengths, Speculation
from sluice.scheduling.request.kernels import DRAFTED
from sluice.scheduling.request.objective import SLO, TokenClock
from sluice.simulation.metrics import TPOTMetric, stages
from sluice.simulation.requests import Requests
from sluice.simulation.workload import Arrival
from tests.simulation.loads import of

from .in_process import InProcess, RandomDeferral, Since, random_prompt
from .small_engine import events_of, greedy, items_of, small_config, split

pytestmark = pytest.mark.vllm

MOST = 5
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": MOST,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}
# 39 blocks of 32 tokens can be used: fewer than the requests below need at once.
ARGS = {
    "dtype": "float32",
    "enable_prefix_caching": False,
    "num_gpu_blocks_override": 40,
    "max_model_len": 1024,
    "max_num_batched_tokens": 128,
}
DRAFTS = ("drafts_accepted", "drafts_checked")
MANY, FEW = 20, 5
TIERS = {"tight": (0.6, 96), "middle": (1.2, 76), "loose": (6.0, 60)}
"""TPOT of a service class, seconds, and output tokens of its requests."""
DIGITS = r"\{\"numbers\": \[\d(, \d){12,30}\]\}"


class RandomLengths(Speculation):
    """Has each decode check any number of its drafts."""

    def __init__(self):
        super().__init__()
        self._chance = random.Random(1)

    def _lengths(self, decodes, *others):
        return np.array([self._chance.randint(1, most) for most in decodes.most.tolist()])


class RecordedLengths(AdaptiveLengths):
    """Remembers its answers: how many drafts each decode that has some should check, by time."""

    def __init__(self):
        super().__init__()
        self.answers = {}

    def choose(self, queue, now_s, *others):
        found = super().choose(queue, now_s, *others)
        names = [request.request_id.rpartition("-")[0] for request in queue.requests]
        offered = np.flatnonzero(queue.table[:, DRAFTED])
        self.answers[now_s] = {names[row]: int(found.drafts[row]) for row in offered}
        return found

    def of(self, batch):
        """The answer for a batch, without the decodes that were left out of it."""
        answer = self.answers.get(batch["now_s"], {})
        return {name: drafts for name, drafts in answer.items() if name in ran(batch)}


def ran(batch):
    """The requests of a batch."""
    return {name for name, *_ in batch["ran"]}


def phrases(count, seed=0):
    """Prompts of a few tokens repeated again and again, of which greedy text goes on in circles."""
    chance = random.Random(seed)
    requests = []
    for _ in range(count):
        phrase = random_prompt(chance, chance.randrange(3, 9))
        length, output = chance.randrange(40, 150), chance.randrange(20, 60)
        requests.append(((phrase * 60)[:length], output, None))
    return requests


def structured(engine, count):
    """Texts that must match a grammar, of so many different prompts."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    params = SamplingParams(
        temperature=0.0, max_tokens=80, structured_outputs=StructuredOutputsParams(regex=DIGITS)
    )
    prompts = [f"list {number} numbers: 1, 2, 3, 1, 2, 3, 1, 2, 3" for number in range(count)]
    outputs = engine.llm.generate(prompts, params, use_tqdm=False)
    return [(output.outputs[0].text, output.outputs[0].finish_reason) for output in outputs]


@pytest.fixture(scope="module")
def stock(model, tmp_path_factory):
    """What stock vLLM answers, with room for everything."""
    args = ARGS | {"num_gpu_blocks_override": 400}
    engine = InProcess(model, tmp_path_factory.mktemp("stock"), **args)
    texts, schemas = engine.generate(phrases(MANY)), structured(engine, 6)
    engine.close()
    return SimpleNamespace(texts=texts, structured=schemas)


@pytest.fixture(scope="module")
def ngrams(model, stock, tmp_path_factory):
    config = with_all_lengths(NGRAM)
    directory = tmp_path_factory.mktemp("ngrams")
    args = ARGS | {"worker_cls": "sluice.replica.vllm.cpu_worker.PatchedCpuWorker"}
    engine = InProcess(model, directory, "fcfs", speculative_config=config, **args)
    yield engine
    engine.close()


def use(engine, policy, speculation, options=None):
    """Go on with these; what the engine does from now on."""
    engine.use(policy, options)
    engine.scheduler._local._policy.speculation = speculation
    return Since(engine)


def check_log(batches):
    """A decode runs its one token and the drafts that it checks, and what was wrong is computed
    again: the next step begins behind what this one gave, from one token to all of them."""
    last = {}
    for batch in batches:
        assert dict(map(tuple, batch["plan"])) == {name: n for name, n, _ in batch["ran"]}
        for name in batch["preempted"]:
            last.pop(name, None)
        for name, tokens, computed in batch["ran"]:
            if name in last:
                before, given = last[name]
                assert before + 1 <= computed <= before + given, "a step began at a wrong place"
            checked = batch["checked"].get(name)
            if checked is None:
                last[name] = (computed + tokens - 1, 1)
            else:
                assert tokens == 1 + checked <= 1 + MOST
                last[name] = (computed, tokens)


def test_the_text_is_that_of_stock_whatever_is_checked(ngrams, stock, monkeypatch):
    """With too few blocks, so that requests lose theirs, with drafts pending and without."""
    monkeypatch.setitem(POLICIES.own, RandomDeferral.name, RandomDeferral)
    since = use(ngrams, RandomDeferral.name, RandomLengths())
    assert ngrams.generate(phrases(MANY)) == stock.texts
    assert 0 < since["drafts_accepted"] < since["drafts_checked"]
    assert since["preemptions"] > 0
    assert since["plan_mismatches"] == 0
    batches = since.batches()
    check_log(batches)
    lengths = [length for batch in batches for length in batch["checked"].values()]
    assert set(lengths) == set(range(MOST + 1))
    assert since["draft_lengths"].sum() == len(lengths)
    assert sum(lengths) == since["drafts_checked"]


def test_greedy_text_is_that_of_stock_beside_requests_that_sample(ngrams, stock):
    from vllm import SamplingParams

    since = use(ngrams, "fcfs", RandomLengths())
    requests = phrases(MANY)[:FEW]
    params = [
        SamplingParams(temperature=temperature, max_tokens=output, top_k=50, ignore_eos=True)
        for temperature in (0.0, 1.0)
        for _, output, _ in requests
    ]
    prompts = [{"prompt_token_ids": prompt} for prompt, _, _ in requests]
    outputs = ngrams.llm.generate(prompts * 2, params, use_tqdm=False)
    texts = [tuple(output.outputs[0].token_ids) for output in outputs]
    assert texts[: len(requests)] == stock.texts[: len(requests)]
    assert texts[len(requests) :] != texts[: len(requests)]
    assert since["drafts_accepted"] > 0


def test_what_a_grammar_forbids_is_not_said_however_it_is_drafted(ngrams, stock):
    since = use(ngrams, "fcfs", RandomLengths())
    assert structured(ngrams, 6) == stock.structured
    assert since["drafts_accepted"] > 0


def add(engine, name, slo, prompt, arrival_s, **sampling):
    """A request arrives, greedy unless ``sampling`` says otherwise."""
    from vllm import SamplingParams

    extra = to_xargs(RequestArgs(name, arrival_s, slo))
    given = {"temperature": 0.0, **sampling}
    params = SamplingParams(ignore_eos=True, extra_args=extra, **given)
    engine.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, params)


def add_repeating(engine, name, slo, token, output, length=20):
    """A request that may say one token only, so that n-grams know what comes. It came at 0."""
    add(engine, name, slo, [token] * length, 0.0, max_tokens=output, allowed_token_ids=[token])


def run_all(engine):
    while engine.llm.llm_engine.has_unfinished_requests():
        engine.llm.llm_engine.step()


@pytest.fixture
def as_predicted(ngrams, monkeypatch):
    """Each batch takes the time that its plan predicts, from 0 on: what is planned then does not
    depend on how fast this machine is."""
    scheduler = ngrams.scheduler
    occupancy = Occupancy()
    monkeypatch.setattr(scheduler, "_occupancy", occupancy)
    monkeypatch.setattr(scheduler._local, "times", StepTimes())
    clock = SimpleNamespace(monotonic=lambda: occupancy.busy_until_s, thread_time=lambda: 0.0)
    monkeypatch.setattr("sluice.replica.vllm.scheduler.time", clock)
    return clock


@pytest.mark.release
def test_drafts_that_are_wrong_are_hardly_checked_any_more(ngrams, as_predicted):
    """On an engine that takes 0.4 s for a step, and 40 ms for each token. Where one or two decodes
    are left they are checked again, as such a step is mostly its fixed time."""
    since = use(ngrams, "deadline_triage", AdaptiveLengths(), {"anchor": "last_token"})
    ngrams.table.set_model(LinearLatency(a=0.4, b=0.04))
    for name in ("wrong-0", "wrong-1", "wrong-2", "wrong-3", "right-0", "right-1"):
        kind, chance = name[:-2], random.Random(name)
        slo, arrival_s = SLO(tpot_s=0.6, service_class=kind), time.monotonic()
        if kind == "wrong":
            prompt = [chance.randrange(300, 400) for _ in range(60)]
            add(ngrams, name, slo, prompt, arrival_s, max_tokens=120, temperature=1.0)
        else:
            add(ngrams, name, slo, random_prompt(chance, 4) * 15, arrival_s, max_tokens=80)
    run_all(ngrams)
    rates = ngrams.scheduler._local.drafts.rates
    assert rates.rate("wrong") < min(0.4, rates.rate("right"))
    several = [batch for batch in since.batches() if len(ran(batch)) > 2]
    checked = [batch["checked"] for batch in several[len(several) // 2 :]]
    lengths = [n for each in checked for name, n in each.items() if name.startswith("wrong")]
    assert mean(lengths) < 0.6


def test_lengths_follow_the_tiers_while_a_prompt_waits(ngrams, as_predicted):
    """While a long prompt waits, decodes of the tightest tier check all drafts, as each lets
    batches be longer; those of the middle one as many as they need in batches that long; those of
    the loosest none. Before it comes all of them check some, and the more the surer it is that
    drafts are right."""
    lengths = RecordedLengths()
    since = use(ngrams, "deadline_triage", lengths, {"anchor": "last_token"})
    ngrams.table.set_model(LinearLatency(a=0.4, b=0.03))
    every = set()
    for tier, (tpot_s, output) in TIERS.items():
        slo = SLO(ttft_s=30.0, tpot_s=tpot_s, service_class=tier)
        for name in (f"{tier}-0", f"{tier}-1"):
            add_repeating(ngrams, name, slo, 500 + len(every), output)
            every.add(name)
    for _ in range(6):
        ngrams.llm.llm_engine.step()
    add_repeating(ngrams, "long-0", SLO(ttft_s=300.0), 600, 1, length=300)
    run_all(ngrams)
    batches = since.batches()
    check_log(batches)
    assert [batch["checked"] for batch in batches] == [lengths.of(batch) for batch in batches]

    beside = [batch for batch in batches if ran(batch) == every | {"long-0"}]
    assert len(beside) > 4
    for batch in beside:
        checked = batch["checked"]
        assert checked.keys() == every, "all of them had drafts"
        tight, middle, loose = ({checked[f"{tier}-{n}"] for n in range(2)} for tier in TIERS)
        assert min(tight) > max(middle) > max(loose) == 0
    for name in every:
        alone = [batch["checked"][name] for batch in batches[1:6]]
        assert alone == sorted(alone)
        assert alone[0] > 0
    checked = sum(sum(batch["checked"].values()) for batch in batches)
    assert since["drafts_accepted"] == checked


@pytest.mark.release
def test_a_drafting_model_drafts_as_much_as_is_checked(model, stock, tmp_path):
    """A step drafts one token more than it checks, up to the max, and none where it checks none.
    The model is its own draft, so nearly all drafts are right. Blocks are too few for all."""
    import vllm

    if vllm.__version__.startswith("0.30."):
        pytest.skip("vLLM 0.30 does not draft by a model on CPUs")
    config = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 3}
    engine = InProcess(model, tmp_path, "fcfs", speculative_config=with_all_lengths(config), **ARGS)
    try:
        since = use(engine, "fcfs", RandomLengths())
        assert engine.generate(phrases(MANY)) == stock.texts
        assert since["drafts_accepted"] > 0.9 * since["drafts_checked"] > 0
        assert since["plan_mismatches"] == 0
        batches = since.batches()
        check_log(batches)
        for batch, sample in zip(batches, engine.table.samples(), strict=True):
            if batch["checked"]:
                most = max(batch["checked"].values())
                assert sample.spec_steps == (min(most + 1, 3) if most else 0)
    finally:
        engine.close()


@pytest.mark.release
async def test_tokens_that_come_in_groups_are_counted_one_by_one(model, tmp_path):
    """By the engine of a replica, whose text is one token again and again, and at the edge."""
    tokens, args = 60, {"max_num_batched_tokens": 128, "speculative_config": NGRAM}
    engine = VllmEngine(small_config(model, tmp_path, **args), "replica-1", 32)
    body = {"prompt": [500] * 20, "allowed_token_ids": [500], "max_tokens": tokens}
    streaming = {"stream": True, "stream_options": {"include_usage": True}}
    try:
        await engine.start()
        before = engine.state().summary.copy()
        _, (whole,), plain_tail = split(await items_of(engine, greedy("plain", **body)))
        asked = greedy("streamed", **body, **streaming)
        _, chunks, tail = split(await items_of(engine, asked))
        after = engine.state().summary
    finally:
        await engine.stop()
    plain = json.loads(whole.data)
    assert whole.tokens == plain_tail.output_tokens == plain["usage"]["completion_tokens"] == tokens
    offsets_s = list(plain_tail.token_offsets_s)
    assert len(offsets_s) == tokens and offsets_s == sorted(offsets_s)
    groups = Counter(offsets_s)
    assert len(groups) < tokens / 2, "most steps gave several tokens"
    assert sum(chunk.tokens for chunk in chunks) == tail.output_tokens == tokens
    assert sum(chunk.tokens > 0 for chunk in chunks) < tokens / 2
    events = events_of(chunks)
    assert events[-1]["usage"].items() <= plain["usage"].items()
    text = "".join(choice["text"] for event in events for choice in event["choices"])
    assert text == plain["choices"][0]["text"]
    accepted, checked = (after[name] - before[name] for name in DRAFTS)
    assert accepted == checked > tokens

    # The edge counts the tokens of a plain response one by one, and those of a stream by chunk.
    slo = SLO(ttft_s=offsets_s[0], tpot_s=1.0)
    single, grouped = TokenClock(slo, 0.0), TokenClock(slo, 0.0)
    for offset_s in offsets_s:
        single.emit(1, offset_s)
    for offset_s, count in groups.items():
        grouped.emit(count, offset_s)
    mean_s = (offsets_s[-1] - offsets_s[0]) / (tokens - 1)
    assert single.tpot_s == grouped.tpot_s == pytest.approx(mean_s)
    assert (single.ttft_s, single.gain) == (grouped.ttft_s, grouped.gain)
    # A window of ten tokens is from group to group.
    requests = Requests(of([Arrival(0.0, 20, tokens, slo)]))
    requests.emitted_s[:] = offsets_s
    times, ends = list(groups), np.cumsum(list(groups.values()))
    begins = [np.flatnonzero(end - ends[:place] >= 10) for place, end in enumerate(ends)]
    slowest_s = max(
        (times[place] - times[begin[-1]]) / (ends[place] - ends[begin[-1]])
        for place, begin in enumerate(begins)
        if len(begin)
    )
    assert stages(requests).tpot_s[TPOTMetric.WINDOW][0] == pytest.approx(slowest_s)
