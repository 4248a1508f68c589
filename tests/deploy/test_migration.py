"""Commands and files as they stand in the documents of vLLM, llm-d and Ray Serve LLM."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from sluice.deploy.cli import main
from sluice.deploy.commands.options import Exit
from sluice.deploy.config import parse_config
from sluice.replica.vllm_args import _SHORT, long_flag, parse_flags
from tests.documents import DOCUMENTS, ROOT, blocks, marked


def run(*words: str) -> Result:
    return CliRunner().invoke(main, ["config", *words])


def migrated(*words: str) -> tuple[dict[str, Any], list[str]]:
    """The printed configuration, which Sluice accepts, and what has no counterpart."""
    result = run(*words)
    assert result.exit_code == Exit.OK, result.output
    found = yaml.safe_load(result.stdout)
    parse_config(found)
    lines = result.stdout.splitlines()
    return found, [line.partition(": ")[2] for line in lines if line.startswith("#")]


def from_vllm(command: str) -> tuple[dict[str, Any], list[str]]:
    return migrated("from-vllm", command)


DOCKER = """
# vLLM's docs/deployment/docker.md
docker run --rm --gpus all \\
    -v ~/.cache/huggingface:/root/.cache/huggingface \\
    --env "HF_TOKEN=$HF_TOKEN" \\
    -p 8000:8000 \\
    vllm/vllm-openai:latest \\
    meta-llama/Llama-3.1-8B-Instruct
"""

KUBERNETES = (
    "vllm serve mistralai/Mistral-7B-Instruct-v0.3 --trust-remote-code --enable-chunked-prefill "
    "--max_num_batched_tokens 1024"
)
"""vLLM's docs/deployment/k8s.md."""

LORA = """
vllm serve meta-llama/Llama-2-7b-hf \\
    --enable-lora \\
    --lora-modules sql-lora=$HOME/.cache/huggingface/hub/models--yard1/snapshots/0dfa347e/
"""
"""vLLM's docs/features/lora.md, with a shorter path."""

SPEECH = """
vllm serve ibm-granite/granite-speech-3.3-2b \\
    --max-model-len 2048 \\
    --enable-lora \\
    --default_mm_loras '{"audio":"ibm-granite/granite-speech-3.3-2b"}' \\
    --max-lora-rank 64
"""
"""The same document."""

AGENTS = """
CUDA_VISIBLE_DEVICES=0,1 SAFETENSORS_FAST_GPU=1 vllm serve lukealonso/MiniMax-M2.7-NVFP4 \\
  --port 23333 --trust-remote-code --served-model-name MM-27 --tensor-parallel-size 2 \\
  --enable-auto-tool-choice --tool-call-parser minimax_m2 --disable-custom-all-reduce \\
  --enable_expert_parallel --gpu-memory-utilization 0.95 --max-num-seqs 8 --max-model-len 130k
"""
"""https://huggingface.co/lukealonso/MiniMax-M2.7-NVFP4/discussions/10."""

BASELINE = (
    "Qwen/Qwen3.5-4B --disable-access-log-for-endpoints=/health,/metrics,/v1/models "
    "--tensor-parallel-size=1"
)
"""The arguments in llm-d's guides/optimized-baseline/modelserver/gpu/vllm/base/patch-vllm.yaml."""

PREFILL = (
    "vllm serve openai/gpt-oss-120b --tensor-parallel-size=1 --block-size=128 --kv-transfer-config "
    """'{"kv_connector":"NixlConnector", "kv_role":"kv_producer"}' """
    "--no-disable-hybrid-kv-cache-manager --gpu-memory-utilization=0.9"
)
"""llm-d's guides/pd-disaggregation/modelserver/gpu/vllm/base/patch-prefill.yaml."""

DECODE = (
    "vllm serve openai/gpt-oss-120b --disable-access-log-for-endpoints=/health,/metrics,/v1/models "
    "--tensor-parallel-size=4 --block-size=128 --kv-transfer-config "
    """'{"kv_connector":"NixlConnector", "kv_role":"kv_both"}' """
    "--no-disable-hybrid-kv-cache-manager --port=8200 --shutdown-timeout=60"
)
"""patch-decode.yaml beside it."""

