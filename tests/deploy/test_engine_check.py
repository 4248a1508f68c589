from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from textwrap import indent
from threading import Thread
from typing import Any

import huggingface_hub.constants
import pytest
import yaml
from click.testing import CliRunner

from sluice.deploy.cli import main
from sluice.deploy.config import check_model, engine_faults, parse_config, parser_words
from sluice.deploy.ray_start import free_port
from sluice.deploy.supervisor import Supervised
from sluice.replica.config import EngineConfig

SHORT = """
_:
- &PAIR {prefill: {}, decode: {}}
- &PREEMPTIVE {prefill: {engine: {preemption: true}}, decode: {}}
- &NGRAM {method: ngram, num_speculative_tokens: 2, prompt_lookup_max: 3}
- &MULTI {kv_connector: LMCacheMPConnector, kv_role: kv_both}
"""


def read(text: str) -> dict[str, Any]:
    """YAML in which the names of :data:`SHORT` are known."""
    found: dict[str, Any] = yaml.safe_load(f"{SHORT}it:\n{indent(text, '  ')}")["it"]
    return found


PREEMPTION = read("preemption: true")

REFUSED_BY_VLLM = [
    # Arguments of vLLM, and what is said of them.
    ("max-modellen: 512", "did you mean max-model-len"),
    ("max-model: 512", "max-model is no option"),
    ("max-num-seqs: many", "max-num-seqs: invalid int"),
    ("{tensor-parallel-size: '1', seed: 1.5}", "seed: invalid"),
    ("max-model-len: [64, 32]", "'32' is one value too"),
    ("enable-lora: 'yes'", "enable-lora.*'yes'"),
    ("max-num-seqs: true", "max-num-seqs: expected one"),
    ("dtype: float33", "dtype: invalid choice"),
    ("limit-mm-per-prompt: x", "limit-mm-per-prompt"),
    ("enable-auto-tool-choice: true", "tool-call-parser"),
    # Names that vLLM looks up only once the engine loads.
    (
        "{enable-auto-tool-choice: true, tool-call-parser: nope}",
        "tool-call-parser: there is no 'nope', only .*hermes",
    ),
    ("tool-call-parser: nope", "tool-call-parser: there is no 'nope'"),
    (
        "{tool-parser-plugin: /no/such.py, tool-call-parser: nope}",
        "tool-call-parser: there is no 'nope'",
    ),
    ("reasoning-parser: nope", "reasoning-parser: there is no 'nope', only .*qwen3"),
    (
        "structured-outputs-config: {reasoning_parser: nope}",
        "reasoning-parser: there is no 'nope'",
    ),
    ("load-format: nope", "load-format: .*nope"),
    ("config-format: nope", "config format `nope`"),
    ("tokenizer-mode: nope", "tokenizer-mode: .*nope"),
    ("quantization: nope", "quantization method: nope"),
    ("attention-backend: NOPE", "backend: 'NOPE'"),
    ("worker-cls: no_module.Worker", "worker-cls: .*no_module"),
    ("worker-extension-cls: no_module.Extension", "worker-extension-cls: .*no_module"),
    ("distributed-executor-backend: no_module.Executor", "no_module"),
    ("logits-processors: ['no_module:Processor']", "logits-processors: .*no_module"),
    ("kv-transfer-config: {kv_connector: Nope, kv_role: kv_both}", "connector type: Nope"),
    ("ec-transfer-config: {ec_connector: Nope, ec_role: ec_both}", "ec-transfer-config: .*Nope"),
    ("io-processor-plugin: nope", "io-processor-plugin: nope is not installed"),
    ("hf-overrides: {architectures: [Nope]}", "'Nope'"),
    ("chat-template: /no/such", "/no/such"),
    ("max-model-len: 99999999", "max_model_len"),
    # docs/deployment.md
    ("distributed-executor-backend: ray", "not be ray"),
    ("kv-offloading-size: 2", "OffloadingConnector .* CPU build"),
    (
        "kv-transfer-config: {kv_connector: LMCacheConnectorV1, kv_role: kv_both}",
        "LMCacheConnectorV1 .* CPU build",
    ),
    # docs/speculation.md
    (
        "speculative-config: {<<: *NGRAM, num_speculative_tokens_per_batch_size: [[1, 4, 2]]}",
        "the plan chooses the lengths",
    ),
    ("{speculative-config: *NGRAM, async-scheduling: true}", "async-scheduling must be False"),
    # What plans cannot execute.
    ("enable-chunked-prefill: false", "chunked prefill must be on"),
    ("long-prefill-token-threshold: 4", "threshold must be 0"),
]
REFUSED_WITH_PREEMPTION = [
    ("{decode-context-parallel-size: 2, tensor-parallel-size: 2}", "decode.context"),
    ("enable-expert-parallel: true", "expert"),  # vLLM's own rule comes first: there are none
    ("async-scheduling: true", "async-scheduling must be False"),
    ("cpu-offload-gb: 1", "must not be offload"),
]
TAKEN = [
    "vllm_args: {max_model_len: 512, seed: -5, enable-prefix-caching: false}",
    "vllm_args: {max-model-len: 1k, gpu-memory-utilization: 0.5}",
    "preemption: true",
    """
    vllm_args:
      enable-auto-tool-choice: true
      tool-call-parser: hermes
      reasoning-parser: qwen3
      tokenizer-mode: hf
      load-format: safetensors
      logits-processors: ["vllm.v1.sample.logits_processor.builtin:MinTokensLogitsProcessor"]
    """,
    "vllm_args: {speculative-config: *NGRAM}",
    "transfer: {connector: tcp}",
]


