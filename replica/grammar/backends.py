"""Choose the backend that enforces a constraint, for the check of a grammar and for the engine.

With ``auto`` vLLM's engine has only the backend of its first request; here it has all chosen
ones."""

from __future__ import annotations

import copy
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final
from urllib.parse import unquote

# What the backends of structured output enforce of JSON Schema 2020-12.
#
# guidance refuses by itself what it does not enforce, with few exceptions. The others ignore it,
# so what they enforce is listed here. Only what a text can break counts: annotations such as
# ``title``, and keywords that JSON Schema does not have, are ignored, as JSON Schema says.

_OBJECTS: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS: Final = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE: Final = (
    *("items", "contains", "additionalProperties", "propertyNames", "not", "if", "then", "else"),
    *("unevaluatedItems", "unevaluatedProperties", "contentSchema", "additionalItems"),
)
"""Keywords that hold schemas: by name, in a list, or one."""

XGRAMMAR: Final[Mapping[str, frozenset[str]]] = {
    "pattern": frozenset({"string"}),
    "format": frozenset({"string"}),
    "minimum": frozenset({"integer", "number"}),
    "maximum": frozenset({"integer", "number"}),
    "exclusiveMinimum": frozenset({"integer", "number"}),
    "exclusiveMaximum": frozenset({"integer", "number"}),
    "items": frozenset({"array"}),
    "prefixItems": frozenset({"array"}),
    "minItems": frozenset({"array"}),
    "maxItems": frozenset({"array"}),
    "properties": frozenset({"object"}),
    "required": frozenset({"object"}),
    "additionalProperties": frozenset({"object"}),
}
"""Keywords that xgrammar enforces beside ``type``, and for which types."""

XGRAMMAR_ALONE: Final = ("$ref", "anyOf", "allOf", "enum", "const")
"""Keywords that xgrammar enforces only alone; ``type`` may be beside ``enum`` and ``const``."""

FORMATS: Final = frozenset({"duration", "email", "ipv6", "time", "uri", "uuid"})
"""Formats that xgrammar enforces."""

CONTENT: Final = ("contentEncoding", "contentMediaType", "contentSchema")
"""Keywords that no backend enforces and guidance ignores."""

_OTHER: Final = frozenset(
    {
        *CONTENT,
        *("$anchor", "$dynamicAnchor", "$dynamicRef", "$id", "$recursiveRef", "additionalItems"),
        *("contains", "dependencies", "dependentRequired", "dependentSchemas", "else", "if"),
        *("maxContains", "maxLength", "maxProperties", "minContains", "minLength"),
        *("minProperties", "multipleOf", "not"),
        *("oneOf", "patternProperties", "propertyNames", "then", "unevaluatedItems"),
        *("unevaluatedProperties", "uniqueItems"),
    }
)
"""Keywords that xgrammar ignores, or does not always enforce. With bounds of a length it allows
control characters, which JSON has not."""

_NOT_BY_OTHERS: Final = frozenset(
    {
        *("$ref", "additionalProperties", "allOf", "exclusiveMaximum", "exclusiveMinimum"),
        *("format", "maximum", "minimum", "pattern", "prefixItems"),
    }
)
"""Keywords that xgrammar enforces, but not outlines and lm-format-enforcer, or not always."""

_KEYWORDS: Final = frozenset({"type", *XGRAMMAR, *XGRAMMAR_ALONE, *_OTHER})

_IS: Final[Mapping[str, tuple[type, ...]]] = {
    "null": (type(None),),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "string": (str,),
    "array": (list,),
    "object": (dict,),
}

_INTEGERS: Final = 1 << 62  # xgrammar is exact up to here: it has integers of 64 bits

_BOUNDS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")

_PLAIN_REF: Final = re.compile(r"#(/[A-Za-z_$][^/~%]*)*")

_PLAIN_CLASS: Final = r"\[\^?(?:[\w .,:;/@#%&=~+*?()|{}-]|\\[dws.\-/])+\]"
_PLAIN_PATTERN: Final = re.compile(
    r"\^?(?:[\w .,:;/@#%&=~!<>'`+*?()|{}-]|\\[dwsDWS.\-/+*?()|{}]|" + _PLAIN_CLASS + r")*\$?",
    re.ASCII,
)
"""Patterns whose texts need no escape in JSON, and that have anchors at their ends only: xgrammar
ignores other anchors, and does not escape."""

