from __future__ import annotations

import traceback
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from yaml.constructor import SafeConstructor

from sluice.deploy.app import build
from sluice.deploy.config import SluiceConfig, load_config


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
        ("controller: {output_tokens: {gold: [1, 9]}}", "gold.*router.classes.*standard"),
        ("controller: {output_tokens: {batch: [9, 1]}}", "output_tokens.batch.*least <= most"),
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
        told = str(error)
        assert told.startswith((str(path), "the configuration is not valid:\n"))
        assert KEY not in told


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