@pytest.mark.vllm
def test_vllm_is_asked_before_anything_starts() -> None:
    bad = [({"vllm_args": read(args)}, says) for args, says in REFUSED_BY_VLLM]
    bad += [
        ({**PREEMPTION, "vllm_args": read(args)}, says) for args, says in REFUSED_WITH_PREEMPTION
    ]
    engines = {f"bad-{n}": engine for n, (engine, _) in enumerate(bad)}
    engines |= {f"good-{n}": read(engine) for n, engine in enumerate(TAKEN)}
    config = parse_config({"models": {name: {"engine": each} for name, each in engines.items()}})
    found = dict(fault.split(": ", 1) for fault in engine_faults(config))
    for number, (engine, message) in enumerate(bad):
        said = found.pop(f"models.bad-{number}.engine", "nothing")
        assert re.search(message, said), f"{engine}: {said}"
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
def test_a_misspelt_flag_is_refused_before_ray_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Supervised, "__init__", lambda *_: pytest.fail("it starts"))
    flags = ["--port", str(free_port()), "--max-model-length", "4096", "--seed", "0"]
    result = CliRunner().invoke(main, ["serve", *flags])
    assert result.exit_code == 1
    assert "max-model-length is no option; did you mean max-model-len" in result.output


@pytest.mark.vllm
def test_the_sources_of_vllms_parser_name_all_of_its_flags() -> None:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from sluice.replica.vllm.contract import located
    from sluice.replica.vllm.support import ARGUMENTS

    cli = located(ARGUMENTS)
    parser = cli.make_arg_parser(FlexibleArgumentParser(allow_abbrev=False))
    names = {each[2:] for each in parser._option_string_actions if each.startswith("--")}
    assert len(names) > 100
    assert not {name for name in names if not name.startswith("no-")} - parser_words()


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
    assert "vLLM is not installed here: install sluice-serve[vllm]" in result.output
    assert "starting Ray" not in result.output


def test_what_two_settings_say_of_an_engine_is_told_by_one_of_them() -> None:
    with pytest.raises(ValueError, match="max-loras"):
        EngineConfig(vllm_args={"lora-modules": ["a=b", "c=d"], "max-loras": 1})


