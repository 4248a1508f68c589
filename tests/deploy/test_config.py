from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from yaml.constructor import SafeConstructor

from sluice.deploy.app import build, deployment_name
from sluice.deploy.config import ModelConfig, SluiceConfig, load_config, parse_config
from sluice.deploy.local import StartError, check
from sluice.deploy.ray_start import free_port
from sluice.replica.config import EngineConfig, TransferConfig


def test_flags_lie_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "sluice.yaml"
    path.write_text("engine: {model: mine, policy: fcfs}\nreplica: {count: 3}\n")
    config = load_config(path, {"engine": {"policy": "sarathi"}})
    assert (config.engine.model, config.engine.policy, config.replica.count) == (
        "mine",
        "sarathi",
        3,
    )


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("engin: {}", "engin"),
        ("replica: {cuont: 2}", "replica.cuont"),
        ("replica: {count: 0}", "replica.count"),
        ("engine: {policy: best}", "best"),
        ("engine: {policy: sarathi, policy_options: {budget: 1}}", "budget"),
        ("controller: {policy: nearest}", "nearest"),
        ("router: {default_class: gold}", "gold"),
        ("router: {port: 70000}", "router.port"),
        ("router: {classes: {a: {ttft_ms: -1}}, default_class: a}", "ttft_ms"),
        (
            "router: {classes: {a: {service_tiers: [x]}, b: {service_tiers: [x]}}, "
            "default_class: a}",
            "x",
        ),
        ("name: Not A Name", "name"),
        ("- a list", "mapping"),
        ("a: [unclosed", "YAML"),
    ],
)
def test_a_wrong_value_is_named(tmp_path: Path, text: str, names: str) -> None:
    path = tmp_path / "sluice.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match="(?s)" + names):
        load_config(path)


def test_keys_are_not_shown_in_errors_or_dumps(tmp_path: Path) -> None:
    path = tmp_path / "sluice.yaml"
    path.write_text("router: {api_keys: [very-secret], port: -5}")
    with pytest.raises(ValueError, match=r"router\.port") as caught:
        load_config(path)
    assert "very-secret" not in str(caught.value)
    with pytest.raises(ValueError, match=r"router\.api_key:") as caught:
        build({"router": {"api_key": ["very-secret"]}})
    assert "very-secret" not in str(caught.value)
    for broken in ("[very-secret", "very-secret: x", '["very-secret\\q"]', "*very-secret"):
        path.write_text(f"router:\n  api_keys: {broken}\n")
        with pytest.raises(ValueError, match=r"is not YAML, at line [23]") as caught:
            load_config(path)
        assert "very-secret" not in "".join(traceback.format_exception(caught.value))
    for loose in ("very-secret", "a very-secret, name", "veryS3cret", "d8b1c0ffee" * 3):
        path.write_text(f"router: {{'{loose}': 1}}")
        with pytest.raises(ValueError, match=r"router\.\(no name of a field") as caught:
            load_config(path)
        assert loose not in str(caught.value)
    path.write_text("router: {api_keys: [very-secret]}")
    assert "very-secret" not in str(load_config(path).model_dump(mode="json"))


def test_every_field_says_what_it_is() -> None:
    schema = SluiceConfig.model_json_schema()
    models = [schema, *schema["$defs"].values()]
    bare = [
        f"{model['title']}.{name}"
        for model in models
        for name, field in model.get("properties", {}).items()
        if not field.get("description")
    ]
    assert bare == []


KEY = "top-secret-key-of-acme"
WHOLE = f"""
engine: {{kind: simulated}}
router:
  api_keys: [{{key: {KEY}, name: acme}}]
  classes: {{fast: {{ttft_ms: 100.5, priority: 3}}}}
  default_class: fast
  batches: {{service_class: fast}}
""".encode()
ODD = (
    *(b"[" * 5_000, b"2026-99-99", b"!!bool x", b"!!timestamp x", b"9" * 5_000, b"!!int x"),
    *(b"{{a: 1}: 2}", b"&a [*a]", b"\x00", b"!!python/object:os.system x", b"- ", b": "),
)


