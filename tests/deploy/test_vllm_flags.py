"""vLLM's flags as `sluice serve` takes them."""

from __future__ import annotations

import shlex
from typing import Any

import click
import pytest

from sluice.deploy.cli import main
from sluice.deploy.commands.serve import _OWN, _add_vllm
from sluice.replica.vllm_args import _SHORT, long_flag, parse_flags
from tests.documents import DOCUMENTS, blocks

COMMANDS = (
    "mistralai/Mistral-7B-Instruct-v0.3 --trust-remote-code --enable-chunked-prefill "
    "--max_num_batched_tokens 1024",
    "ibm-granite/granite-speech-3.3-2b --max-model-len 2048 --enable-lora --max-lora-rank 64 "
    """--default_mm_loras '{"audio":"ibm-granite/granite-speech-3.3-2b"}'""",
    "lukealonso/MiniMax-M2.7-NVFP4 --tensor-parallel-size 2 --enable-auto-tool-choice "
    "--tool-call-parser minimax_m2 --enable_expert_parallel --max-model-len 130k",
    "openai/gpt-oss-120b --tensor-parallel-size=1 --block-size=128 --kv-transfer-config "
    """'{"kv_connector":"NixlConnector", "kv_role":"kv_producer"}' """
    "--no-disable-hybrid-kv-cache-manager --gpu-memory-utilization=0.9",
    "m -cc.mode 3 -cc.backend=inductor -O2 -dp 2",
)
"""As in the documents of vLLM and llm-d."""


def overrides(command: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    model, *words = shlex.split(command)
    _add_vllm(found, model, words, alone=True)
    return found


def test_what_sluice_has_itself_goes_to_its_own_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "of-vllm")
    command = "m --host 0.0.0.0 --port 1 --served-model-name a --api-server-count 2 -O3 -tp 2"
    assert overrides(command) == {
        "engine": {
            "model": "m",
            "served_model_name": "a",
            "vllm_args": {"optimization-level": 3, "tensor-parallel-size": 2},
        },
        "replica": {"count": 1},
        "router": {"host": "0.0.0.0", "port": 1, "api_keys": ["of-vllm"], "replicas": 2},
    }
    keyed = overrides("m --api-key 1234 5678 --shutdown-timeout=60")
    assert keyed["router"] == {"api_keys": ["1234", "5678"]}
    assert keyed["replica"] == {"count": 1, "drain_timeout_s": 60}


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("m run", "'run' belongs to no flag: MODEL comes first"),
        ("m --api-key --port 8000", "--api-key needs a value"),
        ("m --compilation-config.a 1 --compilation-config.a.b 1", "a is both"),
        ("m --served-model-name a b", "--served-model-name b: one name"),
        ("m --scheduler-cls x", "--scheduler-cls: set engine.policy"),
    ],
)
def test_a_command_that_cannot_be_read_is_refused(command: str, says: str) -> None:
    with pytest.raises(click.UsageError, match=says):
        overrides(command)


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

    from sluice.replica.vllm.contract import located
    from sluice.replica.vllm.setup import _parsed
    from sluice.replica.vllm.support import ARGUMENTS

    parser = located(ARGUMENTS).make_arg_parser(FlexibleArgumentParser())
    for command in COMMANDS:
        model, *words = shlex.split(command)
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
