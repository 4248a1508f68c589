"""What the backends of structured output enforce of JSON Schema 2020-12.

guidance refuses by itself what it does not enforce, with few exceptions. The others ignore it, so
what they enforce is listed here. Only what a text can break counts: annotations such as ``title``,
and keywords that JSON Schema does not have, are ignored, as JSON Schema says.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import unquote

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
"""Keywords that xgrammar enforces only where no other one stands beside them; ``type`` may stand
beside ``enum`` and ``const``."""

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

_INTEGERS: Final = 1 << 62
"""xgrammar is exact up to here: it has integers of 64 bits."""

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
    """A schema and all schemas in it, the outer ones first, without ``true`` and ``false`` as the
    values of keywords. Needs a stack as deep as ``schema``."""
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


def not_by_xgrammar(schema: Any) -> list[str]:
    """What of a valid schema xgrammar does not enforce: keywords. ``O(size)``."""
    return list(dict.fromkeys(fault for node in subschemas(schema) for fault in _ignored(node)))


def not_by_guidance(schema: Any) -> list[str]:
    """What of a valid schema guidance neither enforces nor refuses: keywords. ``O(size)``."""
    return list(dict.fromkeys(fault for node in subschemas(schema) for fault in _missed(node)))


def not_by_others(schema: Any) -> list[str]:
    """What of a valid schema other backends than these two do not enforce. ``O(size)``."""
    nodes = [node for node in subschemas(schema) if isinstance(node, dict)]
    escaped = [
        f"the property {name!r}"
        for node in nodes
        for name in node.get("properties", ())
        if re.search(r'["\\\x00-\x1f]', name)
    ]
    also = sorted({key for node in nodes for key in _NOT_BY_OTHERS & node.keys()})
    return [*not_by_xgrammar(schema), *also, *escaped]


def unlike_elsewhere(pattern: str) -> bool:
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
    """``key`` where its value is one that xgrammar does not enforce. ``key`` applies to one of
    ``types``."""
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
        if any(map(unlike_elsewhere, patterns)):
            yield f"{key} with [, && or -- in brackets"


def _numbers(value: Any) -> Iterator[int | float]:
    """All numbers in a value from JSON."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from _numbers(each)
    elif isinstance(value, int | float):
        yield value


def _rounded(value: float) -> bool:
    """Whether guidance may write or compare another number: it has floats of at most 16 digits."""
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
    """The schema that a JSON pointer refers to; ``None`` if it is another kind of reference, or
    refers to nothing."""
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
