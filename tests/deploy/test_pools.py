"""Pools of replicas in the configuration."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from sluice.deploy.config import parse_config
from sluice.deploy.local import StartError, running
from sluice.deploy.ray_start import free_port
from sluice.replica.config import TransferConfig

PAIR: dict[str, Any] = {"prefill": {}, "decode": {}}
TCP = {"connector": "tcp"}
PREEMPTIVE_POOL = {"preemption": True}
PREEMPTIVE = {"transfer": TCP, **PREEMPTIVE_POOL}


def with_pools(engine: dict[str, Any] | None = None, **pools: Any) -> dict[str, Any]:
    return {"engine": {"kind": "simulated", **(engine or {})}, "replica": {"pools": pools}}


def test_without_pools_there_is_one_of_mixed_replicas() -> None:
    config = parse_config({"replica": {"count": 3}})
    ((pool,),) = [fleet.pools for fleet in config.fleets]
    assert (pool.role, pool.engine, pool.replica) == ("mixed", config.engine, config.replica)


def test_roles_and_replicas_from_zero_have_one_cell() -> None:
    pools, cells = {"prefill": {}, "decode": {}}, {"controller": {"cells": 2}}
    with pytest.raises(ValueError, match=r"controller\.cells must be 1 with replica\.elastic"):
        parse_config(with_pools({"transfer": TCP}, **pools) | cells)
    with pytest.raises(ValueError, match=r"controller\.cells must be 1 with replica\.elastic"):
        parse_config({"replica": {"elastic": True}} | cells)
    with pytest.raises(ValueError, match=r"controller\.cells must be 1 with min_replicas: 0"):
        parse_config({"replica": {"autoscaling": {"min_replicas": 0, "max_replicas": 2}}} | cells)
    assert parse_config(with_pools(mixed={}) | cells).controller.cells == 2


def test_elastic_replicas_are_one_pool_whose_engines_send_and_receive_kv() -> None:
    elastic = {"elastic": True, "count": 3}
    ((pool,),) = [fleet.pools for fleet in parse_config({"replica": elastic}).fleets]
    assert (pool.role, pool.replica.count, pool.engine.transfer) == ("mixed", 3, TransferConfig())
    own = {"engine": {"transfer": TCP}, "replica": elastic}
    assert parse_config(own).fleets[0].pools[0].engine.transfer == TransferConfig(connector="tcp")
    with pytest.raises(
        ValueError, match="elastic and pools exclude each other: replicas of a pool"
    ):
        parse_config({"replica": {"elastic": True, "pools": PAIR}})
    with pytest.raises(ValueError, match=r"engine.preemption: .*may receive KV"):
        parse_config({"engine": PREEMPTIVE, "replica": elastic})


def test_a_pool_takes_what_it_leaves_out_from_the_sections() -> None:
    data = with_pools(
        {
            "policy": "sarathi",
            "simulated": {"block_tokens": 32},
            "vllm_args": {"dtype": "float32"},
        },
        prefill={
            "count": 2,
            "num_gpus": 1,
            "engine": {"policy": "edf", "vllm_args": {"max_num_batched_tokens": 4096}},
        },
        decode={"autoscaling": {"max_replicas": 5}, "node_labels": {"sluice/role": "decode"}},
        mixed={"engine": {"simulated": {"step_s": 0.01}}},
    )
    data["replica"] |= {"num_cpus": 2, "drain_timeout_s": 7}
    mixed, prefill, decode = parse_config(data).fleets[0].pools
    assert [pool.role for pool in (mixed, prefill, decode)] == ["mixed", "prefill", "decode"]
    assert [pool.engine.policy for pool in (mixed, prefill, decode)] == [
        "sarathi",
        "edf",
        "sarathi",
    ]
    assert prefill.engine.vllm_args == {"dtype": "float32", "max-num-batched-tokens": 4096}
    assert (mixed.engine.simulated.step_s, mixed.engine.simulated.block_tokens) == (0.01, 32)
    assert (prefill.replica.count, prefill.replica.num_gpus, prefill.replica.num_cpus) == (2, 1, 2)
    assert (decode.replica.first, decode.replica.most) == (1, 5)
    assert decode.replica.node_labels == {"sluice/role": "decode"}
    assert {pool.replica.drain_timeout_s for pool in (mixed, prefill, decode)} == {7}
    assert not any(pool.replica.pools for pool in (mixed, prefill, decode))


def test_pools_of_one_role_are_beside_one_another() -> None:
    data = with_pools(
        {"vllm_args": {"dtype": "bfloat16"}},
        decode={},
        old={"role": "prefill", "count": 3},
        prefill={},
        mixed={},
    )
    pools = parse_config(data).fleets[0].pools
    assert [(pool.name, pool.role) for pool in pools] == [
        ("mixed", "mixed"),
        ("old", "prefill"),
        ("prefill", "prefill"),
        ("decode", "decode"),
    ]
    assert pools[1].replica.count == 3
    # Where no KV passes from one to another, it may be of several kinds.
    half = {"engine": {"vllm_args": {"dtype": "half"}, "simulated": {"block_tokens": 8}}}
    a, b = parse_config(with_pools(mixed={}, old={"role": "mixed", **half})).fleets[0].pools
    assert (a.engine.vllm_args, b.engine.vllm_args) == ({}, {"dtype": "half"})


def test_engines_hand_over_kv_where_there_are_pools_for_it() -> None:
    (mixed,) = parse_config(with_pools(mixed={})).fleets[0].pools
    assert mixed.engine.transfer is None
    for pool in parse_config(with_pools(mixed={}, **PAIR)).fleets[0].pools:
        assert pool.engine.transfer == TransferConfig()
    chosen = parse_config(with_pools({"transfer": {"connector": "tcp"}}, **PAIR)).fleets[0].pools
    assert {pool.engine.transfer.connector for pool in chosen if pool.engine.transfer} == {"tcp"}


def test_prefills_can_be_preempted_in_the_pool_that_only_sends_kv() -> None:
    data: dict[str, Any] = {
        "engine": {"transfer": TCP},
        "replica": {"pools": {"prefill": {"engine": PREEMPTIVE_POOL}, "decode": {}}},
    }
    prefill, decode = parse_config(data).fleets[0].pools
    preempt = [each.engine.preemption for each in (prefill, decode)]
    assert preempt == [True, False]


def test_options_of_another_policy_do_not_reach_a_pool() -> None:
    chosen = {"policy": "slidebatching", "policy_options": {"gamma": 1.0}}
    prefill, decode = (
        parse_config(with_pools(chosen, prefill={"engine": {"policy": "edf"}}, decode={}))
        .fleets[0]
        .pools
    )
    assert (prefill.engine.policy, prefill.engine.policy_options) == ("edf", {})
    assert decode.engine.policy_options == {"gamma": 1.0}


def test_a_model_says_its_number_of_replicas_in_its_own_way() -> None:
    numbered = {"replica": {"count": 4}, "models": {"a": {"replica": {"pools": PAIR}}, "b": None}}
    a, b = parse_config(numbered).fleets
    assert [pool.role for pool in a.pools] == ["prefill", "decode"]
    assert [(pool.role, pool.replica.count) for pool in b.pools] == [("mixed", 4)]
    pooled = {"replica": {"pools": PAIR}, "models": {"a": {"replica": {"count": 4}}, "b": None}}
    a, b = parse_config(pooled).fleets
    assert [(pool.role, pool.replica.count) for pool in a.pools] == [("mixed", 4)]
    assert [pool.role for pool in b.pools] == ["prefill", "decode"]


def test_what_is_printed_is_read_as_the_same() -> None:
    for data in (
        with_pools(**PAIR),
        with_pools(mixed={"count": 3}, **PAIR),
        with_pools(mixed={"count": 3}, slow={"role": "mixed", "count": 2}),
        {"models": {"a": {"replica": {"pools": PAIR}}}},
    ):
        config = parse_config(data)
        assert parse_config(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (with_pools(prefill={}), "replica: .*prefill and decode are required together"),
        (with_pools(decode={}, mixed={}), "replica: .*prefill and decode are required together"),
        (with_pools(encode={}), "pools.encode: role must be .*'mixed', 'prefill' or 'decode'"),
        (with_pools(mixed={"role": "decode"}), "pools.mixed: role is 'decode': .*another name"),
        (with_pools(fast={"role": "quick"}), "replica.pools.fast.role"),
        (with_pools(**{"a-b": {"role": "mixed"}}), "replica.pools.a-b"),
        (
            with_pools(fast={"role": "decode"}),
            "replica: .*prefill and decode are required together",
        ),
        (
            with_pools(mixed={"autoscaling": {"max_replicas": 2}}, fast={"role": "mixed"}),
            "pools.mixed.autoscaling: another pool has the same role",
        ),
        (
            with_pools(
                mixed={}, fast={"role": "mixed", "engine": {"vllm_args": {"max-model-len": 9}}}
            ),
            "replica.pools.fast.engine.vllm_args.max-model-len: .*it is 9, and not set in mixed",
        ),
        (
            with_pools(**PAIR, fast={"role": "decode", "engine": {"vllm_args": {"dtype": "half"}}}),
            "replica.pools.fast.engine.vllm_args.dtype: .*it is 'half', and not set in prefill",
        ),
        (with_pools(mixed={"cuont": 2}), "replica.pools.mixed.cuont"),
        (with_pools(mixed={"count": 0}), "replica.pools.mixed.count"),
        (with_pools(mixed={"node_labels": {"a b": "c"}}), "replica.pools.mixed.node_labels"),
        (with_pools(mixed={"node_labels": {"a": "b/c"}}), "replica.pools.mixed.node_labels.a"),
        ({"replica": {"count": 2, "pools": PAIR}}, "replica: .*count cannot be set beside pools"),
        (
            {"replica": {"autoscaling": {"max_replicas": 3}, "pools": PAIR}},
            "autoscaling cannot be set beside pools",
        ),
        (
            with_pools(prefill={"engine": {"polcy": "edf"}}, decode={}),
            "replica.pools.prefill.engine.polcy: Extra",
        ),
        (
            with_pools(prefill={}, decode={"engine": {"policy": "best"}}),
            "replica.pools.decode.engine: .*unknown batching policy 'best'",
        ),
        (
            with_pools(prefill={"engine": {"model": "other"}}, decode={}),
            "replica.pools.prefill.engine.model: must be the same in all pools",
        ),
        (
            with_pools(prefill={"engine": {"vllm_args": {"kv_cache_dtype": "fp8"}}}, decode={}),
            "replica.pools.decode.engine.vllm_args.kv-cache-dtype: .*not set, and 'fp8' in prefill",
        ),
        (
            with_pools(prefill={}, decode={"engine": {"simulated": {"block_tokens": 8}}}),
            "replica.pools.decode.engine.simulated.block_tokens: .*it is 8, and 16 in prefill",
        ),
        (
            {"engine": {"preemption": True}, "replica": {"pools": PAIR}},
            "replica.pools.prefill.engine.preemption: must be false, or "
            "engine.transfer.connector tcp, not auto.*replica.pools.decode.engine.preemption",
        ),
        (
            {"engine": PREEMPTIVE, "replica": {"pools": PAIR}},
            "replica.pools.decode.engine.preemption: .*may receive KV",
        ),
        (
            {
                "engine": {"transfer": TCP},
                "replica": {"pools": {**PAIR, "mixed": {"engine": PREEMPTIVE_POOL}}},
            },
            "replica.pools.mixed.engine.preemption: .*may receive KV",
        ),
        ({"engine": PREEMPTIVE}, "engine.preemption: .*may receive KV"),
        (
            {"models": {"a": {"replica": {"pools": {**PAIR, "mixed": {"engine": {"kind": "x"}}}}}}},
            "models.a.replica.pools.mixed.engine.kind: must be the same",
        ),
    ],
)
def test_a_wrong_pool_is_refused_by_its_place(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="(?s)" + message):
        parse_config(data)


@pytest.mark.parametrize("part", ["replicas", "routers"])
def test_nodes_with_labels_are_not_waited_for_on_one_machine(part: str) -> None:
    labels = {"node_labels": {"sluice/role": "mixed"}}
    data = with_pools(mixed=labels if part == "replicas" else {})
    data["router"] = {"port": free_port(), **(labels if part == "routers" else {})}
    with (
        pytest.raises(StartError, match="node_labels"),
        running(parse_config(data), threading.Event(), print),
    ):
        pass