_SET_OPERATION: Final = re.compile(r"(?<!\\)\[\^?\]?(?:[^\]\\\[]|\\.)*(?:\[|&&|--|~~)")
"""Within brackets guidance reads operations on sets, which are plain characters elsewhere."""


def subschemas(schema: Any) -> Iterator[Any]:
    """All schemas in a schema, outer ones first. Needs a stack as deep as ``schema``."""
    yield schema
    if not isinstance(schema, dict):
        return
    inner: list[Any] = []
    for key in _OBJECTS:
        if isinstance(schema.get(key), dict):
            inner += schema[key].values()
    for key in (*_LISTS, *_SINGLE):
        value = schema.get(key)
        inner += value if isinstance(value, list) else [value] * isinstance(value, dict)
    for each in inner:
        if isinstance(each, dict | bool):
            yield from subschemas(each)


def _not_enforced(schema: Any, backend: str) -> list[str]:
    """What of a valid schema ``backend`` neither enforces nor refuses: keywords. ``O(size)``."""
    missed = _missed if backend == "guidance" else _ignored
    found = dict.fromkeys(fault for node in subschemas(schema) for fault in missed(node))
    if backend not in ("guidance", "xgrammar"):
        nodes = [node for node in subschemas(schema) if isinstance(node, dict)]
        found |= dict.fromkeys(sorted({key for n in nodes for key in _NOT_BY_OTHERS & n.keys()}))
        for name in (name for node in nodes for name in node.get("properties", ())):
            if re.search(r'["\\\x00-\x1f]', name):
                found[f"the property {name!r}"] = None
    return list(found)


def _unlike_elsewhere(pattern: str) -> bool:
    """Whether guidance reads a regular expression otherwise than JSON Schema and Python."""
    return _SET_OPERATION.search(pattern) is not None


def _ignored(node: Any) -> Iterator[str]:
    """The keywords of this schema, without those in it, that xgrammar does not enforce."""
    if isinstance(node, bool):
        if not node:
            yield "false"
        return
    keys = [key for key in node if key in _KEYWORDS and key != "type"]
    types = _types(node)
    alone = next((key for key in XGRAMMAR_ALONE if key in keys), None)
    if not types and "properties" in keys:
        types = {"object"}  # as xgrammar takes it
    for key in keys:
        if key in _OTHER:
            yield key
        elif alone is not None:
            fault = f"{alone} beside {key}" if key != alone else _alone(node, key)
            if fault:
                yield fault
        elif not types:
            yield f"{key} without type"
        elif types & XGRAMMAR[key] and (fault := _value(node, key, types)):
            yield fault


def _alone(node: dict[str, Any], key: str) -> str | None:
    """``key``, one of :data:`XGRAMMAR_ALONE`, where xgrammar does not enforce its value."""
    if key == "$ref" and not _PLAIN_REF.fullmatch(node[key]):
        return key
    if (key == "allOf" and len(node[key]) != 1) or (key == "enum" and not node[key]):
        return key
    if key in ("enum", "const") and "type" in node:
        kinds = tuple(kind for name in _types(node) for kind in _IS[name])
        for value in node["enum"] if key == "enum" else [node["const"]]:
            if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
                return f"{key} beside type"
    if key in ("enum", "const"):
        wide = [n for n in _numbers(node[key]) if isinstance(n, int) and abs(n) > _INTEGERS]
        return f"{key} with an integer of more than 62 bits" if wide else None
    return f"{key} beside type" if "type" in node else None


def _value(node: dict[str, Any], key: str, types: set[str]) -> str | None:
    """``key``, of ``types``, where xgrammar does not enforce its value."""
    value = node[key]
    if "string" in types and key in ("pattern", "format"):
        if key == "format":
            return None if value in FORMATS and "pattern" not in node else f"{key} {value}"
        plain = _PLAIN_PATTERN.fullmatch(value) and "(?" not in value.replace("(?:", "(")
        return None if plain else key
    if key in _BOUNDS and "number" in types and _rounded(value):
        return key
    if key in _BOUNDS and "integer" in types:
        return None if isinstance(value, int) and abs(value) <= _INTEGERS else key
    if key in ("minItems", "maxItems"):
        # Without items it allows none beyond those of prefixItems.
        return None if "items" in node and "prefixItems" not in node else key
    if key == "required":
        absent = next((name for name in value if name not in node.get("properties", {})), None)
        return None if absent is None else f"{key} of {absent!r}, which is not in properties"
    return None


