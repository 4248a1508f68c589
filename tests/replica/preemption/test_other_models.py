"""Prefills of models with experts, of compiled ones and of ones with LoRA adapters stop at random
places, too."""

import random

import pytest

from sluice.replica.vllm.local_model import local_model
from tests.lora_adapter import write_adapter
from tests.replica.preemption.trials import CheckedEngine, check_trials, nested_work

pytestmark = [pytest.mark.vllm, pytest.mark.release]

TRIALS = 12


@pytest.fixture
def engine_of(tmp_path):
    """Makes an engine; at the end it is closed."""
    made = []

    def make(model, **args):
        made.append(CheckedEngine(model, tmp_path, num_gpu_blocks_override=64, **args))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def test_experts_have_checks_at_their_gate_and_before_they_compute(
    engine_of, tmp_path, monkeypatch
):
    # vLLM 0.27 refuses experts in float32 where the processor has AMX, which is for bfloat16.
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: False)
    engine = engine_of(local_model(tmp_path, layers=2, hidden=128, experts=4), dtype="float32")
    model = engine.executor.driver_worker.worker.model_runner.get_model()
    names = {module: name for name, module in model.named_modules()}
    checked = {names[module] for module, _ in engine._checks._wrapped}
    parts = ("qkv_proj", "o_proj", "attn", "gate", "routed_experts")
    assert {name.rpartition(".")[2] for name in checked} == set(parts)
    assert len(checked) == len(parts) * 2
    check_trials(engine, TRIALS, seed=2)


def test_compiled_code_runs_what_has_no_checks(engine_of, tmp_path):
    """Tasks with checks run beside it, as the model is written. So it never depends on what else is
    there which of the two a prompt gets, and with it the last bits of its probabilities."""
    engine = engine_of(
        local_model(tmp_path, layers=1, hidden=64), enforce_eager=False, dtype="float32"
    )
    model = engine.executor.driver_worker.worker.model_runner.get_model().model
    assert not model.do_not_compile
    eager = []
    forward = model.forward
    model.forward = lambda *args, **kwargs: eager.append(True) or forward(*args, **kwargs)
    check_trials(engine, TRIALS, seed=3)
    # Every prefill runs twice, alone and among others; decodes of all of them are compiled.
    assert len(eager) >= 2 * TRIALS


def test_a_suspended_prefill_has_its_own_lora_adapter_when_it_resumes(engine_of, tmp_path):
    """Prefills with one adapter, another one or none are nested in each other, and decodes with and
    without them share batches."""
    model = local_model(tmp_path, layers=2, hidden=128)
    engine = engine_of(
        model,
        dtype="float32",
        worker_cls="sluice.replica.vllm.cpu_worker.PatchedCpuWorker",
        enable_lora=True,
        max_loras=2,
        max_lora_rank=8,
    )
    from vllm.lora.request import LoRARequest

    first, second = (
        LoRARequest(f"a{seed}", seed, str(write_adapter(tmp_path / f"a{seed}", model, seed=seed)))
        for seed in (1, 2)
    )
    work = nested_work(random.Random(4), 1)[0]
    texts = {engine.alone(work).tokens}
    for adapter in (first, second):
        engine.adapters = {work.name: adapter}
        texts.add(engine.alone(work).tokens)
    assert len(texts) == 3
    engine.adapters = {"w0": first, "w1": second, "w3": first}
    assert engine.use() == 5 * 2
    check_trials(engine, TRIALS, seed=4)
