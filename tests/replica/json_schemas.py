"""Schemas with every keyword of JSON Schema 2020-12, and what of them must be refused."""

from __future__ import annotations

from typing import Any, Final

INTEGER: Final = {"type": "integer"}
TEXT: Final = {"type": "string", "maxLength": 4}
LIST: Final = {"type": "array", "items": {"enum": [1, "a"]}, "maxItems": 3}
PAIR: Final = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}, "b": {"enum": ["x"]}},
    "additionalProperties": False,
}


def _object(**properties: Any) -> dict[str, Any]:
    """An object with these properties and no others, all required."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _string(**keywords: Any) -> dict[str, Any]:
    return {"type": "string", **keywords}


def _list(*items: Any, **keywords: Any) -> dict[str, Any]:
    return {"type": "array", "prefixItems": list(items), **keywords}


SCHEMAS: Final[dict[str, list[Any]]] = {
    "type": [
        {"type": "integer"},
        {"type": "number"},
        {"type": "boolean"},
        {"type": "null"},
        {"type": ["integer", "boolean"]},
        {"type": ["string", "null"], "maxLength": 2},
        {"type": ["array", "null"], "items": {"const": 1}, "maxItems": 2},
        {"type": ["object", "integer"], "additionalProperties": False},
        _object(a={"type": ["string", "null"], "maxLength": 1}),
    ],
    "enum": [
        {"enum": [1, "a", None]},
        {"enum": ["a", 1], "type": "string"},
        {"enum": [1, 2, 3], "minimum": 2},
        {"enum": [1290384729018374658, 1290384729018374659], "multipleOf": 1},
        {"enum": ["aa", "b"], "minLength": 2},
        {"enum": ["a", "b"], "pattern": "^b"},
        {"enum": [{"a": 1}, [1, 2]]},
        {"enum": [[1], ["a"]], "items": INTEGER},
        {"enum": ["\u00e9", '"q"', "a\nb"]},
        _object(a={"enum": [True, 0]}),
    ],
    "const": [
        {"const": 3},
        {"const": 9007199254740993},
        {"const": 9007199254740993, "minimum": 0},
        {"const": [{"a": 123456789.12345679}], "maxItems": 1},
        {"const": 12345678901234567890123},
        {"const": {"a": [1]}},
        {"const": False},
        {"const": "a", "type": "string"},
        _object(a={"const": None}),
    ],
    "multipleOf": [
        {"type": "integer", "multipleOf": 5},
        {"type": "number", "multipleOf": 0.5},
        {"multipleOf": 3, "type": ["integer", "null"]},
        {"type": "integer", "multipleOf": 3, "minimum": 10, "maximum": 20},
        _object(a={"type": "integer", "multipleOf": 7}),
        {"$ref": "#/$defs/m", "$defs": {"m": {"type": "integer", "multipleOf": 4}}},
    ],
    "minimum": [
        {"type": "integer", "minimum": 5},
        {"type": "integer", "minimum": 9007199254740993, "maximum": 9007199254740993},
        {
            "type": "integer",
            "minimum": 9007199254740993,
            "maximum": 9007199254740993,
            "multipleOf": 1,
        },
        {"type": "number", "minimum": 1.5, "maximum": 2.5},
        {"minimum": 5, "type": ["integer", "boolean"]},
        {"minimum": 5, "enum": [3, 7, "x"]},
        {"type": "integer", "minimum": 0.5, "maximum": 2.5},
        {"type": "array", "items": {"type": "integer", "minimum": 90}, "maxItems": 2},
        {"minimum": 5},
    ],
    "maximum": [
        {"type": "integer", "maximum": 5},
        {"type": "number", "maximum": -2.75},
        {"type": "integer", "maximum": 1e20, "minimum": 0},
        _object(a={"type": "integer", "minimum": -3, "maximum": -1}),
        {"maximum": -5},
    ],
    "exclusiveMinimum": [
        {"type": "integer", "exclusiveMinimum": 3, "maximum": 5},
        {"type": "number", "exclusiveMinimum": 0},
        {"type": "integer", "exclusiveMinimum": 5, "minimum": 3, "maximum": 8},
        {"type": "integer", "exclusiveMinimum": 2.5, "maximum": 4},
    ],
    "exclusiveMaximum": [
        {"type": "integer", "exclusiveMaximum": 5, "minimum": 3},
        {"type": "number", "exclusiveMaximum": 0, "minimum": -1},
        {"type": "number", "exclusiveMinimum": 1.5, "exclusiveMaximum": 1.6},
    ],
    "minLength": [
        _string(minLength=3, maxLength=6),
        {"type": ["string", "null"], "minLength": 2, "maxLength": 3},
        _object(a=_string(minLength=1, maxLength=2)),
        {"minLength": 3, "maxLength": 4},
    ],
    "maxLength": [_string(maxLength=2), _string(maxLength=0), {"maxLength": 1}],
    "pattern": [
        _string(pattern="^a+$"),
        _string(pattern="^[a-c]{2,3}$"),
        _string(pattern="^(ab|cd)$"),
        _string(pattern="^\\d{3}-\\d$"),
        _string(pattern="^a|b$", maxLength=3),
        _string(pattern="a", maxLength=2),
        _string(pattern="^x", maxLength=3),
        _string(pattern="^a+$", minLength=3),
        _string(pattern='^"$'),
        _string(pattern="^\\\\$"),
        _string(pattern="^\\n$"),
        _string(pattern="^[^a]$"),
        _string(pattern="^(?!a)[ab]$"),
        _string(pattern="x^a$y"),
        _string(pattern="^a\\b$"),
        _string(pattern="^(a)\\1$"),
        _string(pattern="^[a-z&&[^b]]$"),
        _string(pattern="^[[]$"),
        {"pattern": "^a$", "maxLength": 3},
        _object(a=_string(pattern="^z$")),
    ],
    "format": [
        *(_string(format=name) for name in ("date", "time", "date-time", "ipv4")),
        *(_string(format=name, maxLength=20) for name in ("email", "hostname", "ipv6", "uri")),
        *(_string(format=name) for name in ("uuid", "idn-email", "idn-hostname", "iri")),
        *(_string(format=name) for name in ("iri-reference", "uri-reference", "uri-template")),
        *(_string(format=name) for name in ("json-pointer", "relative-json-pointer", "regex")),
        _string(format="duration", maxLength=12),
        _string(format="no such format"),
        _string(format="date", pattern="^2"),
        {"type": ["string", "null"], "format": "date"},
        {"type": "integer", "format": "int32"},
    ],
    "items": [
        {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 3},
        {"type": "array", "items": False},
        {"type": "array", "items": {"type": "array", "items": {"const": 1}, "maxItems": 2}},
        {"type": ["array", "null"], "items": {"const": 1}},
        {"items": {"const": 1}, "type": ["array", "integer"]},
    ],
    "prefixItems": [
        _list(INTEGER, TEXT, items=False),
        _list(INTEGER, items=False, minItems=1),
        _list({"const": 1}, items={"const": 2}, maxItems=4),
        _list(INTEGER, items={"enum": ["x", ""]}, minItems=3, maxItems=4),
        _list(INTEGER, TEXT, maxItems=1),
        _list({"const": 1}, minItems=2, maxItems=2),
    ],
    "minItems": [
        {"type": "array", "minItems": 1},
        {"type": "array", "minItems": 1, "maxItems": 1, "items": TEXT},
        {"type": "array", "items": INTEGER, "minItems": 2, "maxItems": 3},
        {"minItems": 2, "maxItems": 2},
        _object(a={"type": "array", "minItems": 2, "items": {"const": 0}}),
    ],
    "maxItems": [
        {"type": "array", "maxItems": 0},
        {"type": "array", "items": INTEGER, "maxItems": 2},
        {"type": ["array", "boolean"], "maxItems": 1, "items": INTEGER},
    ],
    "uniqueItems": [
        {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True},
        {"uniqueItems": True},
        {"type": "object", "additionalProperties": {"type": "array", "uniqueItems": True}},
    ],
    "contains": [
        {"type": "array", "contains": INTEGER},
        {"contains": {"const": 1}},
        _object(a={"type": "array", "contains": INTEGER}),
    ],
    "minContains": [
        {"type": "array", "contains": INTEGER, "minContains": 2},
        {"type": "array", "items": INTEGER, "minContains": 2},
    ],
    "maxContains": [{"type": "array", "contains": INTEGER, "maxContains": 1}],
    "properties": [
        PAIR,
        {"properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False},
        {"properties": {"a": True, "b": False}, "type": "object", "additionalProperties": False},
        _object(a=_object(b={"const": 1}), c={"enum": ["x"]}),
        {"type": ["object", "null"], "properties": {"a": {"const": 1}}, "required": ["a"]},
        _object(**{'a"b': {"const": 1}, "\u00e9": {"const": 2}, "": {"const": 3}}),
    ],
    "required": [
        {"type": "object", "required": ["x"], "additionalProperties": {"const": 1}},
        {"type": "object", "properties": {"a": INTEGER}, "required": ["x"]},
        {**PAIR, "required": ["b"]},
        {"required": ["x"], "type": ["object", "integer"]},
        _object(a={"type": "object", "required": ["y"], "additionalProperties": {"const": 1}}),
    ],
    "additionalProperties": [
        {"type": "object", "additionalProperties": False},
        {"type": "object", "additionalProperties": {"const": 1}},
        {**PAIR, "additionalProperties": {"const": 2}},
        {**PAIR, "required": ["a"], "additionalProperties": True},
    ],
    "patternProperties": [
        {"type": "object", "patternProperties": {"^a$": INTEGER}, "additionalProperties": False},
        {"type": "object", "patternProperties": {"^a$": INTEGER}, "properties": {"b": INTEGER}},
        {"type": "object", "patternProperties": {"^a": INTEGER, "b$": TEXT}},
        {"type": "object", "patternProperties": {"^a": INTEGER}, "properties": {"ab": TEXT}},
        {"type": "object", "patternProperties": {"^[a-z&&[^b]]$": INTEGER}},
    ],
    "propertyNames": [
        {"type": "object", "propertyNames": {"pattern": "^a"}},
        {"type": "object", "propertyNames": {"maxLength": 2}, "properties": {"abc": INTEGER}},
        {"propertyNames": {"enum": ["a"]}},
    ],
    "minProperties": [
        {"type": "object", "minProperties": 1, "additionalProperties": {"const": 1}},
        {"type": "object", "minProperties": 2, "additionalProperties": {"const": 1}},
        {**PAIR, "minProperties": 1},
        {**PAIR, "required": ["a", "b"], "minProperties": 2},
        _object(a={"type": "object", "minProperties": 3}),
    ],
    "maxProperties": [
        {"type": "object", "maxProperties": 1, "additionalProperties": {"const": 1}},
        {**PAIR, "maxProperties": 1},
        {"type": "object", "properties": PAIR["properties"], "maxProperties": 1},
        {"type": "object", "maxProperties": 0},
    ],
    "dependentRequired": [
        {**PAIR, "dependentRequired": {"a": ["b"]}},
        {"dependentRequired": {"a": ["b"]}},
        _object(o={**PAIR, "dependentRequired": {"a": ["b"]}}),
    ],
    "dependentSchemas": [
        {**PAIR, "dependentSchemas": {"a": {"required": ["b"]}}},
        {"type": "array", "items": {**PAIR, "dependentSchemas": {"a": {"required": ["b"]}}}},
    ],
    "allOf": [
        {"allOf": [{"type": "integer", "minimum": 30}, {"type": "integer", "maximum": 35}]},
        {"allOf": [INTEGER]},
        {"allOf": [INTEGER], "minimum": 5},
        {"allOf": [{"type": "string"}, {"enum": ["yes", "no"]}]},
        {"type": "integer", "allOf": [{"minimum": 5}, {"maximum": 9}]},
        {"allOf": [{"enum": [1, 2]}, {"enum": [2, 3]}]},
        {"allOf": [PAIR, {"required": ["a"]}]},
        _object(a={"allOf": [{"minimum": 1}, {"enum": [0, 1]}]}),
    ],
    "anyOf": [
        {"anyOf": [TEXT, INTEGER]},
        {"anyOf": [{"enum": ["a", "bcd"]}, INTEGER], "minLength": 3},
        {"type": "integer", "anyOf": [{"minimum": 90}, {"maximum": -90}]},
        {**PAIR, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        {"anyOf": [False, {"const": 1}]},
        {"anyOf": [INTEGER, {"type": "string"}], "enum": [1, "a", None]},
    ],
    "oneOf": [
        {"oneOf": [TEXT, INTEGER]},
        {"oneOf": [{"type": "number"}, INTEGER]},
        {"oneOf": [{"enum": [1, 2]}, {"enum": [2, 3]}]},
        {"type": "integer", "oneOf": [{"minimum": 3}, {"maximum": 1}]},
        {"oneOf": [_object(k={"const": "a"}, v=INTEGER), _object(k={"const": "b"})]},
        {"oneOf": [LIST, {"type": "array", "items": {"const": 1}, "maxItems": 2}]},
    ],
    "not": [
        {"not": {"type": "string"}},
        {"type": "integer", "minimum": 0, "maximum": 2, "not": {"enum": [1]}},
        {"type": "array", "items": {"not": {}}},
    ],
    "if": [
        {"if": {"type": "string"}, "then": {"minLength": 2}},
        {"type": "integer", "if": {"minimum": 0}, "then": {"maximum": 5}, "else": {"minimum": -5}},
        _object(a={"type": "integer", "if": {"minimum": 0}}),
    ],
    "then": [{"type": "integer", "then": {"maximum": 5}}],
    "else": [{"type": "integer", "else": {"maximum": 5}}],
    "$ref": [
        {"$ref": "#/$defs/a", "$defs": {"a": {"enum": [7]}}},
        {"$ref": "#/$defs/a", "minimum": 5, "$defs": {"a": {"enum": [3, 7]}}},
        _object(x={"$ref": "#/$defs/a"}) | {"$defs": {"a": {"const": 1}}},
        {"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"const": 1}}},
        {"$ref": "#/$defs/a%25b", "$defs": {"a%b": {"const": 1}}},
        {"$ref": "#/allOf/0", "allOf": [{"const": 4}]},
        {
            "type": "object",
            "properties": {"a": {"$ref": "#"}},
            "additionalProperties": False,
        },
        {
            "$ref": "#/$defs/node",
            "$defs": {
                "node": _object(n={"const": 1}, next={"$ref": "#/$defs/end"}),
                "end": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
            },
        },
        {"$ref": "http://localhost/nothing"},
    ],
    "definitions": [{"$ref": "#/definitions/a", "definitions": {"a": {"const": 1}}}],
    "$anchor": [
        {"$anchor": "x", "type": "integer"},
        {"$ref": "#x", "$defs": {"a": {"$anchor": "x", "const": 5}}},
    ],
    "$dynamicRef": [{"$dynamicRef": "#a", "$defs": {"x": {"$dynamicAnchor": "a", "const": 1}}}],
    "$dynamicAnchor": [{"$dynamicAnchor": "a", "type": "integer"}],
    "$id": [
        {"$id": "http://localhost/b", "type": "integer"},
        {"$id": "http://localhost/b", "$ref": "c", "$defs": {"a": {"$id": "c", "const": 5}}},
        {
            "$ref": "#/$defs/o",
            "$defs": {
                "o": {
                    "$id": "http://localhost/o",
                    "$ref": "#/$defs/v",
                    "$defs": {"v": {"const": 1}},
                },
                "v": {"const": 2},
            },
        },
    ],
    "unevaluatedProperties": [
        {**PAIR, "unevaluatedProperties": False},
        {"allOf": [PAIR], "unevaluatedProperties": False},
    ],
    "unevaluatedItems": [
        {"type": "array", "unevaluatedItems": False},
        _list(INTEGER, unevaluatedItems=TEXT),
    ],
    "contentEncoding": [_string(contentEncoding="base64"), _object(a=_string(contentEncoding="x"))],
    "contentMediaType": [_string(contentMediaType="application/json")],
    "contentSchema": [_string(contentMediaType="application/json", contentSchema=INTEGER)],
    "title": [
        {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "$comment": "c",
            "title": "t",
            "description": "d",
            "default": 1,
            "deprecated": True,
            "readOnly": True,
            "writeOnly": False,
            "examples": [1],
            "x-other": {"type": "string"},
            "type": "integer",
        },
    ],
}
"""Schemas by the keyword that they are about. The text must obey it, or the answer names it."""

MALFORMED: Final[list[Any]] = [
    {"type": "no such type"},
    {"type": []},
    {"type": 3},
    {"type": "integer", "minimum": "x"},
    {"properties": []},
    {"type": "object", "properties": {"a": 3}},
    {"type": "object", "required": "a"},
    {"type": "object", "required": [1]},
    {"type": "array", "items": 3},
    {"type": "array", "items": [{"type": "integer"}]},
    {"enum": 3},
    {"enum": []},
    {"allOf": {}},
    {"allOf": [{"type": "integer"}, {"type": "string"}]},
    {"anyOf": []},
    {"anyOf": [3]},
    {"prefixItems": {}},
    {"$ref": 3},
    {"$ref": "#/$defs/nothing"},
    {"$defs": 3},
    {"$ref": "#"},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    {"allOf": [{"$ref": "#"}]},
    {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    {"type": "object", "required": ["a"], "additionalProperties": {"$ref": "#"}},
    {"type": "string", "pattern": 3},
    {"type": "string", "pattern": "(a"},
    {"type": "string", "minLength": -1},
    {"type": "string", "maxLength": 1.5},
    {"type": "string", "minLength": 5, "maxLength": 2},
    {"type": "integer", "minimum": 10, "maximum": 5},
    {"type": "integer", "multipleOf": 0},
    {"type": "integer", "exclusiveMinimum": True},
    {"const": 1, "type": "string"},
    {"type": "integer", "enum": [1.5, 2.5]},
    {"type": "object", "properties": {"a": False}, "required": ["a"]},
    {**PAIR, "required": ["x"]},
]
"""Schemas that are none, or that no text obeys."""


def nested(schema: Any, levels: int) -> Any:
    """``schema`` in as many lists."""
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema
