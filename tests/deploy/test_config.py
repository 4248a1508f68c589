from __future__ import annotations

import traceback
from pathlib import Path

import pytest

from deploy.app import build
from deploy.config import SluiceConfig, load_config


def test_defaults_are_the_documented_system() -> None:
    config = load_config(None)
    assert config.engine.kind == "vllm"
    assert config.replica.count == 2
    assert (config.router.host, config.router.port) == ("127.0.0.1", 8000)
    assert set(config.router.classes) == {"interactive", "standard", "batch"}


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
