"""Memory for suspended prefills: what they hold is found, and is taken from the KV cache."""

import re
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.replica.preemption.reserve import (
    Need,
    NoMemoryError,
    Reserve,
    held_bytes,
    keep,
)
from sluice.replica.preemption.worker import share_workspace
from sluice.replica.scheduler.xargs import SchedulerSettings
from sluice.scheduling.preemption import TaskBounds

pytestmark = pytest.mark.vllm

MIB = 1 << 20
TOKENS, WIDTH, INTERMEDIATE = 10, 8, 40


def model_of(keeps):
    """Two layers: multilayer perceptrons that keep their first product beside the second, or do
    not."""
    import torch
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    class Operator(torch.nn.Linear, AttentionLayerBase):
        """Anything that gets a check."""

        get_attn_backend = get_kv_cache_spec = None

    Operator.__abstractmethods__ = frozenset()

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up = Operator(WIDTH, INTERMEDIATE, bias=False)
            self.down = Operator(INTERMEDIATE, WIDTH, bias=False)

        def forward(self, x):
            y = self.up(x)
            return self.down(y * 2 if keeps else y.mul_(2).view(TOKENS, INTERMEDIATE))

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList([Layer(), Layer()])

        def forward(self, x):
            for layer in self.layers:
                x = x + layer(x)
            return x

    return Model()


def held(keeps=False):
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import set_forward_context

    model = model_of(keeps)

    def forward():
        with set_forward_context(None, VllmConfig()):
            model(torch.zeros(TOKENS, WIDTH))

    found = held_bytes(model, torch.device("cpu"), forward)
    assert all("forward" not in vars(module) for module in model.modules()), "a check was left"
    return found


class TestWhatAPrefillHolds:
    """Four bytes for each element. Weights were there before, and views take nothing."""

    def test_is_the_most_at_any_check(self):
        # Before the second layer's down projection: its input, and its intermediate product. The
        # first layer's input is still referred to by the caller.
        assert held() == 4 * TOKENS * (2 * WIDTH + INTERMEDIATE)

    def test_contains_what_a_model_only_keeps(self):
        assert held(keeps=True) == 4 * TOKENS * (2 * WIDTH + 2 * INTERMEDIATE)


needs = st.builds(
    Need,
    token=st.integers(0, 1 << 20).map(float),
    runner=st.integers(0, 1 << 30),
    free=st.integers(0, 1 << 37),
)
all_bounds = st.builds(TaskBounds, depth=st.integers(1, 64), chunk_tokens=st.integers(512, 1 << 20))


@given(st.lists(needs, min_size=1, max_size=4), all_bounds, st.integers(16, 1 << 16))
def test_every_worker_has_room_for_the_largest_batch_at_every_depth(workers, bounds, most):
    reserve = Reserve.of(workers, bounds, most)
    tokens = min(most, bounds.chunk_tokens)
    for need in workers:
        assert reserve.prefill >= int(need.token * tokens)
        assert reserve.total >= bounds.depth * int(need.token * tokens) + need.runner


@given(st.integers(0, 1 << 37), st.integers(0, 1 << 37), st.integers(0, 1 << 37), st.booleans())
def test_cache_and_reserve_fit_together_or_it_is_said(available, reserved, free, stated):
    reserve = Reserve(prefills=1, tokens=1, prefill=reserved, runner=0)
    try:
        left = reserve.left(available, free, stated)
    except NoMemoryError:
        assert available + reserved > free if stated else available <= reserved
    else:
        assert left == available if stated else 0 < left == available - reserved
        assert not stated or left + reserved <= free


class Executor:
    """An executor of several workers whose needs are known."""

    def __init__(self, stated=None, chunk_tokens=1024):
        settings = SchedulerSettings(
            state_table="/nowhere",
            policy="s_edf",
            preemption=TaskBounds(depth=2, chunk_tokens=chunk_tokens),
        )
        self.vllm_config = SimpleNamespace(
            additional_config=settings.to_additional_config(),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=2048),
            cache_config=SimpleNamespace(kv_cache_memory_bytes=stated),
        )

    def collective_rpc(self, method):
        return [Need(8192.0, 2 * MIB, 200 * MIB), Need(4096.0, 4 * MIB, 100 * MIB)]


class TestKeep:
    """Two prefills of 4096 tokens, at most 2048 of them in a batch: 16 MiB each; three runners."""

    def test_takes_it_from_what_vllm_would_take(self):
        executor = Executor(chunk_tokens=4096)
        assert keep(executor, [100 * MIB, 90 * MIB]) == [56 * MIB, 46 * MIB]
        assert executor.reserve == Reserve(2, 2048, 16 * MIB, 4 * MIB)

    def test_keeps_a_stated_size_that_fits(self):
        assert keep(Executor(stated=56 * MIB), [56 * MIB] * 2) == [56 * MIB] * 2

    def test_refuses_a_stated_size_that_does_not(self):
        with pytest.raises(NoMemoryError, match=r"kv-cache-memory-bytes is 57\.0 MiB.*only 100\.0"):
            keep(Executor(stated=57 * MIB, chunk_tokens=4096), [57 * MIB] * 2)

    def test_refuses_to_leave_nothing(self):
        reason = (
            "preemption needs 44.0 MiB for 2 suspended prefills of 2048 tokens (16.0 MiB each) and "
            "3 model runners (4.0 MiB each), but vLLM has only 44.0 MiB beside the model: lower "
            "max-num-batched-tokens"
        )
        with pytest.raises(NoMemoryError, match=re.escape(reason)):
            keep(Executor(chunk_tokens=4096), [100 * MIB, 44 * MIB])


class Builder:
    """What vLLM's builders of FlashInfer's metadata have of a workspace: it is made when asked."""

    def __init__(self):
        self.workspace = None

    def _get_workspace_buffer(self):
        self.workspace = self.workspace or object()
        return self.workspace

    def set_workspace_buffer(self, workspace):
        self.workspace = workspace


def runner_of(*builders):
    group = SimpleNamespace(metadata_builders=list(builders))
    return SimpleNamespace(attn_groups=[[group], []])


def test_a_lane_takes_the_workspace_that_there_is():
    """And vLLM's own runner keeps its own, which its graphs know."""
    stock, first, second = Builder(), Builder(), Builder()
    kept = stock._get_workspace_buffer()
    for lane in (runner_of(first, second), runner_of(object())):
        share_workspace(runner_of(object(), stock), lane)
    assert stock.workspace is first.workspace is second.workspace is kept


def test_attention_without_a_workspace_needs_none():
    lane = Builder()
    share_workspace(runner_of(object()), runner_of(lane))
    assert lane.workspace is None
