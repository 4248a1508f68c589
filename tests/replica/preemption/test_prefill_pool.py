"""Preemption on a prefill replica: prompts that stop in the middle of layers, and whose KV another
engine fetches. That one, in a process of its own, is stock vLLM with Sluice's connector, so what it
computes and gives away itself says what the KV and the text must be."""

import hashlib
import random
from functools import partial

import pytest

from sluice.replica.config import TransferConfig
from sluice.replica.transfer import Handle
from sluice.replica.vllm.setup import transfer_argument
from tests.replica.attentive import attentive_model
from tests.replica.engines import EngineProcess
from tests.replica.in_process import InProcess
from tests.replica.preemption.trials import CheckedEngine, nested_work, run_nested

pytestmark = [pytest.mark.vllm, pytest.mark.release]

BLOCK = 32
WHOLE = 1024
CHUNK = 128
OUTPUT = 12
TRANSFER = TransferConfig(connector="tcp")


class PrefillEngine(CheckedEngine):
    """Gives the KV of every prompt with one token of output away: its ``offers`` by request.
    ``given``: what other requests state of their prompt's KV."""

    def __init__(self, model, directory):
        from vllm.config import KVTransferConfig

        super().__init__(
            model,
            directory,
            dtype="float32",
            num_gpu_blocks_override=96,
            kv_transfer_config=KVTransferConfig(**transfer_argument(TRANSFER, "prefill")),
        )
        self.offers = {}
        self.given = {}
        step = self._llm.llm_engine.step

        def stepped():
            items = step()
            self.offers |= {
                each.request_id: each.kv_transfer_params for each in items if each.finished
            }
            return items

        self._llm.llm_engine.step = stepped

    def extra_args(self, work, arrived_s):
        params = {"do_remote_decode": True} if work.output == 1 else self.given.get(work.name)
        return super().extra_args(work, arrived_s) | {"kv_transfer_params": params}


class StockDecode(InProcess):
    """Stock vLLM that fetches KV from other engines, and from itself."""

    def __init__(self, model, directory):
        from vllm.config import KVTransferConfig

        from sluice.replica.vllm import kv_connector

        argument = KVTransferConfig(**transfer_argument(TRANSFER, "decode"))
        super().__init__(
            model, directory, max_num_batched_tokens=WHOLE, kv_transfer_config=argument
        )
        manager = self.scheduler.kv_cache_manager
        self.scheduler.connector.read_blocks_by(manager.get_block_ids)
        self._fetched = []
        fetch = kv_connector.fetch

        def fetched(*args):
            layers = fetch(*args)
            self._fetched.append(hashlib.sha256(b"".join(layers)).hexdigest())
            return layers

        kv_connector.fetch = fetched

    def stock(self, prompt, output, chunk):
        """The tokens that follow a prompt, and the digest of its KV."""
        self.scheduler.max_num_scheduled_tokens = chunk
        tokens, _ = self.tokens(prompt, output, None)
        self.llm.llm_engine.reset_prefix_cache()
        (given,) = self.run([(prompt, 1, None)], [{"do_remote_decode": True}])
        again, digests = self.tokens(prompt, output, given.kv_transfer_params)
        assert again == tokens
        (digest,) = digests
        return tokens, digest

    def tokens(self, prompt, output, offer):
        """The tokens that follow a prompt, with the KV of an offer, and what it fetched for it."""
        self.llm.llm_engine.reset_prefix_cache()
        self._fetched.clear()
        (given,) = self.run([(prompt, output, None)], [offer])
        return tuple(given.outputs[0].token_ids), tuple(self._fetched)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return attentive_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def decode(model, tmp_path_factory):
    process = EngineProcess(partial(StockDecode, model, tmp_path_factory.mktemp("decode")))
    yield process
    process.close()


@pytest.fixture(scope="module")
def prefill(decode, model, tmp_path_factory):
    engine = PrefillEngine(model, tmp_path_factory.mktemp("prefill"))
    yield engine
    engine.close()


