"""Arguments of vLLM: what Sluice sets, takes and refuses before an engine starts."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest

from sluice.replica.config import TransferConfig
from sluice.replica.scheduler.speculation import BY_BATCH_SIZE
from sluice.replica.scheduler.xargs import SchedulerSettings
from sluice.replica.vllm.setup import choose_parser, parse_arguments, parser_of, transfer_argument
from sluice.telemetry.phases import FILE_VARIABLE, Phases

pytestmark = pytest.mark.vllm

TCP = TransferConfig(connector="tcp", max_bytes=1 << 21)
NGRAM = {"method": "ngram", "num_speculative_tokens": 5}
OFFLOADING = {"kv-offloading-size": 8}
LMCACHE = {**OFFLOADING, "kv-offloading-backend": "lmcache"}


def connector(name):
    return {"kv_transfer_config": {"kv_connector": name, "kv_role": "kv_both"}}


@pytest.fixture
def parse(tmp_path):
    settings = SchedulerSettings(state_table=tmp_path / "state", policy="fcfs")
    return lambda given, **more: parse_arguments(given, "model", "name", settings, **more)


def test_a_model_of_the_users_keeps_the_dtype_that_vllm_chooses(parse):
    """Some kinds of quantization refuse float32."""
    assert parse({}).dtype == "auto"


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"scheduler_cls": "x"}, "scheduler-cls"),
        ({"no-such-argument": 1}, "no-such-argument is no option"),
        (
            {"structured-outputs-config": {"disable_any_whitespace": True}},
            "disable_any_whitespace is only supported for",
        ),
        ({"spec-method": "ngram"}, "spec-method cannot be set: use speculative-config"),
        ({"speculative_config": {"method": "ngram"}}, "vllm_args: .*num_speculative_tokens"),
        ({"speculative-config": NGRAM, "async-scheduling": True}, "async-scheduling must be False"),
    ],
)
def test_what_an_engine_cannot_run_with_is_named(parse, given, reason):
    with pytest.raises(ValueError, match=reason):
        parse(given)


def test_vllm_is_started_with_every_length_of_drafts(parse):
    from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

    parsed = parse({"speculative-config": NGRAM})
    lengths = build_dynamic_sd_schedule_lookup(parsed.speculative_config[BY_BATCH_SIZE], 64, 5)
    assert set(lengths) == set(range(6))
    assert parsed.async_scheduling is False


def test_asynchronous_scheduling_is_vllms_choice_unless_it_loses_tokens_of_transferred_prompts(
    parse, monkeypatch
):
    import vllm

    assert parse({}).async_scheduling is None
    assert parse({"async-scheduling": False}).async_scheduling is False
    for version, choice in (("0.32.0", None), ("0.31.0", False)):
        monkeypatch.setattr(vllm, "__version__", version)
        assert parse({}, transfer=TCP).async_scheduling is choice
    assert parse(connector("X")).async_scheduling is False
    with pytest.raises(ValueError, match=r"before vLLM 0\.32 a KV connector needs async-sched"):
        parse({"async-scheduling": True}, transfer=TCP)


def test_the_connector_for_transfers_is_set_and_an_operators_own_is_kept(parse):
    config = parse({}, transfer=TCP).kv_transfer_config
    assert (config.kv_role, config.kv_load_failure_policy) == ("kv_both", "recompute")
    assert config.kv_connector_extra_config["sluice"]["max_bytes"] == 1 << 21
    assert parse(connector("X")).kv_transfer_config.kv_connector == "X"
    assert transfer_argument(TCP, "decode")["kv_role"] == "kv_both"
    assert transfer_argument(TCP, "prefill")["kv_role"] == "kv_producer", "it only sends"


def test_nixl_is_taken_where_it_can_run(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="its package is not installed"):
        transfer_argument(TransferConfig(connector="nixl"))
    assert transfer_argument(TransferConfig())["kv_connector"] == "TcpConnector"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr("sluice.replica.vllm.setup.on_cpu", lambda: False)
    monkeypatch.setenv("VLLM_HOST_IP", "10.0.0.1")
    for name in ("HOST", "PORT"):
        monkeypatch.delenv(f"VLLM_NIXL_SIDE_CHANNEL_{name}", raising=False)
    for chosen, expected in (("auto", "NixlConnector"), ("tcp", "TcpConnector")):
        argument = transfer_argument(TransferConfig(connector=chosen))
        assert argument["kv_connector"] == expected
        assert argument["kv_load_failure_policy"] == "recompute"
    assert os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "10.0.0.1"
    assert int(os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"]) > 0


@pytest.fixture
def machine(monkeypatch):
    """Sets whether vLLM computes on CPUs, and whether the package lmcache is there."""
    find = importlib.util.find_spec

    def become(on_cpu, lmcache):
        monkeypatch.setattr("sluice.replica.vllm.setup.on_cpu", lambda: on_cpu)
        monkeypatch.setattr(
            "importlib.util.find_spec", lambda name: lmcache if name == "lmcache" else find(name)
        )

    return become


@pytest.mark.parametrize(
    ("given", "on_cpu", "reason"),
    [
        (OFFLOADING, True, "OffloadingConnector copies KV between a GPU and"),
        (
            {"kv-transfer-config": '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}'},
            True,
            "this is vLLM's CPU build",
        ),
        (LMCACHE, False, "LMCacheMPConnector needs the package lmcache"),
        (LMCACHE, True, "LMCacheMPConnector needs the package lmcache"),
        (connector("LMCacheConnectorV1"), False, "LMCacheConnectorV1 needs the package lmcache"),
        (connector("LMCacheConnectorV1"), True, "LMCacheConnectorV1 copies KV between a GPU and"),
    ],
)
def test_a_connector_to_other_memory_is_refused_where_it_cannot_run(
    parse, machine, given, on_cpu, reason
):
    machine(on_cpu, lmcache=None)
    with pytest.raises(ValueError, match=reason):
        parse(given)


@pytest.mark.parametrize(
    ("given", "on_cpu"),
    [
        (connector("LMCacheMPConnector"), True),
        (connector("LMCacheConnectorV1"), False),
        (OFFLOADING, False),
        (LMCACHE, False),
    ],
)
def test_a_connector_to_other_memory_is_taken_where_it_can_run(parse, machine, given, on_cpu):
    machine(on_cpu, lmcache=object())
    parsed = parse(given)
    stated = given.get("kv_transfer_config", {"kv_connector": None})
    assert getattr(parsed.kv_transfer_config, "kv_connector", None) == stated["kv_connector"]
    assert parsed.kv_offloading_size == given.get("kv-offloading-size")


CALLS = "<\uff5ctool▁calls▁begin\uff5c><\uff5ctool▁call▁begin\uff5c>"
TEMPLATES = {
    "hermes": "<tools>{{ tools | tojson }}</tools> return "
    '<tool_call>\n{"name": <name>, "arguments": <json-object>}\n</tool_call>',
    "qwen3_xml": "<tool_call>\n<function=example>\n<parameter=p>\n1\n</parameter>\n"
    "</function>\n</tool_call>{{ tool_call.arguments }}",
    "glm45": "<tool_call>{name}\n<arg_key>k</arg_key>\n<arg_value>v</arg_value>"
    "</tool_call>{{ arguments }}",
    "deepseek_v3": CALLS + "function\uff5cf\n```json\n{}\n```",
    "deepseek_v31": CALLS + "f\uff5c{}",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>",
    "minimax_m2": '<minimax:tool_call><invoke name="f">',
    "mistral": "[AVAILABLE_TOOLS]{{ tools }}[TOOL_CALLS]",
    "openai": "<|start|>assistant<|channel|>commentary to=functions.f",
    "llama3_json": 'Respond with JSON for a function call: {"name": function name, '
    '"parameters": {}}.<|eot_id|>',
    None: "call({{ tools }})",
}
TEMPLATES = {name: f"{{% if tools %}}{text}{{% endif %}}" for name, text in TEMPLATES.items()}


def test_the_format_of_a_template_names_its_parser():
    for name, template in TEMPLATES.items():
        assert parser_of(template) == name
    assert parser_of("{{ messages }}<tool_call>arguments") is None, "it has no tools"


def test_a_parser_is_chosen_by_the_template_unless_one_is_stated(caplog, tmp_path):
    def chosen(template: Any, **stated: Any) -> tuple[bool, str | None]:
        plain = {"enable_auto_tool_choice": False, "tool_call_parser": None, "chat_template": None}
        arguments = Namespace(**{**plain, **stated})
        choose_parser(arguments, SimpleNamespace(chat_template=template))
        return arguments.enable_auto_tool_choice, arguments.tool_call_parser

    hermes, unknown = TEMPLATES["hermes"], TEMPLATES[None]
    assert chosen(hermes) == (True, "hermes")
    assert chosen({"default": unknown, "tool_use": hermes}) == (True, "hermes")
    assert chosen(hermes, tool_call_parser="xlam") == (False, "xlam")
    assert chosen(None) == (False, None)
    (tmp_path / "t.jinja").write_text(TEMPLATES["mistral"])
    assert chosen(hermes, chat_template=str(tmp_path / "t.jinja")) == (True, "mistral")
    assert chosen(hermes, chat_template=TEMPLATES["kimi_k2"]) == (True, "kimi_k2")
    assert "vllm_args" not in caplog.text
    assert chosen(unknown) == (False, None)
    assert "set enable-auto-tool-choice and tool-call-parser" in caplog.text


def test_a_download_is_a_phase_of_the_start(tmp_path):
    phases = Phases(tmp_path / "phases", zero_s=0.0)
    code = f"""
import sluice.replica.vllm.preload
from vllm.model_executor.model_loader.weight_utils import download_weights_from_hf
download_weights_from_hf("nobody/nothing", {str(tmp_path)!r}, ["*.safetensors"])
"""
    environment = os.environ | {FILE_VARIABLE: str(tmp_path / "phases"), "HF_HUB_OFFLINE": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE, check=False
    )
    assert b"LocalEntryNotFoundError" in ran.stderr
    assert [(ended.name, ended.how) for ended in phases.news()] == [
        ("import vLLM", ""),
        ("engine: download", " failed"),
    ]
    phases.close()
