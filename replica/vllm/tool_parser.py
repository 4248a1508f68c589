"""Which of vLLM's tool parsers reads the calls of a model.

A chat template shows the model the format of its calls, so the format follows from the template,
whatever the model is called. vLLM itself wants its name.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Final

logger = logging.getLogger(__name__)

_MARKS: Final[tuple[tuple[str, tuple[str, ...]], ...]] = (
    ("openai", ("<|channel|>", "commentary")),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    # DeepSeek-V3 and R1 put the arguments into a fence, later versions do not.
    ("deepseek_v3", ("<\uff5ctool▁calls▁begin\uff5c>", "```json")),
    ("deepseek_v31", ("<\uff5ctool▁calls▁begin\uff5c>",)),
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("glm45", ("<tool_call>", "<arg_key>")),
    ("qwen3_xml", ("<tool_call>", "<function=", "<parameter=")),
    ("hermes", ("<tool_call>", "arguments")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("llama3_json", ("<|eot_id|>", "parameters", "function")),
)
"""vLLM's names of parsers, and what a template of their format contains; the first that fits
counts."""


def parser_of(template: str) -> str | None:
    """The tool parser for a chat template; ``None`` if its format is not known or has no tools."""
    if "tools" not in template:
        return None
    return next((name for name, marks in _MARKS if all(m in template for m in marks)), None)


def choose_parser(arguments: Any, tokenizer: Any) -> None:
    """Let the model call tools, in vLLM's parsed ``arguments``, unless they say how it does."""
    if arguments.enable_auto_tool_choice or arguments.tool_call_parser or tokenizer is None:
        return
    template = _template(arguments.chat_template, tokenizer)
    found = parser_of(template)
    if found is not None and _exists(found):
        arguments.enable_auto_tool_choice, arguments.tool_call_parser = True, found
        logger.info("tool calls are read by vLLM's parser %s, by the chat template", found)
    elif "tools" in template:
        logger.warning(
            "the chat template has tools in a format that is not known here, so requests with "
            "tools are refused: set enable-auto-tool-choice and tool-call-parser in "
            "engine.vllm_args"
        )


def _template(stated: Any, tokenizer: Any) -> str:
    """The template for requests with tools; empty without any."""
    if stated:
        # A file, or the template itself, as vLLM takes it.
        is_file = "{" not in str(stated) and Path(stated).is_file()
        return Path(stated).read_text(encoding="utf-8") if is_file else str(stated)
    own = getattr(tokenizer, "chat_template", None)
    if isinstance(own, dict):  # several, by use
        own = own.get("tool_use", own.get("default"))
    return own if isinstance(own, str) else ""


def _exists(parser: str) -> bool:
    """Whether this version of vLLM has it."""
    from vllm.tool_parsers import ToolParserManager

    try:
        return ToolParserManager.get_tool_parser(parser) is not None
    except (KeyError, ImportError):
        return False