COMMANDS = (DOCKER, KUBERNETES, LORA, SPEECH, AGENTS, BASELINE, PREFILL, DECODE)

ONE = {"count": 1}


def test_commands_from_the_documents_of_vllm() -> None:
    assert from_vllm(DOCKER) == (
        {"engine": {"model": "meta-llama/Llama-3.1-8B-Instruct"}, "replica": ONE},
        ["HF_TOKEN: set it in the environment of Sluice"],
    )
    assert from_vllm(KUBERNETES) == (
        {
            "engine": {
                "model": "mistralai/Mistral-7B-Instruct-v0.3",
                "vllm_args": {
                    "trust-remote-code": True,
                    "enable-chunked-prefill": True,
                    "max-num-batched-tokens": 1024,
                },
            },
            "replica": ONE,
        },
        [],
    )
    found, lacking = from_vllm(LORA)
    assert found["engine"]["vllm_args"]["enable-lora"] is True
    assert parse_config(found).engine.adapters == ("sql-lora",)
    assert len(lacking) == 1 and "shell's variables" in lacking[0]
    found, lacking = from_vllm(SPEECH)
    loras = {"audio": "ibm-granite/granite-speech-3.3-2b"}
    assert found["engine"]["vllm_args"]["default-mm-loras"] == loras
    assert not lacking


def test_what_sluice_has_itself_goes_to_its_own_fields() -> None:
    found, lacking = from_vllm(AGENTS)
    assert found["router"] == {"port": 23333}
    assert found["engine"]["served_model_name"] == "MM-27"
    assert found["engine"]["vllm_args"]["max-model-len"] == "130k"
    assert [line.partition(":")[0] for line in lacking] == [
        "CUDA_VISIBLE_DEVICES",
        "SAFETENSORS_FAST_GPU",
    ]
    command = (
        "python -m vllm.entrypoints.openai.api_server --model m --host 0.0.0.0 --api-key 1234 5678 "
        "--served-model-name a b --scheduler-cls x --api-server-count 2 -O3 -tp 2"
    )
    found, lacking = from_vllm(command)
    assert found == {
        "engine": {
            "model": "m",
            "served_model_name": "a",
            "vllm_args": {"optimization-level": 3, "tensor-parallel-size": 2},
        },
        "replica": ONE,
        "router": {"host": "0.0.0.0", "api_keys": ["1234", "5678"], "replicas": 2},
    }
    assert lacking == ["--served-model-name b: one name", "--scheduler-cls: set engine.policy"]


def test_arguments_from_the_documents_of_llm_d() -> None:
    lacks = ["--disable-access-log-for-endpoints: set telemetry.logs"]
    assert from_vllm(BASELINE) == (
        {
            "engine": {"model": "Qwen/Qwen3.5-4B", "vllm_args": {"tensor-parallel-size": 1}},
            "replica": ONE,
        },
        lacks,
    )
    found, lacking = from_vllm(PREFILL)
    assert found["engine"]["vllm_args"] == {
        "tensor-parallel-size": 1,
        "block-size": 128,
        "kv-transfer-config": {"kv_connector": "NixlConnector", "kv_role": "kv_producer"},
        "disable-hybrid-kv-cache-manager": False,
        "gpu-memory-utilization": 0.9,
    }
    assert not lacking
    found, lacking = from_vllm(DECODE)
    assert found["replica"] == {"count": 1, "drain_timeout_s": 60}
    assert (found["router"], lacking) == ({"port": 8200}, lacks)


