"""The backend of structured output that enforces a constraint: the same in the check of a grammar
and in the engine.

With ``auto`` vLLM chooses one for each request, but its engine has one only, that of its first
request. Here the engine has those that are chosen.
"""

from __future__ import annotations

import copy
import json
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final

from sluice.replica.grammar import schema as schemas

_OPTIONS: Final = ("whitespace_pattern", "disable_any_whitespace", "disable_additional_properties")
"""Options of a request that vLLM takes and ignores."""

_NO_END: Final = "no text can end: a rule of the grammar always contains itself"

_WORDS: Final = tuple(
    (re.compile(said), meant)
    for said, meant in (
        (r"\[[\d:]+\] \S+:\d+: ", ""),  # the time, and a place in xgrammar's code
        (r"^Grammar error: (?=regex parse error|lookarounds)", "pattern: "),
        (r"^Grammar error: (?=Resource|Pointer)", "$ref: "),
        (r"^Grammar error: ", ""),
        ("patternProperty regexes", "patternProperties:"),
        ("min/maxProperties", "minProperties and maxProperties are"),
        (r"Unimplemented keys: \[(.*)\]", r"not enforced in a JSON schema: \1"),
        (r"oneOf constraints are .*", "not enforced: oneOf of schemas that may overlap"),
    )
)
"""What backends say, in words for a client."""

_LITERAL: Final = re.compile(r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]')
_OPTIONAL: Final = re.compile(r"[\w.-]+\{0, *-?\d*\}")
_NAME: Final = re.compile(r"[\w.-]+")


def constrain(sampling_params: Any, vllm_config: Any, tokenizer: Any) -> None:
    """Choose the backend of a request's constraint, and check the constraint with it.

    Raises:
        ValueError, vllm.exceptions.VLLMClientError: it is malformed, or the backend does not
            enforce all of it; the message names what.
        Exception: it is malformed; of many types, by the backend.
    """
    params = sampling_params.structured_outputs
    for option in _OPTIONS:
        if getattr(params, option, None):
            raise ValueError(f"{option} cannot be set for a request")
    possible = usable(vllm_config, tokenizer)
    if params.json is not None:
        backend = _checked_schema(params.json, possible)
    else:
        # xgrammar ignores anchors within a pattern, and escapes that it does not know.
        backend = possible[-1] if params.regex is not None else possible[0]
        _check_other(params, backend)
    config = vllm_config.structured_outputs_config
    params._backend = None
    try:
        sampling_params._validate_structured_outputs(
            vllm_config.model_config, replace(config, backend=backend), tokenizer
        )
    except Exception as error:
        raise ValueError(_message(error)) from error


def usable(vllm_config: Any, tokenizer: Any) -> tuple[str, ...]:
    """The backends that the engine may use, the preferred one first; all have masks of one size."""
    from vllm.utils.mistral import is_mistral_tokenizer
    from vllm.v1.structured_output.backend_guidance import GuidanceBackend

    configured = vllm_config.structured_outputs_config.backend
    if configured != "auto":
        return (configured,)
    if is_mistral_tokenizer(tokenizer):
        # The tool calls of these models are a grammar for guidance.
        return ("guidance",) if tokenizer.is_tekken else ("xgrammar",)
    if GuidanceBackend.is_tokenizer_supported(tokenizer) and (
        len(tokenizer) <= vllm_config.model_config.get_vocab_size()
    ):
        return ("xgrammar", "guidance")
    return ("xgrammar",)


def use(params: Any, backend: str) -> None:
    """Have the engine enforce a checked constraint with ``backend``."""
    if backend == "xgrammar" and params.choice:
        from vllm.v1.structured_output.utils import choice_as_grammar

        params.grammar, params.choice = choice_as_grammar(params.choice), None
    params._backend = backend


def backend_type(name: str) -> Any:
    """vLLM's class of a backend."""
    if name == "xgrammar":
        from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

        return XgrammarBackend
    if name == "guidance":
        from vllm.v1.structured_output.backend_guidance import GuidanceBackend

        return GuidanceBackend
    if name == "outlines":
        from vllm.v1.structured_output.backend_outlines import OutlinesBackend

        return OutlinesBackend
    from vllm.v1.structured_output.backend_lm_format_enforcer import LMFormatEnforcerBackend

    return LMFormatEnforcerBackend


