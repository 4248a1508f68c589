"""Preemption in a real vLLM engine on the CPU: one engine, many ways to stop its prefills. It
drafts n-grams, so in each of the tests decodes check drafts."""

import math
import random
import time
from dataclasses import asdict
from functools import partial
from itertools import pairwise

import numpy as np
import pytest

from sluice.replica.scheduler.speculation import with_all_lengths
from sluice.replica.vllm.local_model import local_model
from sluice.scheduling.preemption import AgedShare, DecodeTurns
from tests.replica.engines import EngineProcess, StockEngine, Work
from tests.replica.preemption.trials import CheckedEngine, check_trials, nested_work, run_nested
from tests.replica.preemption.waits import BOUNDS, STOCK, WAYS, Bench, random_prompt

pytestmark = pytest.mark.vllm

LAYERS = 4
BLOCKS = 64
DEPTH = BOUNDS.depth
STOCK_ARGS = {
    "max_num_batched_tokens": 2048,
    "max_num_seqs": 16,
    "kv_cache_memory_bytes": 16 << 20,
    "block_size": 32,
    "enforce_eager": True,
    # The number of drafts in a step is no other run's, and in 16 bits rounding depends on it.
    "dtype": "float32",
    # That of vLLM 0.30 for CPUs cannot check drafts.
    "worker_cls": "sluice.replica.vllm.cpu_worker.PatchedCpuWorker",
}
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 5,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}
TRIALS = 24
TEXTS = 2


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return local_model(tmp_path_factory.mktemp("model"), layers=LAYERS, hidden=128)


@pytest.fixture(scope="module")
def engine(model, tmp_path_factory):
    made = CheckedEngine(
        model,
        tmp_path_factory.mktemp("preemption"),
        num_gpu_blocks_override=BLOCKS,
        dtype="float32",
        speculative_config=with_all_lengths(NGRAM),
        worker_cls="sluice.replica.vllm.cpu_worker.PatchedCpuWorker",
    )
    yield made
    made.close()


@pytest.fixture(scope="module")
def stock(model):
    """Stock vLLM, with the same drafts."""
    make = partial(StockEngine, model, max_model_len=1024, speculative_config=NGRAM, **STOCK_ARGS)
    made = EngineProcess(make)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def nothing_left(engine):
    """Every test starts and ends with all KV blocks free and nothing in flight, and no counter
    falls in it."""
    published = watch_counters(engine)
    yield
    del engine.scheduler.publish
    for before, after in pairwise([0, *published]):
        assert (after >= before).all(), (before, after)
    engine.check_idle()


def watch_counters(engine):
    """What each round from now on publishes of the counters, as one array."""
    published = []
    gauges = {"suspended", "reserved_bytes", "planned_stop_s"}

    def publish(summary):
        published.append(np.hstack([summary[each] for each in sorted(summary.keys() - gauges)]))
        type(engine.scheduler).publish(engine.scheduler, summary)

    engine.scheduler.publish = publish
    return published


def tokens_of(results):
    return {name: result.tokens for name, result in results.items()}


def texts(engine, made):
    """The tokens of requests that arrive together, on any engine."""
    for work in made:
        engine.add(work)
    return tokens_of(engine.run())


def alone(engine, made):
    """The tokens of requests that run alone; the engine is empty afterwards."""
    found = tokens_of({work.name: engine.alone(work) for work in made})
    engine.reset()
    return found


@pytest.mark.release
def test_text_that_repeats_is_that_of_stock_vllm_with_the_same_drafts(engine, stock):
    """Prefills stop inside layers, for each other and for steps of decodes, many of whose drafts
    are right. Then the text so far is a prompt, whose blocks are in the prefix cache. First in this
    file, so that the engine has its first drafts while prefills are suspended."""
    checks = engine.use()
    chance = random.Random(15)
    counts = engine.scheduler._local.drafts
    before = counts.checked, counts.accepted, engine.stops
    for trial in range(TEXTS):
        made = []
        for work in nested_work(chance, DEPTH, output=40):
            phrase = random_prompt(chance, chance.randrange(3, 9))
            prompt = (phrase * 240)[: len(work.prompt)]
            made.append(work._replace(prompt=prompt, tpot_s=0.004 * (1 + trial % 2)))
        expected = stock.call(texts, made)
        engine.reset()
        results = run_nested(engine, made, chance, checks)
        assert tokens_of(results) == expected
        parts = [
            work._replace(prompt=[*work.prompt, *expected[work.name][:30]], output=10)
            for work in made
        ]
        assert texts(engine, parts) == {name: found[30:] for name, found in expected.items()}
    checked, accepted = counts.checked - before[0], counts.accepted - before[1]
    assert checked > accepted > TEXTS * 40
    assert engine.stops - before[2] == TEXTS * DEPTH