@given(
    place=st.integers(0, len(WHOLE)),
    cut=st.integers(0, 40) | st.just(len(WHOLE)),
    put=st.binary(max_size=3) | st.sampled_from(ODD),
)
def test_a_damaged_file_is_refused_by_name_or_is_a_configuration(
    tmp_path_factory: pytest.TempPathFactory, place: int, cut: int, put: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "sluice.yaml"
    path.write_bytes(WHOLE[:place] + put + WHOLE[place + cut :])
    try:
        load_config(path)
    except ValueError as error:
        message = str(error)
        assert message.startswith((str(path), "the configuration is not valid:\n"))
        assert KEY not in message


@pytest.mark.parametrize("odd", ODD)
def test_what_yaml_cannot_make_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, odd: bytes
) -> None:
    # A library of vLLM's takes dates for text, in the whole process: here PyYAML reads them itself.
    dates, read = "tag:yaml.org,2002:timestamp", SafeConstructor.construct_yaml_timestamp
    monkeypatch.setitem(yaml.SafeLoader.yaml_constructors, dates, read)
    path = tmp_path / "sluice.yaml"
    path.write_bytes(b"name: " + odd)
    with pytest.raises(ValueError, match=r"sluice\.yaml|the configuration is not valid"):
        load_config(path)


# Models.


SHARED = {
    "engine": {
        "kind": "simulated",
        "policy": "fcfs",
        "policy_options": {},
        "vllm_args": {"max-model-len": 4096},
    },
    "replica": {"count": 3},
    "controller": {"admission": "pab", "admission_options": {"reserve": 0.1}},
}


def test_without_models_the_sections_are_the_one_model() -> None:
    config = parse_config({"engine": {"served_model_name": "mine"}, "replica": {"count": 4}})
    (fleet,) = config.fleets
    assert (fleet.model, fleet.key, fleet.config.replica.count) == ("mine", None, 4)
    assert fleet.config.controller == config.controller
    assert deployment_name(fleet.key) == "Replica"
    (pool,) = fleet.pools
    assert (pool.role, pool.engine, pool.replica) == ("mixed", config.engine, config.replica)


def test_an_entry_takes_what_it_leaves_out_from_the_shared_sections() -> None:
    config = parse_config(
        {
            "engine": {"kind": "simulated", "vllm_args": {"max-model-len": 4096}},
            "replica": {"count": 3},
            "models": {
                "small": None,
                "org/large": {
                    "engine": {"model": "/models/large", "vllm_args": {"dtype": "float16"}},
                    "replica": {"num_gpus": 4},
                },
            },
        }
    )
    small, large = config.fleets
    assert [small.model, large.model] == ["small", "org/large"]
    assert [deployment_name(small.key), deployment_name(large.key)] == [
        "Replica-small",
        "Replica-org-large",
    ]
    assert small.config.replica.count == large.config.replica.count == 3
    assert large.config.replica.num_gpus == 4
    assert small.config.engine.served_name == "small"
    assert large.config.engine.kind == "simulated"
    # A field that is a mapping is not mixed with the shared one.
    assert large.config.engine.vllm_args == {"dtype": "float16"}