SENDING = "engine: {transfer: {connector: tcp}}\nreplica: {pools: *PREEMPTIVE}"
EXCLUDED = [
    # A configuration, what is said of it, and what that allows in its place.
    (
        "engine: {preemption: true, transfer: {connector: tcp}}",
        "engine.preemption: must be false, or engine.transfer left out",
        ["engine: {preemption: false, transfer: {connector: tcp}}", "engine: {preemption: true}"],
    ),
    (
        "{engine: {preemption: true}, replica: {elastic: true}}",
        "engine.preemption: must be false, or replica.elastic left out",
        ["{engine: {preemption: false}, replica: {elastic: true}}", "engine: {preemption: true}"],
    ),
    (
        "{engine: {preemption: true}, replica: {pools: *PAIR}}",
        "decode.engine.preemption: must be false, or pools of prefill and decode .*"
        r"replica\.pools\.prefill\.engine\.preemption\), with engine\.transfer\.connector tcp",
        ["engine: {preemption: true}", SENDING],
    ),
    (
        "replica: {pools: *PREEMPTIVE}",
        "must be false, or engine.transfer.connector tcp, not auto",
        ["replica: {pools: {prefill: {engine: {preemption: false}}, decode: {}}}", SENDING],
    ),
    (
        "engine: {transfer: {connector: tcp}, vllm_args: {speculative-config: *NGRAM}}\n"
        "replica: {pools: *PREEMPTIVE}",
        r"speculative-config: leave that out there \(speculative-config: null\)",
        [
            "engine: {transfer: {connector: tcp}, vllm_args: {speculative-config: *NGRAM}}\n"
            "replica: {pools: {decode: {}, prefill: {engine: "
            "{preemption: true, vllm_args: {speculative-config: null}}}}}"
        ],
    ),
    (
        "engine: {preemption: true, vllm_args: {kv-offloading-size: 2}}",
        "must be false with kv-offloading-size in vllm_args",
        ["engine: {preemption: false, vllm_args: {kv-offloading-size: 2}}"],
    ),
    (
        "engine: {transfer: {}, vllm_args: {kv-offloading-size: 2}}",
        "engine.vllm_args: kv-offloading-size excludes engine.transfer: .* leave one out",
        ["engine: {transfer: {}}", "engine: {vllm_args: {kv-offloading-size: 2}}"],
    ),
    (
        "{engine: {vllm_args: {kv-transfer-config: *MULTI}}, replica: {pools: *PAIR}}",
        "kv-transfer-config excludes pools of prefill and decode replicas",
        ["engine: {vllm_args: {kv-transfer-config: *MULTI}}", "replica: {pools: *PAIR}"],
    ),
    (
        "{engine: {vllm_args: {kv-transfer-config: *MULTI}}, replica: {elastic: true}}",
        "kv-transfer-config excludes replica.elastic",
        ["replica: {elastic: true}"],
    ),
    (
        "{engine: {vllm_args: {distributed-executor-backend: ray}}, replica: {max_per_node: 1}}",
        "max_per_node: cannot be set with distributed-executor-backend ray",
        [
            "engine: {vllm_args: {distributed-executor-backend: ray}}",
            "replica: {max_per_node: 1}",
        ],
    ),
    (
        "replica: {node_labels: {ray.io/accelerator-type: TPU-V4}}",
        "TPUs",
        ["replica: {node_labels: {ray.io/accelerator-type: L4}}"],
    ),
    (
        "engine: {preemption: true, kind: simulated}",
        "preemption must be false: only vLLM's",
        ["engine: {preemption: false, kind: simulated}"],
    ),
    (
        "engine: {preemption: true, vllm_args: {speculative-config: "
        "{model: small/draft, num_speculative_tokens: 2}}}",
        "must be false with drafts by a draft model, or the method of speculative-config ngram",
        ["engine: {preemption: true, vllm_args: {speculative-config: *NGRAM}}"],
    ),
    (
        "engine: {preemption: true, adapters_dir: /adapters, vllm_args: {enable-lora: true}}",
        "adapters_dir needs preemption: false",
        ["engine: {adapters_dir: /adapters, vllm_args: {enable-lora: true}}"],
    ),
]


@pytest.mark.parametrize(("text", "message", "instead"), EXCLUDED)
def test_features_that_exclude_each_other_say_what_is_allowed(
    text: str, message: str, instead: list[str]
) -> None:
    with pytest.raises(ValueError, match="(?s)" + message):
        parse_config(read(text))
    for each in instead:
        parse_config(read(each))


def joined(one: Any, other: Any) -> Any:
    if not isinstance(one, dict) or not isinstance(other, dict):
        return other
    return one | {name: joined(one.get(name), each) for name, each in other.items()}


@pytest.mark.parametrize(
    ("parallel", "excluded", "says"),
    [
        ("pipeline", "engine: {transfer: {}}", "engine.transfer"),
        ("pipeline", "replica: {elastic: true}", "replica.elastic"),
        ("pipeline", "replica: {pools: *PAIR}", "pools of prefill and decode replicas"),
        ("pipeline", "engine: {vllm_args: {speculative-config: *NGRAM}}", "speculative-config"),
        ("pipeline", "engine: {vllm_args: {kv-offloading-size: 2}}", "kv-offloading-size"),
        ("pipeline", "engine: {vllm_args: {kv-transfer-config: *MULTI}}", "kv-transfer-config"),
        ("pipeline", "engine: {preemption: true}", "preemption"),
        ("data", "engine: {transfer: {}}", "leave out engine.transfer"),
        ("data", "replica: {elastic: true}", "and replica.elastic"),
        ("data", "replica: {pools: *PAIR}", "pools for prefill and decode"),
        ("data", "engine: {vllm_args: {speculative-config: *NGRAM}}", "speculative-config must"),
        ("data", "engine: {preemption: true}", "engine.preemption must be off"),
        ("data", "engine: {vllm_args: {distributed-executor-backend: ray}}", "may not be ray"),
        ("data", "engine: {vllm_args: {kv-transfer-config: *MULTI}}", "kv-transfer-config must"),
        ("data", "replica: {autoscaling: {max_replicas: 2}}", "replica.autoscaling must be off"),
    ],
)
def test_what_stages_and_ranks_exclude_is_allowed_without_them(
    parallel: str, excluded: str, says: str
) -> None:
    alone, other = read(f"engine: {{vllm_args: {{{parallel}-parallel-size: 2}}}}"), read(excluded)
    with pytest.raises(ValueError, match=rf"(?s){parallel}-parallel-size above 1.*{says}"):
        parse_config(joined(alone, other))
    parse_config(alone), parse_config(other)