def test_tokens_are_those_of_runs_without_preemption(engine):
    """At random places, whole and in chunks, nested one to three deep, with and without a common
    prefix. `python -m tests.replica.preemption.trials` does more of them."""
    check_trials(engine, TRIALS, seed=1)


def test_every_operator_has_a_check(engine):
    assert engine.use() == 5 * LAYERS


def test_memory_is_kept_for_what_a_layer_of_this_model_holds(engine):
    """As :mod:`sluice.replica.preemption.reserve` has it: heads of 64, half as many of keys."""
    width, intermediate, queries, keys = 128, 320, 128, 64
    elements = 4 * width + max(intermediate, 2 * queries + 2 * keys)
    reserve = engine.executor.reserve
    assert reserve.prefill == 4 * elements * reserve.tokens
    assert reserve.prefills == 3
    assert engine.stats.reserved_bytes == reserve.total > 3 * reserve.prefill


class TestPrefixCache:
    """A prompt that begins like that of a suspended prefill, whose blocks are not written yet."""

    def run(self, engine):
        checks = engine.use()
        chance = random.Random(5)
        long, urgent = nested_work(chance, 1, shared=256)
        expected = engine.alone(urgent)
        engine.reset()
        # In the second layer: the others' keys and values are not there.
        engine.at_checks({checks // LAYERS + 1: lambda: engine.add(urgent)})
        engine.add(long)
        return engine.run()[urgent.name], expected

    def test_waits_for_the_blocks(self, engine):
        result, expected = self.run(engine)
        assert result.tokens == expected.tokens
        assert result.logprobs[0] == expected.logprobs[0]

    def test_would_be_wrong_otherwise(self, engine, monkeypatch):
        manager = engine.scheduler.kv_cache_manager
        monkeypatch.setattr(
            manager, "allocate_slots", type(manager).allocate_slots.__get__(manager)
        )
        result, expected = self.run(engine)
        assert result.logprobs[0] != expected.logprobs[0]


class TestAbort:
    @pytest.mark.parametrize(
        "aborted", [["w0"], ["w1"], ["w1", "w0"]], ids=["suspended", "running", "both"]
    )
    def test_of_prefills_in_flight(self, engine, aborted):
        """``w0`` is stopped by ``w1`` in its middle; ``aborted`` end at a check of ``w1``."""
        middle = engine.use() // 2
        made = nested_work(random.Random(6), 1)
        expected = alone(engine, made)
        later = middle + 4
        engine.at_checks(
            {middle: lambda: engine.add(made[1]), later: lambda: engine.abort(aborted)},
            waits={middle, later} if "w1" in aborted else {middle},
        )
        engine.add(made[0])
        assert tokens_of(engine.run()) == {
            name: tokens for name, tokens in expected.items() if name not in aborted
        }

    def test_in_any_order_with_arrivals_and_ends(self, engine):
        """What has not ended has its tokens, and every stop signal is counted once."""
        chance = random.Random(16)
        for _ in range(TRIALS):
            checks = engine.use()
            made = nested_work(chance, DEPTH)
            expected = alone(engine, made)
            actions = [partial(engine.add, work) for work in made[1:]]
            aborted = [work.name for work in made if chance.random() < 0.5]
            actions += [partial(engine.abort, [name]) for name in aborted]
            chance.shuffle(actions)
            at = sorted(chance.sample(range(1, 3 * checks), len(actions)))
            engine.at_checks(dict(zip(at, actions, strict=True)), waits=())
            engine.add(made[0])
            results = engine.run()
            for name in results.keys() - aborted:
                assert results[name].tokens == expected[name]

    def test_of_one_that_waits(self, engine):
        middle = engine.use() // 2
        first, calm = nested_work(random.Random(7), 1)
        calm = calm._replace(ttft_s=9000.0)
        expected = alone(engine, [first])
        engine.at_checks(
            {middle: lambda: engine.add(calm), middle + 2: lambda: engine.abort([calm.name])},
            waits=(),
        )
        engine.add(first)
        assert tokens_of(engine.run()) == expected


def test_a_nested_prefill_that_fails_takes_nobody_with_it(engine):
    middle = engine.use() // 2
    made = nested_work(random.Random(8), 2)
    expected = alone(engine, made[:2])
    engine.at_checks({middle: lambda: engine.add(made[1]), 2 * middle: lambda: engine.add(made[2])})
    engine.fail_at(2 * middle + 4)  # in the innermost
    engine.add(made[0])
    results = engine.run()
    assert results.pop(made[2].name).reason == "error"
    assert tokens_of(results) == expected


def urgent_without_room():
    """The blocks suffice for each alone, but not for both. No decode follows: on a slow machine the
    urgent prefill would be cut in pieces for it, of which the first one has room."""
    chance = random.Random(9)
    return [Work(name, random_prompt(chance, 1000), 1, s) for name, s in (("w0", 4e3), ("w1", 1e3))]


def best_effort_urgent():
    # No decode, which may stop a prefill.
    long, urgent = nested_work(random.Random(10), 1, output=1)
    return [long, urgent._replace(best_effort=True)]


@pytest.mark.parametrize("work", [urgent_without_room, best_effort_urgent])
def test_what_has_no_blocks_or_no_guarantee_stops_nobody(engine, work):
    middle = engine.use() // 2
    assert 2 * -(-1000 // engine.scheduler.block_size) > BLOCKS - 1
    long, urgent = work()
    expected = alone(engine, [long, urgent])
    engine.at_checks({middle: lambda: engine.add(urgent)}, waits=())
    engine.add(long)
    before = engine.stats.suspensions
    assert tokens_of(engine.run()) == expected
    assert engine.stats.suspensions == before


@pytest.mark.release
def test_the_benchmark_compares_with_stock_vllm(engine, stock):
    """A stop in each run, unless the short prompt came too late for one; and the same tokens on
    both engines, whatever preempts."""
    found = Bench(engine, stock, 700, 32, seed=4).all(repeats=3, pairs=6)
    with pytest.raises(TypeError):
        stock.call(StockEngine.use, "what is no number", "nor this", "one too many")
    rows = {row["way"]: row for row in found["rows"]}
    assert list(rows) == [*WAYS, *STOCK]
    assert all(row["same"] == 1 for row in rows.values())
    assert 1 <= rows["operator"]["stops"] <= 3
    assert [rows[way]["stops"] for way in ("none", *STOCK)] == [0] * (1 + len(STOCK))
    assert set(found["overhead"]) == {"checks", "prefill", "decode"}


def test_a_late_guaranteed_prefill_stops_and_precedes_one_without_a_guarantee(engine):
    """It would preempt no guaranteed one, as it is late; and the other one stops it in no case."""
    middle = engine.use() // 2
    made = nested_work(random.Random(13), 1, output=1)
    free, late = made[0]._replace(best_effort=True), made[1]
    expected = alone(engine, [free, late])
    long_ago_s = time.monotonic() - 2 * late.ttft_s
    engine.at_checks({middle: lambda: engine.add(late, long_ago_s)})
    engine.add(free)
    before = engine.stats.suspensions
    assert tokens_of(engine.run()) == expected
    assert engine.stats.suspensions == before + 1
    engine.reset()
    engine.add(free)
    engine.add(late, long_ago_s)
    assert list(engine.run()) == [late.name, free.name]


@pytest.mark.parametrize(
    ("tpot_s", "best_effort", "stops"),
    [(0.1, False, True), (600.0, False, False), (0.1, True, False)],
    ids=["short TPOT", "long TPOT", "best effort"],
)
def test_a_decode_stops_a_prefill_when_its_own_token_is_due(engine, tpot_s, best_effort, stops):
    """A prefill takes longer than a short TPOT, but not than a long one. No decode without a
    guarantee stops a guaranteed prefill."""
    checks = engine.use()
    chance = random.Random(14)
    decode = Work("decode", random_prompt(chance, 32), 3, 1000.0, best_effort, tpot_s)
    long = Work("long", random_prompt(chance, 300), 1, 2000.0)
    stock = engine._checks.check
    seen = []

    def check():
        seen.append(True)
        if len(seen) == checks:
            engine.post(lambda: engine.add(long))
        if len(seen) == checks + checks // 2:
            time.sleep(0.5)
        stock()

    engine._checks.check = check
    engine.add(decode)
    before = engine.stats.suspensions
    assert set(engine.run()) == {"decode", "long"}
    assert (engine.stats.suspensions > before) == stops


@pytest.mark.parametrize(
    ("output", "decode", "gap_s", "parts"),
    [
        (1, True, 0.05, [300, 300, 300]),  # its steps are due far later
        (2, False, 0.05, [300, 300, 300]),  # its own decode comes, as that of others may
        (1, False, math.inf, [900]),
    ],
)
def test_a_prompt_is_cut_where_it_would_stop_too_late_for_decodes(
    engine, monkeypatch, output, decode, gap_s, parts
):
    engine.use()
    found, beside = [], []
    build = engine.scheduler._build

    def built(queue, chosen):
        task = build(queue, chosen)
        if task is not None:
            each = task.batch.num_scheduled_tokens
            long = [tokens for name, tokens in each.items() if name.startswith("long")]
            found.extend(tokens for tokens in long if tokens > 1)
        return task

    def max_tokens(_, tpots_s, *others):
        beside.append((tpots_s.tolist(), others[-1]))
        return 300 if len(tpots_s) else 1_024

    monkeypatch.setattr(engine.scheduler, "_build", built)
    monkeypatch.setattr(DecodeTurns, "max_tokens", max_tokens)
    chance = random.Random(3)
    if decode:
        engine.add(Work("decode", random_prompt(chance, 400), 30, 60.0, tpot_s=60.0))
    engine.add(Work("long", random_prompt(chance, 900), output, 90.0, tpot_s=60.0))
    assert "long" in engine.run()
    assert found == parts
    assert ([60.0] if gap_s < math.inf else [], gap_s) in beside
    assert engine.table.read().summary["planned_stop_s"] > 0


def test_what_has_waited_long_has_a_share_of_the_engine(engine, monkeypatch):
    """More urgent prefills wait all the time; without the share it would come after all of them."""
    monkeypatch.setattr(engine.scheduler, "_aged", AgedShare(patience_s=5.0, share=0.5))
    engine.use()
    chance = random.Random(12)
    urgent = [Work(f"u{n}", random_prompt(chance, 500), 1, 4000.0) for n in range(8)]
    long_ago_s = 10.0
    engine.add(
        Work("aged", random_prompt(chance, 100), 1, 4000.0, best_effort=True),
        time.monotonic() - long_ago_s,
    )
    for work in urgent:
        engine.add(work)
    results = engine.run()
    waited_s = results["aged"].ttft_s - long_ago_s
    assert waited_s < max(results[work.name].ttft_s for work in urgent)


def test_no_more_prefills_are_suspended_than_allowed(engine):
    engine.use()
    made = nested_work(random.Random(11), DEPTH + 2, output=1)
    expected = alone(engine, made)
    at = [4 * (index + 1) for index in range(DEPTH + 2)]
    actions = {check: partial(engine.add, work) for check, work in zip(at, made[1:], strict=True)}
    engine.at_checks(actions, waits=at[:DEPTH])
    engine.add(made[0])
    before = engine.stats.suspensions
    assert tokens_of(engine.run()) == expected
    assert engine.stats.suspensions == before + DEPTH
    summary = engine.table.read().summary
    for name, value in asdict(engine.stats).items():
        assert summary[name] == pytest.approx(value), name
    assert summary["suspended"] == 0
