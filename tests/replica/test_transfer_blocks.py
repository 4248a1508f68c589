"""Blocks of KV caches as bytes, and what is set and refused before an engine starts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples

pytestmark = pytest.mark.vllm

SHAPES: dict[str, tuple[int | None, ...]] = {
    "keys and values first": (2, None, 4, 3, 8),
    "blocks first": (None, 2, 4, 3, 8),
    "blocks in the middle": (2, 3, None, 4),
    "blocks as many as something else": (None, 2, 8, 8),
}
"""``None`` stands for the number of blocks."""


def caches(shape: tuple[int | None, ...], blocks: int, dtype: Any, seed: int) -> dict[str, Any]:
    import torch

    size = [blocks if each is None else each for each in shape]
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randint(0, 100, size, generator=generator).to(dtype) for name in ("b", "a")}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@settings(max_examples=examples(15), deadline=None)
@given(st.data())
def test_blocks_arrive_as_they_were_and_touch_no_other(
    shape: tuple[int | None, ...], data: Any
) -> None:
    import torch

    from sluice.replica.vllm.kv_connector import BlockLayers

    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.uint8]))
    here, there = data.draw(st.integers(5, 12)), data.draw(st.integers(5, 12))
    count = data.draw(st.integers(1, 5))
    ids_here = data.draw(st.permutations(range(here)))[:count]
    ids_there = data.draw(st.permutations(range(there)))[:count]
    source, target = caches(shape, here, dtype, 1), caches(shape, there, dtype, 2)
    before = {name: cache.clone() for name, cache in target.items()}
    sender, receiver = BlockLayers(source, here), BlockLayers(target, there)
    sent = sender.read(ids_here)
    assert [each.nbytes for each in sent] == [count * size for size in receiver.block_bytes]
    receiver.write(ids_there, [bytearray(each) for each in sent])
    dim = shape.index(None)
    for name, cache in target.items():
        expected = before[name]
        for at_here, at_there in zip(ids_here, ids_there, strict=True):
            expected.select(dim, at_there).copy_(source[name].select(dim, at_here))
        assert torch.equal(cache, expected)
    assert sender.digest({"model": "m"}) == receiver.digest({"model": "m"})
    assert sender.digest({"model": "m"}) != receiver.digest({"model": "n"})


def test_layers_that_share_a_cache_are_moved_once_and_each_has_a_dimension_of_blocks() -> None:
    import torch

    from sluice.replica.vllm.kv_connector import BlockLayers, UnsupportedLayoutError

    cache = torch.zeros(7, 4)
    assert len(BlockLayers({"a": cache, "b": cache}, 7).block_bytes) == 1
    for size, what in (((3, 4), "no"), ((7, 7), "more than one")):
        wrong = f"layer a has the shape .* {what} dimension"
        with pytest.raises(UnsupportedLayoutError, match=wrong):
            BlockLayers({"a": torch.zeros(size)}, 7)


@pytest.mark.parametrize(
    ("own", "reason"),
    [
        ({"use_mla": True}, "multi-head latent attention"),
        ({"is_hybrid": True}, "layers other than attention"),
        ({"is_encoder_decoder": True}, "an encoder-decoder model"),
        ({"runner_type": "pooling"}, "generates no text"),
    ],
)
def test_models_whose_kv_cannot_be_moved_are_refused(own: dict[str, Any], reason: str) -> None:
    from sluice.replica.vllm.kv_connector import UnsupportedLayoutError, check_model

    names = ("use_mla", "is_hybrid", "is_attention_free", "is_encoder_decoder")
    plain = {"runner_type": "generate", **dict.fromkeys(names, False)}
    transfer = SimpleNamespace(kv_connector="TcpConnector")
    config = SimpleNamespace(
        model_config=SimpleNamespace(**(plain | own)), kv_transfer_config=transfer
    )
    with pytest.raises(UnsupportedLayoutError, match=reason):
        check_model(config)
    transfer.kv_connector = "OffloadingConnector"
    check_model(config)
    config.kv_transfer_config = None
    check_model(config)


def test_a_cache_of_several_groups_or_kinds_is_refused() -> None:
    from sluice.replica.vllm.kv_connector import UnsupportedLayoutError, check_kv_cache

    class SlidingWindowSpec:
        """By its name, as vLLM has one."""

    def config(*specs: object) -> SimpleNamespace:
        groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs]
        return SimpleNamespace(kv_cache_groups=groups)

    with pytest.raises(UnsupportedLayoutError, match="2 groups"):
        check_kv_cache(config(object(), object()))
    with pytest.raises(UnsupportedLayoutError, match="not SlidingWindowSpec"):
        check_kv_cache(config(SlidingWindowSpec()))