def by_backend(manager: Any) -> Callable[[Any], Any]:
    """What compiles a request's grammar, of vLLM's ``StructuredOutputManager``, with the backend
    that was chosen for the request. It is called in several threads."""
    create = type(manager)._create_grammar
    managers: dict[str, Any] = {}
    lock = threading.Lock()

    def compiled(request: Any) -> Any:
        name = request.sampling_params.structured_outputs._backend
        with lock:
            if name not in managers:
                kind, own = backend_type(name), copy.copy(manager)
                if not isinstance(manager.backend, kind):
                    own.backend = kind(
                        manager.vllm_config,
                        tokenizer=manager.tokenizer,
                        vocab_size=manager.vllm_config.model_config.get_vocab_size(),
                    )
                managers[name] = own
        return create(managers[name], request)

    return compiled


def _checked_schema(given: Any, usable: tuple[str, ...]) -> str:
    """The first of the ``usable`` backends that enforces all of a JSON schema."""
    schema = json.loads(given) if isinstance(given, str) else given
    _check_schema(schema)
    for backend in usable:
        faults = _not_enforced(schema, backend)
        if not faults:
            return backend
    raise ValueError(f"not enforced in a JSON schema: {', '.join(faults)}")


def _not_enforced(schema: Any, backend: str) -> list[str]:
    if backend == "guidance":
        return schemas.not_by_guidance(schema)
    by_xgrammar = backend == "xgrammar"
    return schemas.not_by_xgrammar(schema) if by_xgrammar else schemas.not_by_others(schema)


def _check_schema(schema: Any) -> None:
    """Refuse what is no JSON schema, and what no finite text obeys."""
    from jsonschema import Draft202012Validator, FormatChecker, SchemaError
    from jsonschema.validators import validator_for

    try:
        # Backends have their own regular expressions.
        validator_for(schema, default=Draft202012Validator).check_schema(
            schema, format_checker=FormatChecker(formats=())
        )
    except SchemaError as error:
        raise ValueError(f"{error.json_path} of the JSON schema: {error.message}") from error
    if schemas.endless(schema):
        raise ValueError("no text can end: by $ref the JSON schema always contains itself")


def _check_other(params: Any, backend: str) -> None:
    """Refuse what the backend would take and not enforce."""
    if params.regex is not None and backend == "guidance":
        if schemas.unlike_elsewhere(params.regex):
            raise ValueError("regex with [, && or -- in brackets is not enforced")
    elif params.grammar is not None:
        if _endless(params.grammar):
            raise ValueError(_NO_END)
    elif params.structural_tag is not None:
        _check_tag(json.loads(params.structural_tag), backend)


def _check_tag(tag: Any, backend: str) -> None:
    legacy = isinstance(tag, dict) and "structures" in tag
    if backend != "xgrammar" and not legacy:
        raise ValueError(
            f"structural tags, and so tools that must be called, need the backend xgrammar; this "
            f"engine has {backend}"
        )
    for node in _objects(tag):
        if node.get("any_order"):
            raise ValueError("any_order is not supported: required properties may be missing")
        if isinstance(node.get("grammar"), str) and _endless(node["grammar"]):
            raise ValueError(_NO_END)
        schema = node.get("schema") if legacy else node.get("json_schema")
        if isinstance(schema, dict | bool):
            _check_schema(schema)
            faults = _not_enforced(schema, backend)
            if faults:
                raise ValueError(
                    "not enforced in a JSON schema of a tool or a structural tag: "
                    + ", ".join(faults)
                )


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    """All objects in a value from JSON."""
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from _objects(each)


def _endless(grammar: str) -> bool:
    """Whether no text of a grammar ends. One that xgrammar cannot read has another fault."""
    from vllm.v1.structured_output.utils import grammar_is_likely_lark
    from xgrammar import Grammar

    try:
        read = Grammar.from_lark if grammar_is_likely_lark(grammar) else Grammar.from_ebnf
        plain = str(read(grammar))
    except (AttributeError, RuntimeError, ValueError):
        return False
    # Each line is a rule: alternatives of sequences, without any in them.
    rules = dict(line.split(" ::= ", 1) for line in plain.splitlines() if " ::= " in line)
    needed = {
        name: [
            {each for each in _NAME.findall(part) if each in rules}
            for part in _OPTIONAL.sub("", _LITERAL.sub("", body)).split("|")
        ]
        for name, body in rules.items()
    }
    done: set[str] = set()
    while new := {
        name for name, parts in needed.items() if name not in done and any(p <= done for p in parts)
    }:
        done |= new
    return "root" in rules and "root" not in done


def _message(error: Exception) -> str:
    """What is wrong, for a client."""
    text = str(error)
    if error.__cause__ is not None and str(error.__cause__) not in text:
        text = f"{text} {error.__cause__}"
    for said, meant in _WORDS:
        text = said.sub(meant, text)
    return " ".join(text.split())
