"""Speculative decoding inside real vLLM, in this process: the plan says how many drafted tokens a
decode checks, and the text is that of stock vLLM whatever it says."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest

from sluice.replica.scheduler.local_scheduler import Occupancy, StepTimes
from sluice.replica.scheduler.speculation import BY_BATCH_SIZE, with_all_lengths
from sluice.replica.scheduler.xargs import RequestArgs, to_xargs
from sluice.scheduling.batching import POLICIES, BatchPolicy
from sluice.scheduling.fleet.local_orders import SLIDE
from sluice.scheduling.latency.model import LinearLatency
from sluice.scheduling.latency.speculation import AdaptiveLengths, Speculation
from sluice.scheduling.request.kernels import DRAFTED
from sluice.scheduling.request.objective import SLO

from .in_process import InProcess

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
        return np.array([1 + self._chance.randint(0, int(most)) for most in decodes.drafted])


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


class RandomDeferral(BatchPolicy):
    """Leaves out a third of the queue, cuts prefills anywhere, in random order."""

    name = "random-deferral"
    source = "this test"
    local_order = SLIDE

    def fill(self, batch, queue, now_s, latency):
        chance = random.Random(f"{len(queue)}:{queue.table[0].tolist()}")
        rows = list(range(len(queue)))
        chance.shuffle(rows)
        for row in rows[: (2 * len(rows) + 2) // 3]:
            batch.add(row, chance.randrange(1, 60))


def phrases(count, seed=0):
    """Prompts of a few tokens repeated again and again, of which greedy text goes on in circles."""
    chance = random.Random(seed)
    requests = []
    for _ in range(count):
        phrase = [chance.randrange(300, 1000) for _ in range(chance.randrange(3, 9))]
        requests.append(
            ((phrase * 60)[: chance.randrange(40, 150)], chance.randrange(20, 60), None)
        )
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
    answers = SimpleNamespace(
        texts=engine.generate(phrases(MANY)), structured=structured(engine, 6)
    )
    engine.close()
    return answers


@pytest.fixture(scope="module")
def ngrams(model, stock, tmp_path_factory):
    config = with_all_lengths(NGRAM)
    directory = tmp_path_factory.mktemp("ngrams")
    args = ARGS | {"worker_cls": "sluice.replica.vllm.cpu_worker.PatchedCpuWorker"}
    engine = InProcess(model, directory, "fcfs", speculative_config=config, **args)
    yield engine
    engine.close()


def use(engine, policy, speculation, options=None):
    """Go on with these; return how many batches there are by now."""
    engine.use(policy, options)
    engine.scheduler._local._policy.speculation = speculation
    return len(engine.batches())


def summary(engine):
    return engine.table.read().summary


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
    first = use(ngrams, RandomDeferral.name, RandomLengths())
    before = summary(ngrams)
    assert ngrams.generate(phrases(MANY)) == stock.texts
    after = summary(ngrams)
    checked, accepted = (
        after[name] - before[name] for name in ("drafts_checked", "drafts_accepted")
    )
    assert 0 < accepted < checked
    assert after["preemptions"] > before["preemptions"]
    assert after["plan_mismatches"] == before["plan_mismatches"]
    batches = ngrams.batches()[first:]
    check_log(batches)
    lengths = [length for batch in batches for length in batch["checked"].values()]
    assert set(lengths) == set(range(MOST + 1))
    assert (after["draft_lengths"] - before["draft_lengths"]).sum() == len(lengths)
    assert sum(lengths) == checked


def test_greedy_text_is_that_of_stock_beside_requests_that_sample(ngrams, stock):
    from vllm import SamplingParams

    use(ngrams, "fcfs", RandomLengths())
    before = summary(ngrams)["drafts_accepted"]
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
    assert summary(ngrams)["drafts_accepted"] > before


def test_what_a_grammar_forbids_is_not_said_however_it_is_drafted(ngrams, stock):
    before = summary(ngrams)
    use(ngrams, "fcfs", RandomLengths())
    assert structured(ngrams, 6) == stock.structured
    assert summary(ngrams)["drafts_accepted"] > before["drafts_accepted"]


class Ask:
    """A request: its class says whether its drafts are right, its objective how fast it must be."""

    def __init__(self, name, slo, random_text, output):
        from vllm import SamplingParams

        chance = random.Random(name)
        phrase = [chance.randrange(300, 1000) for _ in range(4)]
        self.name = name
        self.prompt = (
            [chance.randrange(300, 400) for _ in range(60)] if random_text else phrase * 15
        )
        self.params = SamplingParams(
            temperature=1.0 if random_text else 0.0,
            max_tokens=output,
            ignore_eos=True,
            extra_args=to_xargs(RequestArgs(name, time.monotonic(), slo)),
        )


class Repeating:
    """A request that may say one token only, so that n-grams know what comes. It came at 0."""

    def __init__(self, name, slo, token, output):
        from vllm import SamplingParams

        self.name = name
        self.prompt = [token] * 20
        self.params = SamplingParams(
            temperature=0.0,
            max_tokens=output,
            ignore_eos=True,
            allowed_token_ids=[token],
            extra_args=to_xargs(RequestArgs(name, 0.0, slo)),
        )


def serve(engine, asks, late=(), after=0):
    """Serve requests that are all there at once, and late ones that come so many batches after
    them; return the batches by then."""
    first = len(engine.batches())
    vllm = engine.llm.llm_engine
    for ask in asks:
        vllm.add_request(ask.name, {"prompt_token_ids": ask.prompt}, ask.params)
    for _ in range(after):
        vllm.step()
    for ask in late:
        vllm.add_request(ask.name, {"prompt_token_ids": ask.prompt}, ask.params)
    while vllm.has_unfinished_requests():
        vllm.step()
    return engine.batches()[first:]


def mean_lengths(batches):
    """Drafted tokens that a decode checks, mean by the first part of its name."""
    lengths = defaultdict(list)
    for batch in batches:
        for name, length in batch["checked"].items():
            lengths[name.partition("-")[0]].append(length)
    return {kind: sum(each) / len(each) for kind, each in lengths.items()}


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
    """On an engine that takes 0.4 s for a step, and 40 ms for each token.

    A class of random text has its drafts checked until it is known that they are wrong. Where one
    or two decodes are left they are checked again, as such a step is mostly its fixed time.
    """
    use(ngrams, "deadline_triage", AdaptiveLengths(), {"anchor": "last_token"})
    ngrams.table.set_model(LinearLatency(a=0.4, b=0.04))
    tight = SLO(tpot_s=0.6)

    def classed(slo, name):
        return SLO(tpot_s=slo.tpot_s, service_class=name)

    wrong = [Ask(f"wrong-{n}", classed(tight, "wrong"), True, 120) for n in range(4)]
    right = [Ask(f"right-{n}", classed(tight, "right"), False, 80) for n in range(2)]
    batches = serve(ngrams, [*wrong, *right])
    rates = ngrams.scheduler._local.drafts.rates
    assert rates.rate("wrong") < min(0.4, rates.rate("right"))
    several = [batch for batch in batches if len(ran(batch)) > 2]
    assert mean_lengths(several[len(several) // 2 :])["wrong"] < 0.6


def test_lengths_follow_the_tiers_while_a_prompt_waits(ngrams, as_predicted):
    """Three paces in one engine, all of them with drafts that are right.

    While a long prompt waits, decodes of the tightest pace check all, as each draft lets batches be
    longer; those of the middle one as many as they need in batches that long; those of the loosest
    none. Before it comes all of them check some, as a step is mostly its fixed time, and the more
    the surer it is that drafts are right.
    """
    lengths = RecordedLengths()
    use(ngrams, "deadline_triage", lengths, {"anchor": "last_token"})
    ngrams.table.set_model(LinearLatency(a=0.4, b=0.03))
    before = summary(ngrams)
    asks = []
    for tier, (tpot_s, output) in TIERS.items():
        slo = SLO(ttft_s=30.0, tpot_s=tpot_s, service_class=tier)
        asks += [Repeating(f"{tier}-{n}", slo, 500 + len(asks) + n, output) for n in range(2)]
    long = Repeating("long-0", SLO(ttft_s=300.0), 600, 1)
    long.prompt *= 15
    batches = serve(ngrams, asks, [long], after=6)
    check_log(batches)
    assert [batch["checked"] for batch in batches] == [lengths.of(batch) for batch in batches]

    every = {ask.name for ask in asks}
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
    after = summary(ngrams)
    assert after["drafts_accepted"] - before["drafts_accepted"] == sum(
        sum(batch["checked"].values()) for batch in batches
    )


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
        use(engine, "fcfs", RandomLengths())
        assert engine.generate(phrases(MANY)) == stock.texts
        after = summary(engine)
        assert after["drafts_accepted"] > 0.9 * after["drafts_checked"] > 0
        assert after["plan_mismatches"] == 0
        batches = engine.batches()
        check_log(batches)
        for batch, sample in zip(batches, engine.table.samples(), strict=True):
            if batch["checked"]:
                most = max(batch["checked"].values())
                assert sample.spec_steps == (min(most + 1, 3) if most else 0)
    finally:
        engine.close()


def speculative(**changes):
    config = {
        "method": "ngram",
        "enable_adaptive_verification": False,
        "uses_dynamic_speculative_decoding": lambda: True,
        "use_multi_module_mtp": lambda: False,
    }
    scheduler = {
        "policy": "fcfs",
        "enable_chunked_prefill": True,
        "long_prefill_token_threshold": 0,
        "async_scheduling": False,
    }
    for name in scheduler.keys() & changes.keys():
        scheduler[name] = changes.pop(name)
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(**scheduler),
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=1, data_parallel_size=1, distributed_executor_backend="uni"
        ),
        speculative_config=SimpleNamespace(**(config | changes)),
    )


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"async_scheduling": True}, "async-scheduling must be off"),
        ({"uses_dynamic_speculative_decoding": lambda: False}, "by `speculative-config`"),
        ({"use_multi_module_mtp": lambda: True}, "several MTP layers"),
        ({"method": "extract_hidden_states"}, "drafts nothing"),
        ({"enable_adaptive_verification": True}, "must be off"),
    ],
)
def test_speculation_that_no_plan_can_carry_out_is_refused(changes, rule):
    from sluice.replica.vllm.support import UnsupportedVllmError, check_config

    check_config(speculative())
    with pytest.raises(UnsupportedVllmError, match=rule):
        check_config(speculative(**changes))


def test_a_drafting_model_is_refused_where_vllm_cannot_run_it(monkeypatch):
    import vllm

    from sluice.replica.vllm.support import UnsupportedVllmError, check_config

    for version in ("0.29.0", "0.31.0"):
        monkeypatch.setattr(vllm, "__version__", version)
        check_config(speculative(method="draft_model"))
    monkeypatch.setattr(vllm, "__version__", "0.30.0")
    check_config(speculative())
    with pytest.raises(UnsupportedVllmError, match=r"on CPUs vLLM 0\.30 drafts by ngram only"):
        check_config(speculative(method="draft_model"))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"spec-method": "ngram"}, "spec-method cannot be set: use speculative-config"),
        ({"speculative_config": {"method": "ngram"}}, "vllm_args: .*num_speculative_tokens"),
        ({"speculative-config": NGRAM, "async-scheduling": True}, "async-scheduling must be False"),
    ],
)
def test_arguments_that_contradict_speculation_are_refused(given, reason, tmp_path):
    from sluice.replica.scheduler.xargs import SchedulerSettings
    from sluice.replica.vllm.setup import parse_arguments

    settings = SchedulerSettings(state_table=tmp_path / "table", policy="fcfs")
    with pytest.raises(ValueError, match=reason):
        parse_arguments(given, "model", "name", settings)


def test_vllm_is_started_with_every_length(tmp_path):
    from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

    from sluice.replica.scheduler.xargs import SchedulerSettings
    from sluice.replica.vllm.setup import parse_arguments

    settings = SchedulerSettings(state_table=tmp_path / "table", policy="fcfs")
    parsed = parse_arguments({"speculative-config": NGRAM}, "model", "name", settings)
    lengths = build_dynamic_sd_schedule_lookup(parsed.speculative_config[BY_BATCH_SIZE], 64, MOST)
    assert set(lengths) == set(range(MOST + 1))
    assert parsed.async_scheduling is False
