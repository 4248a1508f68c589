"""Prefills of models with experts, and of compiled ones, stop at random places, too."""

import pytest

from sluice.replica.vllm.local_model import local_model
from tests.replica.preemption.engine import CheckedEngine
from tests.replica.preemption.trials import random_trials

pytestmark = pytest.mark.vllm

OPTIONS = {"granularity": "operator", "depth": 3, "least_tokens": 1}
TRIALS = 12


@pytest.fixture
def engine_of(tmp_path):
    """Makes an engine; at the end it is closed."""
    made = []

    def make(model, **args):
        made.append(CheckedEngine(model, tmp_path, OPTIONS, num_gpu_blocks_override=64, **args))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def test_experts_have_checks_at_their_gate_and_before_they_compute(engine_of, tmp_path):
    engine = engine_of(local_model(tmp_path, layers=2, hidden=128, experts=4), dtype="float32")
    model = engine.executor.driver_worker.worker.model_runner.get_model()
    names = {module: name for name, module in model.named_modules()}
    checked = {names[module] for module, _ in engine._checks._wrapped}
    parts = ("qkv_proj", "o_proj", "attn", "gate", "routed_experts")
    assert {name.rpartition(".")[2] for name in checked} == set(parts)
    assert len(checked) == len(parts) * 2
    found = random_trials(engine, TRIALS, seed=2)
    assert found["same"] == TRIALS
    assert found["stops"] >= TRIALS


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
    found = random_trials(engine, TRIALS, seed=3)
    assert found["same"] == TRIALS
    assert found["stops"] >= TRIALS
    # Every prefill runs twice, alone and among others; decodes of all of them are compiled.
    assert len(eager) >= 2 * TRIALS