def _missed(node: Any) -> Iterator[str]:
    if isinstance(node, bool):
        return
    yield from (key for key in CONTENT if key in node)
    for key in ("const", "enum", *_BOUNDS):
        if any(map(_rounded, _numbers(node.get(key)))):
            yield f"{key} with a number of more than 15 digits"
    if node.get("minProperties", 0) > len(node.get("required", ())) + 1:
        yield "minProperties beyond the required ones and one more (a key may be written twice)"
    for key, patterns in (
        ("pattern", [node.get("pattern", "")]),
        ("patternProperties", node.get("patternProperties", ())),
    ):
        if any(map(_unlike_elsewhere, patterns)):
            yield f"{key} with [, && or -- in brackets"


def _numbers(value: Any) -> Iterator[int | float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from _numbers(each)
    elif isinstance(value, int | float):
        yield value


def _rounded(value: float) -> bool:
    """Whether a backend that has floats only, as guidance and xgrammar's bounds of ``number``, may
    take another number for it."""
    return abs(value) > 1 << 53 if isinstance(value, int) else float(f"{value:.15g}") != value


def endless(schema: Any) -> bool:
    """Whether every text of a valid schema would contain another one of the same schema."""
    nodes = [node for node in subschemas(schema) if isinstance(node, dict)][::-1]
    done: set[int] = set()
    while True:
        new = {id(node) for node in nodes if id(node) not in done and _ends(node, schema, done)}
        if not new:
            return isinstance(schema, dict) and id(schema) not in done
        done |= new


def _ends(node: dict[str, Any], root: Any, done: set[int]) -> bool:
    """Whether a text of ``node`` can end, given the schemas whose texts can."""

    def ends(inner: Any) -> bool:
        return not isinstance(inner, dict) or id(inner) in done

    if "$ref" in node and not ends(_referred(node["$ref"], root)):
        return False
    if not all(map(ends, node.get("allOf", ()))):
        return False
    if not all(any(map(ends, node[key])) for key in ("anyOf", "oneOf") if node.get(key)):
        return False
    if "enum" in node or "const" in node:
        return True
    types = _types(node) or ({"object"} if "properties" in node else {"null"})
    if types - {"object", "array"}:
        return True
    properties = node.get("properties", {})
    other = node.get("additionalProperties", True)
    if "object" in types and all(ends(properties.get(n, other)) for n in node.get("required", ())):
        return True
    rest = node.get("items", True)
    items = [*node.get("prefixItems", ()), *(rest if isinstance(rest, list) else [rest])]
    return "array" in types and all(map(ends, items[: node.get("minItems", 0)]))


def _referred(ref: str, root: Any) -> Any:
    """The schema that a JSON pointer refers to; ``None``: another reference, or nothing."""
    start, *parts = unquote(ref).split("/")
    if start != "#":
        return None
    found = root
    for part in parts:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        elif isinstance(found, dict):
            found = found.get(name)
        else:
            return None
    return found


def _types(node: dict[str, Any]) -> set[str]:
    given = node.get("type", ())
    return {given} if isinstance(given, str) else set(given)


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
    """Choose the backend of a request's constraint, and check the constraint with it. Raises
    ValueError or VLLMClientError, or others by the backend: it is malformed or not enforced."""
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
    """vLLM's grammar compiler with the backend chosen per request; called in several threads."""
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
    if endless(schema):
        raise ValueError("no text can end: by $ref the JSON schema always contains itself")


def _check_other(params: Any, backend: str) -> None:
    """Refuse what the backend would take and not enforce."""
    if params.regex is not None and backend == "guidance":
        if _unlike_elsewhere(params.regex):
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
    text = str(error)
    if error.__cause__ is not None and str(error.__cause__) not in text:
        text = f"{text} {error.__cause__}"
    for said, meant in _WORDS:
        text = said.sub(meant, text)
    return " ".join(text.split())