def test_the_configuration_file_of_vllm_is_read(tmp_path: Path) -> None:
    """The file of vLLM's docs/configuration/serve_args.md."""
    path = tmp_path / "config.yaml"
    path.write_text(
        "model: meta-llama/Llama-3.1-8B-Instruct\nhost: '127.0.0.1'\nport: 6379\n"
        "uvicorn-log-level: 'info'\n"
    )
    found, lacking = from_vllm(f"vllm serve --config {path} --port 6380")
    assert found["engine"] == {"model": "meta-llama/Llama-3.1-8B-Instruct"}
    assert found["router"] == {"host": "127.0.0.1", "port": 6380}
    assert lacking == ["--uvicorn-log-level: set telemetry.logs"]


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("docker run ghcr.io/other:1 --model m", "'run' belongs to no flag"),
        ("vllm serve 'm", "quotation"),
        ("vllm serve m --port many", "router.port"),
        ("vllm serve --max-model-len 100 Qwen/Qwen3-8B", "no MODEL"),
        ("docker pull vllm/vllm-openai:latest", "no MODEL"),
        ("", "no MODEL"),
        ("vllm serve m --api-key --port 8000", "--api-key needs a value"),
        ("vllm serve m --compilation-config.a 1 --compilation-config.a.b 1", "a is both"),
    ],
)
def test_a_command_that_cannot_be_read_is_refused(command: str, says: str) -> None:
    result = run("from-vllm", command)
    assert result.exit_code == Exit.FAILED and says in result.stderr


def test_a_script_is_read_to_the_end_of_its_command() -> None:
    script = """#!/bin/bash
set -e; source venv/bin/activate
# the model
export VLLM_USE_V1=1
docker pull vllm/vllm-openai:latest && echo "pulled; now"
exec vllm serve m --port 8001 \\
  --compilation-config '{
    "mode": 3}' --max-model-len 100 > vllm.log 2>&1 &  # it's a service
echo started --seed 1
"""
    engine = {
        "model": "m",
        "vllm_args": {"compilation-config": {"mode": 3}, "max-model-len": 100},
    }
    found, lacking = from_vllm(script)
    assert found == {"engine": engine, "replica": ONE, "router": {"port": 8001}}
    assert lacking == ["VLLM_USE_V1: set it in the environment of Sluice"]


def test_the_key_of_the_environment_is_one_to_configure() -> None:
    found, lacking = from_vllm("VLLM_API_KEY=sk-secret vllm serve m")
    assert "router" not in found
    assert lacking == ["VLLM_API_KEY: set router.api_keys or router.api_keys_file"]