# Model check.


def checked(model: str | Path, **more: Any) -> None:
    check_model(EngineConfig(model=str(model), **more))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A hub that answers everything with ``hub.answer``: a status and the error code of the hub."""

    class Hub(BaseHTTPRequestHandler):
        answer = (200, "")

        def do_GET(self) -> None:
            status, code = Hub.answer
            body = b'{"id": "some/model", "modelId": "some/model", "siblings": []}'
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            if code:
                self.send_header("x-error-code", code)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr("huggingface_hub.hf_api.HfApi.__init__", _with_endpoint(address))
    yield Hub
    server.shutdown()
    server.server_close()


def _with_endpoint(address: str) -> Callable[..., None]:
    init = huggingface_hub.HfApi.__init__

    def patched(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **{**kwargs, "endpoint": address})

    return patched


@pytest.mark.parametrize("model", ["/no/such/model", "./no-such-model", "~/no-such-model"])
def test_a_folder_that_is_not_there_is_named(model: str) -> None:
    with pytest.raises(ValueError, match=f"there is no folder {model}"):
        checked(model)


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no model: no config\.json"):
        checked(tmp_path)
    (tmp_path / "config.json").touch()
    checked(tmp_path)


def test_a_latency_profile_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no file"):
        checked("local", latency_profile=tmp_path / "no.json")


def test_what_needs_no_files_is_not_looked_for() -> None:
    checked("local")
    checked("/no/such/model", kind="simulated")
    checked("s3://bucket/model")  # vLLM's loaders know where that is


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (404, "RepoNotFound", "the hub has no model some/model"),
        (401, "", "the hub has no model some/model, or needs HF_TOKEN"),
        (403, "GatedRepo", "granted access: set HF_TOKEN"),
        (404, "RevisionNotFound", "has no revision v9"),
    ],
)
def test_a_model_that_the_hub_does_not_give_is_named(
    hub: Any, status: int, code: str, message: str
) -> None:
    hub.answer = (status, code)
    with pytest.raises(ValueError, match=message) as caught:
        checked("some/model", vllm_args={"revision": "v9"})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("status", [200, 500])
def test_a_model_of_the_hub_is_left_to_vllm(hub: Any, status: int) -> None:
    hub.answer = (status, "")
    checked("some/model")


def test_a_copy_in_the_cache_needs_no_hub(hub: Any, tmp_path: Path) -> None:
    hub.answer = (404, "RepoNotFound")
    snapshot = tmp_path / "models--some--model" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").touch()
    refs = tmp_path / "models--some--model" / "refs"
    refs.mkdir()
    (refs / "main").write_text("0123")
    checked("some/model", vllm_args={"download_dir": str(tmp_path)})


def test_without_the_hub_a_model_that_is_not_here_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="HF_HUB_OFFLINE forbids"):
        checked("some/model", vllm_args={"download-dir": str(tmp_path)})


def test_sluice_serve_says_so_before_it_starts_ray(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def no_ray(*_: object) -> None:
        raise AssertionError("Ray was started")

    monkeypatch.setattr("sluice.deploy.local._start_ray", no_ray)
    config = tmp_path / "sluice.yaml"
    config.write_text(
        "models:\n  one: {engine: {kind: simulated}}\n  two: {engine: {model: /no/such}}\n"
    )
    for arguments in (["--model", "/no/such"], ["--config", str(config)]):
        result = CliRunner().invoke(main, ["serve", "--port", str(free_port()), *arguments])
        assert result.exit_code == 1
        assert "there is no folder /no/such" in result.output
        assert "Traceback" not in result.output
