"""Several models in one configuration."""

from __future__ import annotations

from typing import Any

import pytest

from sluice.deploy.app import deployment_name
from sluice.deploy.config import ModelConfig, SluiceConfig, parse_config
from sluice.replica.config import EngineConfig

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


def test_what_is_printed_is_read_as_the_same() -> None:
    config = parse_config({"replica": {"count": 2}, "models": {"a": {"replica": {"count": 1}}}})
    assert parse_config(config.model_dump(mode="json")) == config
    built = SluiceConfig(models={"a": ModelConfig(engine=EngineConfig(policy="edf"))})
    assert built.fleets[0].config.engine.policy == "edf"


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
