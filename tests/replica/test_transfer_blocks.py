"""Blocks of KV caches as bytes, and what is set and refused before an engine starts."""

from __future__ import annotations

import importlib.util
import os
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.replica.config import TransferConfig
from sluice.replica.scheduler.xargs import SchedulerSettings
from sluice.replica.vllm.setup import parse_arguments, transfer_argument
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


def test_layers_that_share_a_cache_are_moved_once() -> None:
    import torch

    from sluice.replica.vllm.kv_connector import BlockLayers

    cache = torch.zeros(7, 4)
    assert len(BlockLayers({"a": cache, "b": cache}, 7).block_bytes) == 1


@pytest.mark.parametrize(("size", "what"), [((3, 4), "no"), ((7, 7), "more than one")])
def test_a_cache_without_a_dimension_of_blocks_is_refused(size: Any, what: str) -> None:
    import torch

    from sluice.replica.vllm.kv_connector import BlockLayers, UnsupportedLayoutError

    with pytest.raises(UnsupportedLayoutError, match=f"layer a has the shape .* {what} dimension"):
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

    plain = {
        "runner_type": "generate",
        "use_mla": False,
        "is_hybrid": False,
        "is_attention_free": False,
        "is_encoder_decoder": False,
    }
    config = SimpleNamespace(
        model_config=SimpleNamespace(**(plain | own)),
        kv_transfer_config=SimpleNamespace(kv_connector="TcpConnector"),
    )
    with pytest.raises(UnsupportedLayoutError, match=reason):
        check_model(config)
    # Without a hand-over, or with somebody else's, it is not Sluice's affair.
    for transfer in (None, SimpleNamespace(kv_connector="OffloadingConnector")):
        check_model(SimpleNamespace(model_config=config.model_config, kv_transfer_config=transfer))


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


def test_the_argument_is_set_and_not_given(tmp_path: Any) -> None:
    settings = SchedulerSettings(state_table=tmp_path / "state", policy="fcfs")
    transfer = TransferConfig(connector="tcp", timeout_s=7.0)
    parsed = parse_arguments({}, "m", "m", settings, transfer=transfer)
    config = parsed.kv_transfer_config
    assert (config.kv_role, config.kv_load_failure_policy) == ("kv_both", "recompute")
    assert config.kv_connector_extra_config["sluice"]["timeout_s"] == 7.0
    given = {"kv_transfer_config": {"kv_connector": "X", "kv_role": "kv_both"}}
    # Without Sluice's hand-over an operator may use a connector for other ends.
    assert parse_arguments(given, "m", "m", settings).kv_transfer_config.kv_connector == "X"


def _find_lmcache(monkeypatch: pytest.MonkeyPatch, found: object) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: found if name == "lmcache" else find(name)
    )


@pytest.mark.parametrize(
    ("given", "on_cpu", "reason"),
    [
        ({"kv-offloading-size": 8}, True, "OffloadingConnector copies KV between a GPU and"),
        (
            {"kv_transfer_config": '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}'},
            *(True, "this is vLLM's CPU build"),
        ),
        (
            {"kv-offloading-size": 8, "kv-offloading-backend": "lmcache"},
            *(False, "LMCacheMPConnector needs the package lmcache"),
        ),
        (
            {"kv-transfer-config": {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}},
            *(False, "LMCacheConnectorV1 needs the package lmcache"),
        ),
        (
            {"kv-transfer-config": {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}},
            *(True, "LMCacheConnectorV1 copies KV between a GPU and LMCache"),
        ),
        (
            {"kv-offloading-size": 8, "kv-offloading-backend": "lmcache"},
            *(True, "LMCacheMPConnector needs the package lmcache"),
        ),
    ],
)
def test_kv_in_other_memory_is_refused_where_vllms_connector_cannot_run(
    given: dict[str, Any], on_cpu: bool, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr("sluice.replica.vllm.setup.on_cpu", lambda: on_cpu)
    _find_lmcache(monkeypatch, None)
    settings = SchedulerSettings(state_table=tmp_path / "state", policy="fcfs")
    with pytest.raises(ValueError, match=reason):
        parse_arguments(given, "m", "m", settings)


def test_lmcache_with_a_server_of_its_own_is_taken_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr("sluice.replica.vllm.setup.on_cpu", lambda: True)
    _find_lmcache(monkeypatch, object())
    settings = SchedulerSettings(state_table=tmp_path / "state", policy="fcfs")
    given = {"kv-transfer-config": {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both"}}
    parsed = parse_arguments(given, "m", "m", settings)
    assert parsed.kv_transfer_config.kv_connector == "LMCacheMPConnector"


@pytest.mark.parametrize(
    "given",
    [
        {"kv-offloading-size": 8},
        {"kv-offloading-size": 8, "kv-offloading-backend": "lmcache"},
        {"kv-transfer-config": {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}},
    ],
)
def test_kv_in_other_memory_and_kv_transfer_are_not_for_one_engine(
    given: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr("sluice.replica.vllm.setup.on_cpu", lambda: False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    settings = SchedulerSettings(state_table=tmp_path / "state", policy="fcfs")
    parsed = parse_arguments(given, "m", "m", settings)
    assert parsed.kv_offloading_size == 8 or parsed.kv_transfer_config.kv_role == "kv_both"


def test_nixl_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="its package is not installed"):
        transfer_argument(TransferConfig(connector="nixl"))
    assert transfer_argument(TransferConfig())["kv_connector"] == "TcpConnector"


def test_a_prefill_engine_only_sends() -> None:
    roles = {"prefill": "kv_producer", "decode": "kv_both", "mixed": "kv_both"}
    for role, expected in roles.items():
        assert transfer_argument(TransferConfig(connector="tcp"), role)["kv_role"] == expected  # type: ignore[arg-type]


def test_nixl_is_taken_where_it_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr("sluice.replica.vllm.setup.on_cpu", lambda: False)
    monkeypatch.delenv("VLLM_NIXL_SIDE_CHANNEL_HOST", raising=False)
    monkeypatch.delenv("VLLM_NIXL_SIDE_CHANNEL_PORT", raising=False)
    for connector, expected in (("auto", "NixlConnector"), ("tcp", "TcpConnector")):
        argument = transfer_argument(TransferConfig(connector=connector, host="10.0.0.1"))
        assert argument["kv_connector"] == expected
        assert argument["kv_load_failure_policy"] == "recompute"
    assert os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "10.0.0.1"
    assert int(os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"]) > 0