def test_names_in_a_configuration_of_vllm_that_are_numbers(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("model: m\n1: 2\n")
    result = run("from-vllm", f"vllm serve --config {path}")
    assert result.exit_code == Exit.FAILED and "no option of vLLM" in result.stderr


def test_flags_are_read_in_each_form_of_vllm() -> None:
    words = (
        "--json-arg.key1 value1 --json-arg.key2.key3 2 --json-arg.key4+ v3 "
        "--json-arg.key4+=v4,v5 --a_b=c=d --flag --no-other --seed -1 --sizes 1 2 --version 1.10 "
        "--last 1 --last 2"
    )
    assert parse_flags(words.split()) == {
        "json-arg": {"key1": "value1", "key2": {"key3": 2}, "key4": ["v3", "v4", "v5"]},
        "a-b": "c=d",
        "flag": True,
        "other": False,
        "seed": -1,
        "sizes": [1, 2],
        "version": "1.10",
        "last": 2,
    }
    assert [*map(long_flag, ["-O=2", "-O", "-cc.mode=3", "-tp=4", "-v", "-1"])] == [
        "--optimization-level=2",
        "--optimization-level",
        "--compilation-config.mode=3",
        "--tensor-parallel-size=4",
        "-v",
        "-1",
    ]


def documented() -> list[str]:
    """The flags of vLLM's in the commands `sluice serve` of the documents."""
    return [
        line.partition("sluice serve ")[2]
        for path in DOCUMENTS
        for block in blocks(path)
        for line in block.text.replace("\\\n", " ").splitlines()
        if line.startswith("sluice serve ")
    ]


@pytest.mark.vllm
def test_vllm_gets_the_arguments_that_its_own_parser_would_read() -> None:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from sluice.deploy.migration import _OWN, _split, command_words
    from sluice.replica.vllm.contract import located
    from sluice.replica.vllm.setup import _parsed
    from sluice.replica.vllm.support import ARGUMENTS

    parser = located(ARGUMENTS).make_arg_parser(FlexibleArgumentParser())
    for command in (*COMMANDS, "m -cc.mode 3 -cc.backend=inductor -O2 -dp 2"):
        model, *words = _split(command_words(command))[1]
        flags = parse_flags(words)
        both = parser.parse_args([model, *words]), _parsed({**flags, "model": model})
        for parsed in both:
            parsed.model = parsed.model_tag = None
            if parsed.kv_transfer_config is not None:
                parsed.kv_transfer_config.engine_id = None  # chosen by chance
        assert vars(both[0]) == vars(both[1])
    for line in documented():
        words = shlex.split(line, comments=True)
        names = {word[2:].partition("=")[0] for word in words if word.startswith("--")}
        own = {
            option[2:] for each in main.get_command(None, "serve").params for option in each.opts
        }
        unknown = names - own - {option[2:] for option in parser._option_string_actions}
        assert not unknown, line
    short = {
        option[1:]: {each[2:] for each in action.option_strings if each.startswith("--")}
        for action in parser._actions
        for option in action.option_strings
        if not option.startswith("--") and option != "-h"
    }
    assert short.keys() <= _SHORT.keys()
    assert all(_SHORT[name] in names for name, names in short.items())
    assert all(f"--{option}" in parser._option_string_actions for option in _OWN)


# Ray Serve LLM.


def from_ray(folder: Path, text: str) -> tuple[dict[str, Any], list[str]]:
    path = folder / "llm.yaml"
    path.write_text(text)
    return migrated("from-ray", str(path))


def test_the_file_of_the_document(tmp_path: Path) -> None:
    (text,) = marked(ROOT / "docs" / "migration.md", "check: ray-config")
    found, lacking = from_ray(tmp_path, text)
    assert found["engine"]["vllm_args"] == {"tensor-parallel-size": 2, "max-model-len": 8192}
    assert not lacking


def test_two_models_in_files_of_their_own(tmp_path: Path) -> None:
    """The standalone form of Ray's doc/source/serve/llm/quick-start.md."""
    (tmp_path / "models").mkdir()
    for size in ("0.5b", "1.5b"):
        (tmp_path / f"models/qwen-{size}.yaml").write_text(f"""
model_loading_config:
  model_id: qwen-{size}
  model_source: Qwen/Qwen2.5-{size.upper()}-Instruct
accelerator_type: A10G
deployment_config:
  autoscaling_config:
    min_replicas: 1
    max_replicas: 2
""")
    found, lacking = from_ray(
        tmp_path,
        """
applications:
- args:
    llm_configs:
        - models/qwen-0.5b.yaml
        - models/qwen-1.5b.yaml
  import_path: ray.serve.llm:build_openai_app
  name: llm_app
  route_prefix: "/"
""",
    )
    assert list(found["models"]) == ["qwen-0.5b", "qwen-1.5b"]
    assert found["models"]["qwen-0.5b"] == {
        "engine": {"model": "Qwen/Qwen2.5-0.5B-Instruct"},
        "replica": {
            "node_labels": {"ray.io/accelerator-type": "A10G"},
            "autoscaling": {"min_replicas": 1, "max_replicas": 2},
        },
    }
    assert not lacking


def test_one_model_with_arguments_of_its_engine(tmp_path: Path) -> None:
    """Ray's doc/source/llm/doc_code/serve/direct_streaming/direct_streaming_config.yaml, with a
    field of each of the other kinds in doc/source/serve/llm/user-guides/configuration.md."""
    found, lacking = from_ray(
        tmp_path,
        """
applications:
  - name: llm-direct-streaming
    route_prefix: /
    import_path: ray.serve.llm:build_openai_app
    args:
      llm_configs:
        - model_loading_config:
            model_id: qwen3.5-0.8b
            model_source: Qwen/Qwen3.5-0.8B
            tokenizer_source: Qwen/Qwen3.5-0.8B
          deployment_config:
            autoscaling_config: {min_replicas: 1, max_replicas: 4, target_ongoing_requests: 64}
            max_ongoing_requests: 64
            graceful_shutdown_timeout_s: 30
          engine_kwargs:
            trust_remote_code: true
            tensor_parallel_size: 1
            enable_auto_tool_choice: true
            tool_call_parser: qwen3_coder
            reasoning_parser: qwen3
            enable_lora: true
            disable_log_stats: false
          lora_config:
            dynamic_lora_loading_path: s3://my_dynamic_lora_path
            max_num_adapters_per_replica: 16
          runtime_env: {env_vars: {VLLM_USE_V1: "1"}}
  - name: other
    import_path: other:app
""",
    )
    assert found == {
        "engine": {
            "model": "Qwen/Qwen3.5-0.8B",
            "served_model_name": "qwen3.5-0.8b",
            "vllm_args": {
                "trust-remote-code": True,
                "tensor-parallel-size": 1,
                "enable-auto-tool-choice": True,
                "tool-call-parser": "qwen3_coder",
                "reasoning-parser": "qwen3",
                "enable-lora": True,
                "tokenizer": "Qwen/Qwen3.5-0.8B",
                "max-loras": 16,
            },
        },
        "replica": {
            "autoscaling": {"min_replicas": 1, "max_replicas": 4},
            "drain_timeout_s": 30,
        },
    }
    assert [line.split(": ")[:2] for line in lacking] == [
        ["applications", "other serves no language model"],
        ["qwen3.5-0.8b", "engine_kwargs.disable-log-stats"],
        ["qwen3.5-0.8b", "dynamic_lora_loading_path"],
        ["qwen3.5-0.8b", "max_ongoing_requests"],
        ["qwen3.5-0.8b", "autoscaling_config"],
        ["qwen3.5-0.8b", "runtime_env"],
    ]


def test_prefill_and_decode_become_pools(tmp_path: Path) -> None:
    """Ray's doc/source/serve/doc_code/pd_dissagregation/nixl_example.yaml."""
    found, lacking = from_ray(
        tmp_path,
        """
applications:
  - args:
      prefill_config:
        model_loading_config:
          model_id: meta-llama/Llama-3.1-8B-Instruct
        engine_kwargs:
          kv_transfer_config:
            kv_connector: NixlConnector
            kv_role: kv_producer
            engine_id: engine1
        deployment_config:
          autoscaling_config:
            min_replicas: 2
            max_replicas: 4
      decode_config:
        model_loading_config:
          model_id: meta-llama/Llama-3.1-8B-Instruct
        engine_kwargs:
          kv_transfer_config:
            kv_connector: NixlConnector
            kv_role: kv_consumer
            engine_id: engine2
        deployment_config:
          autoscaling_config:
            min_replicas: 6
            max_replicas: 10
    import_path: ray.serve.llm:build_pd_openai_app
    name: pd-disaggregation-nixl
    route_prefix: "/"
""",
    )
    model = "meta-llama/Llama-3.1-8B-Instruct"
    assert found == {
        "engine": {"model": model},
        "replica": {
            "pools": {
                "prefill": {"autoscaling": {"min_replicas": 2, "max_replicas": 4}},
                "decode": {"autoscaling": {"min_replicas": 6, "max_replicas": 10}},
            }
        },
    }
    assert not lacking


def test_a_bare_llm_config_and_what_is_none(tmp_path: Path) -> None:
    """The minimal configuration of Ray's user-guides/configuration.md, weights in a bucket."""
    found, lacking = from_ray(
        tmp_path,
        "model_loading_config: {model_id: qwen, model_source: {bucket_uri: 's3://my-bucket/qwen'}}",
    )
    assert found == {"engine": {"model": "qwen"}, "replica": ONE}
    assert [line.split(": ")[1] for line in lacking] == ["bucket_uri"]
    for text in (
        "applications: []",
        "applications: 3",
        "model_loading_config: {}",
        "llm_configs: [{}]",
        "llm_configs: abc",
        "llm_configs: [1]",
        "model_loading_config: abc",
        "{model_loading_config: {model_id: m}, engine_kwargs: abc}",
        "{model_loading_config: {model_id: m}, deployment_config: {autoscaling_config: auto}}",
        "{prefill_config: a, decode_config: b}",
    ):
        path = tmp_path / "wrong.yaml"
        path.write_text(text)
        result = run("from-ray", str(path))
        assert result.exit_code == Exit.FAILED and "sequence" not in result.stderr
    path.write_text("llm_configs: [&m {model_loading_config: {model_id: m}}, *m]")
    assert "two models have the model_id m" in run("from-ray", str(path)).stderr