def test_options_of_another_policy_are_left_behind() -> None:
    shared = {"engine": {"policy": "deadline_triage", "policy_options": {"hold": 2}}}
    unknown = parse_config({"models": {"a": {"engine": {"policy": "edf"}}}})
    assert unknown.fleets[0].config.engine.policy == "edf"
    with pytest.raises(ValueError, match="hold"):
        parse_config({**shared, "models": {"a": None}})
    kept = parse_config(
        {"controller": {"admission": "none"}, "models": {"a": {"controller": {"admission": "pab"}}}}
    )
    assert kept.fleets[0].config.controller.admission == "pab"
    chosen = {"policy": "slidebatching", "policy_options": {"gamma": 1.0}}
    pools = {"prefill": {"engine": {"policy": "edf"}}, "decode": {}}
    prefill, decode = parse_config({"engine": chosen, "replica": {"pools": pools}}).fleets[0].pools
    assert (prefill.engine.policy, prefill.engine.policy_options) == ("edf", {})
    assert decode.engine.policy_options == {"gamma": 1.0}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"models": {"a/b": None, "a:b": None}}, "two names of models differ only"),
        ({"models": {"a b": None}}, "models"),
        ({"models": {"": None}}, "models"),
        ({"models": {"a": {"router": {}}}}, "models.a.router"),
        ({"models": {"a": {"engine": {"served_model_name": "b"}}}}, "served_model_name is 'b'"),
        ({"engine": {"served_model_name": "b"}, "models": {"a": None}}, "cannot be set beside"),
        ({"models": {"a": 3}}, "models.a"),
        ({"models": [1]}, "models"),
        ({"models": {f"m{i}": None for i in range(65)}}, "at most 64"),
        (
            {"models": {"a": {"engine": {"vllm_args": {"lora-modules": ["b=/x"]}}}, "b": None}},
            "share names: b",
        ),
    ],
)
def test_a_wrong_entry_is_refused(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_config(data)


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (None, ()),
        (["a=/x", '{"name": "b", "path": "/y"}'], ("a", "b")),
        ([{"name": "c", "path": "/z", "base_model_name": "m"}], ("c",)),
        ("a=/x", ("a",)),
    ],
)
def test_adapters_are_named_as_vllm_names_them(given: Any, names: tuple[str, ...]) -> None:
    assert EngineConfig(vllm_args={"lora_modules": given, "max_loras": 2}).adapters == names


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["a"], "a list of 'name=path'"),
        ([{"name": "a"}], "a list of 'name=path'"),
        (["{"], "is not JSON"),
        (["a=/x", "a=/y"], "name two adapters alike: a"),
        (["local=/x"], "the model's own name"),
        (["a=/x", "b=/y"], "max-loras is 1, but must be at least 2"),
    ],
)
def test_wrong_adapters_are_refused(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(vllm_args={"lora-modules": given})


# Pools.


PAIR: dict[str, Any] = {"prefill": {}, "decode": {}}
TCP = {"connector": "tcp"}
PREEMPTIVE_POOL = {"preemption": True}
PREEMPTIVE = {"transfer": TCP, **PREEMPTIVE_POOL}


def with_pools(engine: dict[str, Any] | None = None, **pools: Any) -> dict[str, Any]:
    return {"engine": {"kind": "simulated", **(engine or {})}, "replica": {"pools": pools}}


def test_roles_and_replicas_from_zero_have_one_cell() -> None:
    pools, cells = {"prefill": {}, "decode": {}}, {"controller": {"cells": 2}}
    with pytest.raises(ValueError, match=r"controller\.cells must be 1 with replica\.elastic"):
        parse_config(with_pools({"transfer": TCP}, **pools) | cells)
    with pytest.raises(ValueError, match=r"controller\.cells must be 1 with replica\.elastic"):
        parse_config({"replica": {"elastic": True}} | cells)
    with pytest.raises(ValueError, match=r"controller\.cells must be 1 with min_replicas: 0"):
        parse_config({"replica": {"autoscaling": {"min_replicas": 0, "max_replicas": 2}}} | cells)
    assert parse_config(with_pools(mixed={}) | cells).controller.cells == 2


def test_replicas_report_before_they_count_as_silent() -> None:
    slow: dict[str, Any] = {"replica": {"report_interval_s": 0.2}}
    with pytest.raises(ValueError, match=r"every 4 s .*stale_after_s must be above 8"):
        parse_config(slow)
    with pytest.raises(ValueError, match="stale_after_s must be above 1"):
        parse_config({"controller": {"stale_after_s": 1}})
    assert parse_config(slow | {"controller": {"stale_after_s": 9}}).replica.heartbeat_s == 4


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
    assert [each.engine.preemption for each in (prefill, decode)] == [True, False]


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
    built = SluiceConfig(models={"a": ModelConfig(engine=EngineConfig(policy="edf"))})
    assert built.fleets[0].config.engine.policy == "edf"
    for data in (
        {"replica": {"count": 2}, "models": {"a": {"replica": {"count": 1}}}},
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
    with pytest.raises(StartError, match="node_labels"):
        check(parse_config(data))
