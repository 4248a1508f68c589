"""The parser of tool calls, by the chat template: formats of models, shortened."""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace

import pytest

from sluice.replica.vllm.setup import choose_parser, parser_of

CALLS = "<\uff5ctool▁calls▁begin\uff5c><\uff5ctool▁call▁begin\uff5c>"
TEMPLATES = {
    "hermes": "{% if tools %}<tools>{{ tools | tojson }}</tools> return "
    '<tool_call>\n{"name": <name>, "arguments": <json-object>}\n</tool_call>{% endif %}',
    "qwen3_xml": "{% if tools %}<tool_call>\n<function=example>\n<parameter=p>\n1\n</parameter>\n"
    "</function>\n</tool_call>{{ tool_call.arguments }}{% endif %}",
    "glm45": "{% if tools %}<tool_call>{name}\n<arg_key>k</arg_key>\n<arg_value>v</arg_value>"
    "</tool_call>{{ arguments }}{% endif %}",
    "deepseek_v3": "{% if tools %}" + CALLS + "function\uff5cf\n```json\n{}\n```{% endif %}",
    "deepseek_v31": "{% if tools %}" + CALLS + "f\uff5c{}{% endif %}",
    "kimi_k2": "{% if tools %}<|tool_calls_section_begin|><|tool_call_begin|>{% endif %}",
    "minimax_m2": '{% if tools %}<minimax:tool_call><invoke name="f">{% endif %}',
    "mistral": "{% if tools %}[AVAILABLE_TOOLS]{{ tools }}[TOOL_CALLS]{% endif %}",
    "openai": "{% if tools %}<|start|>assistant<|channel|>commentary to=functions.f{% endif %}",
    "llama3_json": '{% if tools %}Respond with JSON for a function call: {"name": function name, '
    '"parameters": {}}.<|eot_id|>{% endif %}',
}
UNKNOWN = "{% if tools %}call({{ tools }}){% endif %}"


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_format_of_a_template_names_its_parser(name: str) -> None:
    assert parser_of(TEMPLATES[name]) == name


def test_a_template_without_tools_has_none() -> None:
    assert parser_of("{{ messages }}<tool_call>arguments") is None
    assert parser_of(UNKNOWN) is None


def chosen(template: object, **stated: object) -> tuple[object, object]:
    pytest.importorskip("vllm")
    given = {"enable_auto_tool_choice": False, "tool_call_parser": None, "chat_template": None}
    arguments = Namespace(**{**given, **stated})
    choose_parser(arguments, SimpleNamespace(chat_template=template))
    return arguments.enable_auto_tool_choice, arguments.tool_call_parser


@pytest.mark.vllm
def test_what_is_stated_stays(caplog: pytest.LogCaptureFixture, tmp_path) -> None:
    hermes = TEMPLATES["hermes"]
    assert chosen(hermes) == (True, "hermes")
    assert chosen({"default": UNKNOWN, "tool_use": hermes}) == (True, "hermes")
    assert chosen(hermes, tool_call_parser="xlam") == (False, "xlam")
    assert chosen(None) == (False, None)
    (tmp_path / "t.jinja").write_text(TEMPLATES["mistral"])
    assert chosen(hermes, chat_template=str(tmp_path / "t.jinja")) == (True, "mistral")
    assert chosen(hermes, chat_template=TEMPLATES["kimi_k2"]) == (True, "kimi_k2")
    assert "vllm_args" not in caplog.text
    assert chosen(UNKNOWN) == (False, None)
    assert "set enable-auto-tool-choice and tool-call-parser" in caplog.text
