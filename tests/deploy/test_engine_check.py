"""What `sluice config check`, serve and deploy say of engines that could not start."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from sluice.deploy.cli import main
from sluice.deploy.config import engine_faults, parse_config
from sluice.deploy.ray_start import free_port
from sluice.replica.config import EngineConfig

KV = {"kv_role": "kv_both"}
NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
PREEMPTION = {"preemption": True}
PIPELINE = {"pipeline-parallel-size": 2}

REFUSED_BY_VLLM: dict[str, tuple[dict[str, Any], str]] = {
    "a misspelt name": ({"vllm_args": {"max-modellen": 512}}, "did you mean max-model-len"),
    "an abbreviation": ({"vllm_args": {"max-model": 512}}, "max-model is no option"),
    "a text for a number": ({"vllm_args": {"max-num-seqs": "many"}}, "max-num-seqs: invalid int"),
    "a fraction": ({"vllm_args": {"tensor-parallel-size": "1"} | {"seed": 1.5}}, "seed: invalid"),
    "a list for a number": ({"vllm_args": {"max-model-len": [64, 32]}}, "'32' is one value too"),
    "a text for a switch": ({"vllm_args": {"enable-lora": "yes"}}, "enable-lora.*'yes'"),
    "a switch for a number": ({"vllm_args": {"max-num-seqs": True}}, "max-num-seqs: expected one"),
    "no such choice": ({"vllm_args": {"dtype": "float33"}}, "dtype: invalid choice"),
    "a text for a mapping": ({"vllm_args": {"limit-mm-per-prompt": "x"}}, "limit-mm-per-prompt"),
    "tools without a parser": (
        {"vllm_args": {"enable-auto-tool-choice": True}},
        "tool-call-parser",
    ),
    # Names that vLLM looks up only once the engine loads.
    "no such tool parser": (
        {"vllm_args": {"enable-auto-tool-choice": True, "tool-call-parser": "nope"}},
        "tool-call-parser: there is no 'nope', only .*hermes",
    ),
    "no such tool parser for forced calls": (
        {"vllm_args": {"tool-call-parser": "nope"}},
        "tool-call-parser: there is no 'nope'",
    ),
    "a tool parser that its plug-in does not have": (
        {"vllm_args": {"tool-parser-plugin": "/no/such.py", "tool-call-parser": "nope"}},
        "tool-call-parser: there is no 'nope'",
    ),
    "no such reasoning parser": (
        {"vllm_args": {"reasoning-parser": "nope"}},
        "reasoning-parser: there is no 'nope', only .*qwen3",
    ),
    "no such reasoning parser, said elsewhere": (
        {"vllm_args": {"structured-outputs-config": {"reasoning_parser": "nope"}}},
        "reasoning-parser: there is no 'nope'",
    ),
    "no such load format": ({"vllm_args": {"load-format": "nope"}}, "load-format: .*nope"),
    "no such config format": ({"vllm_args": {"config-format": "nope"}}, "config format `nope`"),
    "no such tokenizer mode": ({"vllm_args": {"tokenizer-mode": "nope"}}, "tokenizer-mode: .*nope"),
    "no such quantization": ({"vllm_args": {"quantization": "nope"}}, "quantization method: nope"),
    "no such attention": ({"vllm_args": {"attention-backend": "NOPE"}}, "backend: 'NOPE'"),
    "no such worker": (
        {"vllm_args": {"worker-cls": "no_module.Worker"}},
        "worker-cls: .*no_module",
    ),
    "no such worker extension": (
        {"vllm_args": {"worker-extension-cls": "no_module.Extension"}},
        "worker-extension-cls: .*no_module",
    ),
    "no such executor": (
        {"vllm_args": {"distributed-executor-backend": "no_module.Executor"}},
        "no_module",
    ),
    "no such logits processor": (
        {"vllm_args": {"logits-processors": ["no_module:Processor"]}},
        "logits-processors: .*no_module",
    ),
    "no such KV connector": (
        {"vllm_args": {"kv-transfer-config": {"kv_connector": "Nope", **KV}}},
        "connector type: Nope",
    ),
    "no such encoder connector": (
        {"vllm_args": {"ec-transfer-config": {"ec_connector": "Nope", "ec_role": "ec_both"}}},
        "ec-transfer-config: .*Nope",
    ),
    "no such plug-in": (
        {"vllm_args": {"io-processor-plugin": "nope"}},
        "io-processor-plugin: nope is not installed",
    ),
    "no such architecture": (
        {"vllm_args": {"hf-overrides": {"architectures": ["Nope"]}}},
        "'Nope'",
    ),
    "no such chat template": ({"vllm_args": {"chat-template": "/no/such"}}, "/no/such"),
    "beyond the model": ({"vllm_args": {"max-model-len": 99_999_999}}, "max_model_len"),
    # docs/deployment.md
    "Ray's executor on CPUs": (
        {"vllm_args": {"distributed-executor-backend": "ray"}},
        "not be ray",
    ),
    "KV of a GPU": ({"vllm_args": {"kv-offloading-size": 2}}, "OffloadingConnector .* CPU build"),
    "LMCache in the engine": (
        {"vllm_args": {"kv-transfer-config": {"kv_connector": "LMCacheConnectorV1", **KV}}},
        "LMCacheConnectorV1 .* CPU build",
    ),
    # docs/preemption.md
    "several nodes' ranks": (
        {**PREEMPTION, "vllm_args": {"decode-context-parallel-size": 2, "tensor-parallel-size": 2}},
        "decode-context|decode_context",
    ),
    "experts in parallel": (
        {**PREEMPTION, "vllm_args": {"enable-expert-parallel": True}},
        "expert",  # vLLM's own rule comes first: this model has none
    ),
    "async scheduling": (
        {**PREEMPTION, "vllm_args": {"async-scheduling": True}},
        "async-scheduling must be False",
    ),
    "offloaded weights": (
        {**PREEMPTION, "vllm_args": {"cpu-offload-gb": 1}},
        "must not be offload",
    ),
    # docs/speculation.md
    "lengths by batch size": (
        {
            "vllm_args": {
                "speculative-config": {
                    **NGRAM,
                    "num_speculative_tokens_per_batch_size": [[1, 4, 2]],
                }
            }
        },
        "the plan chooses the lengths",
    ),
    "drafts and async scheduling": (
        {"vllm_args": {"speculative-config": NGRAM, "async-scheduling": True}},
        "async-scheduling must be False",
    ),
    # What plans cannot execute.
    "no chunks": ({"vllm_args": {"enable-chunked-prefill": False}}, "chunked prefill must be on"),
    "a threshold": ({"vllm_args": {"long-prefill-token-threshold": 4}}, "threshold must be 0"),
}

TAKEN: dict[str, dict[str, Any]] = {
    "plain": {"vllm_args": {"max_model_len": 512, "seed": -5, "enable-prefix-caching": False}},
    "in words": {"vllm_args": {"max-model-len": "1k", "gpu-memory-utilization": 0.5}},
    "preemptive": PREEMPTION,
    "parsers": {
        "vllm_args": {
            "enable-auto-tool-choice": True,
            "tool-call-parser": "hermes",
            "reasoning-parser": "qwen3",
            "tokenizer-mode": "hf",
            "load-format": "safetensors",
            "logits-processors": [
                "vllm.v1.sample.logits_processor.builtin:MinTokensLogitsProcessor"
            ],
        }
    },
    "drafts": {"vllm_args": {"speculative-config": NGRAM}},
    "transfers": {"transfer": {"connector": "tcp"}},
}


@pytest.mark.vllm
def test_vllm_is_asked_before_anything_starts(tmp_path: Path) -> None:
    engines = {f"bad-{n}": engine for n, (engine, _) in enumerate(REFUSED_BY_VLLM.values())}
    engines |= {f"good-{n}": engine for n, engine in enumerate(TAKEN.values())}
    config = parse_config({"models": {name: {"engine": each} for name, each in engines.items()}})
    found = dict(fault.split(": ", 1) for fault in engine_faults(config))
    for number, (case, (_, message)) in enumerate(REFUSED_BY_VLLM.items()):
        said = found.pop(f"models.bad-{number}.engine", "nothing")
        assert re.search(message, said), f"{case}: {said}"
    assert found == {}


@pytest.mark.vllm
def test_a_secret_beside_a_misspelt_name_is_not_shown(tmp_path: Path) -> None:
    file = tmp_path / "sluice.yaml"
    file.write_text("engine: {vllm_args: {hf-tokn: hf_secret}}")
    result = CliRunner().invoke(main, ["config", "check", str(file)])
    assert result.exit_code == 1
    assert "did you mean hf-token" in result.output
    assert "hf_secret" not in result.output


@pytest.mark.vllm
def test_what_is_for_gpus_is_asked_for_its_arguments_only() -> None:
    gpus = {"replica": {"num_gpus": 8}, "engine": {"vllm_args": {"kv-offloading-size": 8}}}
    assert engine_faults(parse_config(gpus)) == []
    cluster = parse_config({"engine": {"vllm_args": {"kv-offloading-size": 8}}})
    assert engine_faults(cluster, here=False) == []
    parser = {"tool-call-parser": "nope"}
    (fault,) = engine_faults(parse_config({"engine": {"vllm_args": parser}}), here=False)
    assert "there is no 'nope'" in fault
    plugin = {**parser, "tool-parser-plugin": "/on/the/cluster.py"}
    assert engine_faults(parse_config({"engine": {"vllm_args": plugin}}), here=False) == []


@pytest.mark.vllm
def test_each_argument_of_vllms_server_is_kept_or_refused_on_purpose() -> None:
    from dataclasses import fields

    from vllm.entrypoints.launchers.cli_args import FrontendArgs

    from sluice.replica.vllm_args import _INSTEAD

    kept = {
        "anthropic-disabled-thinking-effort",
        "chat-template",
        "chat-template-content-format",
        "cohere-format",
        "default-chat-template-kwargs",
        "enable-auto-tool-choice",
        "enable-flash-late-interaction",
        "enable-force-include-usage",
        "enable-log-deltas",
        "enable-log-outputs",
        "enable-prompt-tokens-details",
        "exclude-tools-when-tool-choice-none",
        "fingerprint-mode",
        "fingerprint-value",
        "log-error-stack",
        "lora-modules",
        "max-log-len",
        "response-role",
        "return-tokens-as-token-ids",
        "tool-call-parser",
        "tool-parser-plugin",
        "tool-server",
        "tool-strict-level",
        "trust-request-chat-template",
        "trust-request-mm-kwargs",
    }
    names = {field.name.replace("_", "-") for field in fields(FrontendArgs)}
    assert names - _INSTEAD.keys() == kept
    assert not kept & _INSTEAD.keys()


@pytest.mark.parametrize(
    ("vllm_args", "message"),
    [
        ({"api-key": "secret"}, "api-key cannot be set: set router.api_keys"),
        ({"api_key": "secret"}, "api-key cannot be set"),
        ({"api-key=secret": None}, "api-key cannot be set"),
        ({"--api-key": "secret"}, "api-key cannot be set"),
        ({"scheduling-policy": "priority"}, "set engine.policy"),
        ({"scheduler-cls": "x"}, "set engine.policy"),
        ({"ssl-keyfile": "x"}, "set router.tls"),
        ({"root-path": "/x"}, "remove the prefix"),
        ({"uvicorn-log-level": "debug"}, "set telemetry.logs"),
        ({"allowed-origins": ["*"]}, "set router.cors_origins"),
        ({"no-disable-log-stats": True}, "disable-log-stats cannot be set"),
        ({"additional-config.sluice": {}}, "additional-config cannot be set"),
        ({"kv-transfer-config.kv_connector": "X"}, "kv-transfer-config must be a mapping"),
        ({"max-model-len": 1, "max_model_len": 2}, "max-model-len is given twice"),
        ({"Max Model Len": 1}, "no option of vLLM has such a name"),
    ],
)
@pytest.mark.parametrize("kind", ["vllm", "simulated"])
def test_names_that_sluice_sets_are_refused_without_vllm(
    vllm_args: dict[str, Any],
    message: str,
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    file = tmp_path / "sluice.yaml"
    file.write_text(yaml.safe_dump({"engine": {"kind": kind, "vllm_args": vllm_args}}))
    result = CliRunner().invoke(main, ["config", "check", str(file), "--json"])
    assert result.exit_code == 1
    (problem,) = json.loads(result.output)["problems"]
    assert problem.startswith("engine.vllm_args: ")
    assert message in problem
    assert "secret" not in problem


def test_serve_without_vllm_says_so_before_ray_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    result = CliRunner().invoke(main, ["serve", "--port", str(free_port())])
    assert result.exit_code == 1
    assert "vLLM is not installed here: install sluice[vllm]" in result.output
    assert "starting Ray" not in result.output


def test_what_two_settings_say_of_an_engine_is_told_by_one_of_them() -> None:
    with pytest.raises(ValueError, match="max-loras"):
        EngineConfig(vllm_args={"lora-modules": ["a=b", "c=d"], "max-loras": 1})


PAIR: dict[str, Any] = {"prefill": {}, "decode": {}}
OFF = {"preemption": False}
MULTI: dict[str, Any] = {"kv-transfer-config": {"kv_connector": "LMCacheMPConnector", **KV}}

EXCLUDED: list[tuple[dict[str, Any], str, list[dict[str, Any]]]] = [
    # A configuration, what is said of it, and what that allows in its place.
    (
        {"engine": {**PREEMPTION, "transfer": {}}},
        "engine.preemption: must be false, or engine.transfer left out",
        [{"engine": {**OFF, "transfer": {}}}, {"engine": PREEMPTION}],
    ),
    (
        {"engine": {**PREEMPTION, "transfer": {"connector": "tcp"}}},
        "engine.preemption: must be false, or engine.transfer left out",
        [{"engine": {**OFF, "transfer": {"connector": "tcp"}}}, {"engine": PREEMPTION}],
    ),
    (
        {"engine": PREEMPTION, "replica": {"elastic": True}},
        "engine.preemption: must be false, or replica.elastic left out",
        [{"engine": OFF, "replica": {"elastic": True}}, {"engine": PREEMPTION}],
    ),
    (
        {"engine": PREEMPTION, "replica": {"pools": PAIR}},
        "decode.engine.preemption: must be false, or pools of prefill and decode .*"
        r"replica\.pools\.prefill\.engine\.preemption\), with engine\.transfer\.connector tcp",
        [
            {"engine": PREEMPTION},
            {
                "engine": {"transfer": {"connector": "tcp"}},
                "replica": {"pools": {"prefill": {"engine": PREEMPTION}, "decode": {}}},
            },
        ],
    ),
    (
        {"replica": {"pools": {"prefill": {"engine": PREEMPTION}, "decode": {}}}},
        "must be false, or engine.transfer.connector tcp, not auto",
        [
            {"replica": {"pools": {"prefill": {"engine": OFF}, "decode": {}}}},
            {
                "engine": {"transfer": {"connector": "tcp"}},
                "replica": {"pools": {"prefill": {"engine": PREEMPTION}, "decode": {}}},
            },
        ],
    ),
    (
        {
            "engine": {
                "transfer": {"connector": "tcp"},
                "vllm_args": {"speculative-config": NGRAM},
            },
            "replica": {"pools": {"prefill": {"engine": PREEMPTION}, "decode": {}}},
        },
        r"speculative-config: leave that out there \(speculative-config: null\)",
        [
            {
                "engine": {
                    "transfer": {"connector": "tcp"},
                    "vllm_args": {"speculative-config": NGRAM},
                },
                "replica": {
                    "pools": {
                        "prefill": {
                            "engine": {**PREEMPTION, "vllm_args": {"speculative-config": None}}
                        },
                        "decode": {},
                    }
                },
            }
        ],
    ),
    (
        {"engine": {**PREEMPTION, "vllm_args": {"kv-offloading-size": 2}}},
        "must be false with kv-offloading-size in vllm_args",
        [{"engine": {**OFF, "vllm_args": {"kv-offloading-size": 2}}}, {"engine": PREEMPTION}],
    ),
    (
        {"engine": {"transfer": {}, "vllm_args": {"kv-offloading-size": 2}}},
        "engine.vllm_args: kv-offloading-size excludes engine.transfer: .* leave one out",
        [{"engine": {"transfer": {}}}, {"engine": {"vllm_args": {"kv-offloading-size": 2}}}],
    ),
    (
        {"engine": {"vllm_args": MULTI}, "replica": {"pools": PAIR}},
        "kv-transfer-config excludes pools of prefill and decode replicas",
        [{"engine": {"vllm_args": MULTI}}, {"replica": {"pools": PAIR}}],
    ),
    (
        {"engine": {"vllm_args": MULTI}, "replica": {"elastic": True}},
        "kv-transfer-config excludes replica.elastic",
        [{"engine": {"vllm_args": MULTI}}, {"replica": {"elastic": True}}],
    ),
    *(
        (
            {"engine": {**engine, "vllm_args": {**PIPELINE, **more}}, "replica": replica},
            f"engine.vllm_args: pipeline-parallel-size above 1 excludes {named}.*leave one out",
            [
                {"engine": {"vllm_args": PIPELINE}},
                {"engine": {**engine, "vllm_args": more}, "replica": replica},
            ],
        )
        for engine, more, replica, named in (
            ({"transfer": {}}, {}, {}, "engine.transfer"),
            ({}, {}, {"elastic": True}, "replica.elastic"),
            ({}, {}, {"pools": PAIR}, "pools of prefill and decode replicas"),
            ({}, {"speculative-config": NGRAM}, {}, "speculative-config"),
            ({}, {"kv-offloading-size": 2}, {}, "kv-offloading-size"),
            ({}, MULTI, {}, "kv-transfer-config"),
            (PREEMPTION, {}, {}, "preemption"),
        )
    ),
    *(
        (
            {
                "engine": {**engine, "vllm_args": {"data-parallel-size": 2, **more}},
                "replica": replica,
            },
            f"with data-parallel-size above 1, .*{named}",
            [
                {"engine": {"vllm_args": {"data-parallel-size": 2}}},
                {"engine": {**engine, "vllm_args": more}, "replica": replica},
            ],
        )
        for engine, more, replica, named in (
            ({"transfer": {}}, {}, {}, "leave out engine.transfer"),
            ({}, {}, {"elastic": True}, "and replica.elastic"),
            ({}, {}, {"pools": PAIR}, "pools for prefill and decode"),
            ({}, {"speculative-config": NGRAM}, {}, "speculative-config must be off"),
            (PREEMPTION, {}, {}, "engine.preemption must be off"),
            ({}, {"distributed-executor-backend": "ray"}, {}, "may not be ray"),
            ({}, MULTI, {}, "kv-transfer-config must be unset"),
        )
    ),
    (
        {
            "engine": {"vllm_args": {"distributed-executor-backend": "ray"}},
            "replica": {"max_per_node": 1},
        },
        "max_per_node: cannot be set with distributed-executor-backend ray",
        [
            {"engine": {"vllm_args": {"distributed-executor-backend": "ray"}}},
            {"replica": {"max_per_node": 1}},
        ],
    ),
    (
        {"replica": {"node_labels": {"ray.io/accelerator-type": "TPU-V4"}}},
        "TPUs",
        [{"replica": {"node_labels": {"ray.io/accelerator-type": "L4"}}}],
    ),
    (
        {"engine": {**PREEMPTION, "kind": "simulated"}},
        "preemption must be false: only vLLM's",
        [{"engine": {**OFF, "kind": "simulated"}}, {"engine": PREEMPTION}],
    ),
    (
        {
            "engine": {
                **PREEMPTION,
                "vllm_args": {
                    "speculative-config": {"model": "small/draft", "num_speculative_tokens": 2}
                },
            }
        },
        "must be false with drafts by a draft model, or the method of speculative-config ngram",
        [{"engine": {**PREEMPTION, "vllm_args": {"speculative-config": NGRAM}}}],
    ),
    (
        {
            "engine": {
                **PREEMPTION,
                "adapters_dir": "/adapters",
                "vllm_args": {"enable-lora": True},
            }
        },
        "adapters_dir needs preemption: false",
        [{"engine": {"adapters_dir": "/adapters", "vllm_args": {"enable-lora": True}}}],
    ),
]


@pytest.mark.parametrize(("data", "message", "instead"), EXCLUDED)
def test_features_that_exclude_each_other_say_what_is_allowed(
    data: dict[str, Any], message: str, instead: list[dict[str, Any]]
) -> None:
    with pytest.raises(ValueError, match="(?s)" + message):
        parse_config(data)
    for each in instead:
        parse_config(each)