@pytest.fixture
def connector(prefill):
    """The worker's."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()


@pytest.fixture(autouse=True)
def nothing_left(prefill, connector):
    """After every test all KV blocks are free, nothing is in flight, and no transfer is pending."""
    prefill.reset()
    yield
    prefill.check_idle()
    side = prefill.scheduler.connector._scheduler
    assert not (side._offers or side._prefills or side._wanted)
    assert not (side._next.loads or side._next.saves)
    assert not connector.has_connector_metadata()
    assert len(connector._worker._kept) == 0


def works(seed, nested, shared=0):
    """As of the benchmark, with prompts that fill their blocks: what is in the rest of a block says
    nothing."""
    made = nested_work(random.Random(seed), nested, shared, output=1)
    return [work._replace(prompt=work.prompt[: len(work.prompt) // BLOCK * BLOCK]) for work in made]


def check_transferred(prefill, decode, work, chunk=WHOLE):
    """The other engine fetches the KV that stock vLLM computes, and continues its text."""
    tokens, digest = decode.call(StockDecode.stock, work.prompt, OUTPUT, chunk)
    offer = prefill.offers.pop(work.name)
    assert decode.call(StockDecode.tokens, work.prompt, OUTPUT, offer) == (tokens, (digest,))
    return tokens


@pytest.mark.parametrize(
    ("nested", "chunk", "shared"), [(3, WHOLE, 0), (2, CHUNK, 0), (2, WHOLE, 96)]
)
def test_kv_and_text_are_those_of_stock_vllm(prefill, decode, nested, chunk, shared):
    """Each prompt stops the one before it, at a random check. The most urgent one is answered here,
    so that its decode steps run inside the suspended prompts, too."""
    checks = prefill.use(chunk_tokens=chunk)
    *made, last = works(f"{chunk} {shared}", nested, shared)
    last = last._replace(output=3)
    before = prefill.stops
    results = run_nested(prefill, [*made, last], random.Random(nested), checks)
    assert prefill.stops == before + nested
    texts = {check_transferred(prefill, decode, work, chunk) for work in made}
    assert len(texts) == nested  # no text fits all prompts
    expected, _ = decode.call(StockDecode.tokens, last.prompt, 3, None)
    assert results[last.name].tokens == expected


@pytest.mark.parametrize("seed", range(4))
def test_a_discarded_prompt_saves_nothing(prefill, decode, connector, seed):
    """``w0`` is suspended by ``w1`` in the middle of a layer, and then aborted."""
    checks = prefill.use()
    stopped, urgent = works(seed, 1)
    at = random.Random(seed).randrange(1, checks)
    prefill.at_checks(
        {at: lambda: prefill.add(urgent), at + 2: lambda: prefill.abort([stopped.name])},
        waits={at},
    )
    prefill.add(stopped)
    assert set(prefill.run()) == {urgent.name}
    assert len(connector._worker._kept) == 1
    check_transferred(prefill, decode, urgent)


def test_a_prompt_that_fails_saves_nothing_and_the_suspended_one_does(prefill, decode, connector):
    checks = prefill.use()
    stopped, urgent = works(7, 1)
    at = checks // 2 + 1
    prefill.at_checks({at: lambda: prefill.add(urgent)})
    prefill.fail_at(at + 3)
    prefill.add(stopped)
    results = prefill.run()
    assert results[urgent.name].reason == "error"
    assert prefill.offers.pop(urgent.name) is None
    assert len(connector._worker._kept) == 1
    check_transferred(prefill, decode, stopped)


def test_a_suspended_step_gets_its_own_transfers_back(connector):
    from sluice.replica.vllm.kv_connector import Save, StepTransfers

    outer, inner = (StepTransfers(saves=[Save(Handle.new(), [block])]) for block in (1, 2))
    kept = connector._worker._kept
    connector.bind_connector_metadata(outer)
    with pytest.raises(ArithmeticError), connector.step_suspended():
        assert not connector.has_connector_metadata()
        connector.bind_connector_metadata(inner)
        connector.wait_for_save()
        raise ArithmeticError("the inner step leaves its own bound")
    connector.wait_for_save()
    connector.clear_connector_metadata()
    for step in (inner, outer):
        kept.sent(kept.take(step.saves[0].handle))


def test_it_fetches_no_kv_itself(prefill, decode):
    """A request with an offer can come where no decode replica is left."""
    (work,) = works(8, 0)
    prefill.add(work)
    prefill.run()
    offer = prefill.offers[work.name]
    prefill.reset()
    again = work._replace(name="again", output=OUTPUT)
    prefill.given[again.name] = offer
    prefill.add(again)
    result = prefill.run()[again.name]
    tokens, _ = decode.call(StockDecode.tokens, work.prompt, OUTPUT, offer)
    assert result.tokens == tokens
