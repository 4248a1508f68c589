"""The OpenAPI document, ``GET /openapi.json``: what the router itself holds requests to. Objects
are open unless they are Sluice's own, as engines check the other fields."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, Final

from sluice.controller.config import version
from sluice.protocol.requests import GENERATING, SPEECH, UNSCHEDULED, Endpoint
from sluice.router import wire
from sluice.router.batches.api import (
    MAX_BATCHES_PAGE,
    MAX_FILES_PAGE,
    MAX_METADATA,
    MAX_METADATA_KEY,
    MAX_METADATA_VALUE,
    MAX_S,
)
from sluice.router.config import HOUR_S, RouterConfig
from sluice.router.errors import Reason
from sluice.router.request.arrival import BATCH_PATHS, INFERENCE_PATHS
from sluice.router.request.loop import StatedLoop
from sluice.router.request.session import (
    MAX_SESSION_CHARACTERS,
    SESSION_FIELDS,
    SESSION_HEADERS,
)
from sluice.router.request.slo import (
    MAX_TPS,
    MIN_TPS,
    SMG_HEADER,
    SMG_TIERS,
    TPS_HEADER,
    SloReader,
    StatedStage,
    hint_schemas,
)
from sluice.router.request.validation import (
    MAX_ENTRIES,
    MAX_INPUTS,
    MAX_MESSAGES,
    MAX_PROMPTS,
    field_schemas,
)
from sluice.router.wire import MAX_TOKENS
from sluice.scheduling.request.job import Tier
from sluice.scheduling.request.objective import MAX_PRIORITY, MIN_PRIORITY
from sluice.scheduling.request.stages import MAX_STAGES

Schema = dict[str, Any]

PATH: Final = "/openapi.json"

_TEXT: Final[Schema] = {"type": "string"}
_OBJECT: Final[Schema] = {"type": "object"}
_TOKEN_IDS: Final[Schema] = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0, "maximum": MAX_TOKENS},
}
_ERROR: Final[Schema] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "code"],
            "properties": {
                "message": _TEXT,
                "type": _TEXT,
                "param": {"type": ["string", "null"]},
                "code": _TEXT,
                "retry_after_ms": {"type": "number", "minimum": 0},
            },
        }
    },
}
"""OpenAI's shape, and Anthropic's, which has no `param`."""

_ERRORS: Final[dict[str, Schema]] = {
    str(status): {
        "description": HTTPStatus(status).phrase,
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
    }
    for status in sorted({reason.status for reason in Reason})
}

_SUMMARIES: Final[dict[Endpoint, str]] = {
    "chat": "Answer a conversation",
    "completions": "Continue a prompt",
    "responses": "Answer an input",
    "messages": "Answer a conversation in Anthropic's format",
    "count_tokens": "Count the tokens of a conversation in Anthropic's format",
    "embeddings": "Embed inputs",
    "classify": "Classify inputs",
    "pooling": "Pool inputs",
    "score": "Score pairs of texts",
    "rerank": "Order documents by their relevance to a query",
    "transcriptions": "Transcribe audio",
    "translations": "Translate audio into English",
    "tokenize": "Turn a prompt into tokens",
    "detokenize": "Turn tokens into text",
}


def document(config: RouterConfig) -> Schema:
    """The document of a router with this configuration. It names no keys, clients or models."""
    paths: Schema = {
        path: {"post": _inference(endpoint, config)} for path, endpoint in INFERENCE_PATHS.items()
    }
    quoted = _inference("chat", config)
    quoted |= {"summary": "What could be promised to a conversation now"}
    quoted["responses"]["200"] = {"description": "OK", "content": _json(_OBJECT)}
    paths[wire.QUOTE_PATH] = {"post": quoted}
    paths["/v1/models"] = {"get": _operation("List the models", _json(_list()))}
    paths["/v1/models/{model_id}"] = {
        "get": _operation("Describe a model", _json(_OBJECT), _parameter("model_id"))
    }
    paths["/"] = {"get": {**_operation("Where what is", _json(_OBJECT)), "security": []}}
    paths["/health"] = {
        "get": {**_operation("Whether models are served", _json(_OBJECT)), "security": []}
    }
    paths["/metrics"] = {
        "get": _operation("Metrics for Prometheus", {"text/plain": {"schema": _TEXT}})
    }
    for method in ("get", "post"):
        probe = {**_operation("The same for SageMaker", _json(_OBJECT)), "security": []}
        paths.setdefault("/ping", {})[method] = probe
    paths["/version"] = {"get": _operation("The version of Sluice", _json(_OBJECT))}
    paths[PATH] = {"get": _operation("This document", _json(_OBJECT))}
    if config.batches.directory is not None:
        paths |= _files() | _batches(config)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Sluice", "version": version()},
        "paths": paths,
        "components": {
            "schemas": {"Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [] if config.is_open else [{"key": []}],
    }


def _inference(endpoint: Endpoint, config: RouterConfig) -> Schema:
    content = _json(_OBJECT)
    if endpoint in GENERATING:
        content["text/event-stream"] = {}
    if endpoint in SPEECH:
        content["text/plain"] = {"schema": _TEXT}
    operation = _operation(_SUMMARIES[endpoint], content)
    scheduled = endpoint not in UNSCHEDULED
    objective = _objective_headers(config) if scheduled else ()
    operation["parameters"] = [*objective, *_SESSION, _CLIENT_REQUEST_ID]
    if scheduled:
        operation["responses"]["200"]["headers"] = _PROMISE
    asked = _form(config) if endpoint in SPEECH else _json(_body(endpoint, config))
    operation["requestBody"] = {"required": True, "content": asked}
    return operation


def _body(endpoint: Endpoint, config: RouterConfig) -> Schema:
    fields: dict[str, Schema] = dict(field_schemas(endpoint))
    fields |= {name: {"type": ["string", "null"]} for name in _SESSION_FIELDS}
    fields |= _SHAPES[endpoint]
    required = [name for name in _SHAPES[endpoint] if name != "tools"]
    if endpoint not in ("tokenize", "detokenize"):
        required.append("model")
    if endpoint not in UNSCHEDULED:
        tiers = SloReader(config).tiers(endpoint)
        fields[wire.SERVICE_TIER_FIELD] = {"enum": [*tiers, None]}
        fields[wire.SLO_FIELD] = _objective(config)
        fields[wire.NVEXT_FIELD] = {"type": ["object", "null"], "properties": hint_schemas()}
    # Those that are the server's own.
    fields |= {name: {"type": "null"} for name in ("request_id", "priority")}
    return {"type": "object", "required": sorted(required), "properties": fields}


def _form(config: RouterConfig) -> Schema:
    fields: dict[str, Schema] = {
        "file": {"type": "string", "format": "binary", "minLength": 1},
        "model": _TEXT,
        "stream": {"type": "boolean"},
        "max_completion_tokens": {"type": "integer", "minimum": 1, "maximum": MAX_TOKENS},
    }
    fields |= {f"{wire.SLO_FIELD}[{key}]": _stated(config, key) for key in wire.SLO_HEADERS}
    schema = {"type": "object", "required": ["file", "model"], "properties": fields}
    return {"multipart/form-data": {"schema": schema}}


def _stated(config: RouterConfig, key: str) -> Schema:
    """One key of an objective, in a header or a field of a form."""
    if key == wire.CLASS:
        return {"enum": [*config.classes]}
    if key == wire.PRIORITY:
        return {"type": "integer", **_PRIORITY}
    return {"type": "number", **_MS}


def _objective(config: RouterConfig) -> Schema:
    number = {"type": ["number", "null"], **_MS}
    return {
        "type": ["object", "null"],
        "additionalProperties": False,
        "description": "The objective of this request; what it leaves out is its class's.",
        "properties": {
            wire.TTFT: number,
            wire.TPOT: number,
            wire.E2E: number,
            wire.PRIORITY: {"type": ["integer", "null"], **_PRIORITY},
            wire.CLASS: {"enum": [*config.classes, None]},
            wire.STAGES: {"oneOf": [{"type": "null"}, _stages()]},
            wire.LOOP: StatedLoop.model_json_schema()
            | {
                "type": ["object", "null"],
                "description": "The tool loop that this request is a turn of. The deadline counts "
                "from the loop's first turn.",
            },
        },
    }


def _stages() -> Schema:
    stage = StatedStage.model_json_schema()
    (tokens,) = stage.pop("$defs").values()
    stage["properties"]["until"] = {"oneOf": [{"enum": ["reasoning_end", "end"]}, tokens]}
    return {
        "type": "array",
        "description": "Objectives of the parts of the answer, in order, in place of ttft_ms and "
        "tpot_ms. The until of the last one is end, and of no other one; of one at most it is "
        "reasoning_end.",
        "minItems": 1,
        "maxItems": MAX_STAGES,
        "items": stage,
    }


def _objective_headers(config: RouterConfig) -> list[Schema]:
    names = [pair for each in wire.SLO_HEADER_SETS for pair in each.items()]
    stated = [_header(name, _OTHERS.get(name) or _stated(config, key)) for key, name in names]
    return [*stated, _header(wire.QUEUE_TTL_HEADER, _DURATION)]


_OTHERS: Final[dict[str, Schema]] = {
    TPS_HEADER: {"type": "number", "minimum": MIN_TPS, "maximum": MAX_TPS},
    SMG_HEADER: {"enum": [*SMG_TIERS]},
}
"""Headers whose values are not those of the field that they state."""
_MS: Final[Schema] = {"minimum": wire.MIN_OBJECTIVE_MS, "maximum": wire.MAX_OBJECTIVE_MS}
_DURATION: Final[Schema] = {"type": "string", "pattern": "^[1-9][0-9]{0,2}(ms|s|m)$"}
"""Some of the durations as in Go."""
_PROMISE: Final[Schema] = {
    wire.ADMISSION_HEADER: {"schema": {"enum": [tier.value for tier in Tier]}},
    wire.PROMISE_LEVEL_HEADER: {"schema": {"type": "number", "minimum": 0, "maximum": 1}},
    **{
        name: {"schema": {"type": "number", "minimum": 0}}
        for name in (
            wire.PROMISED_TTFT_HEADER,
            wire.PROMISED_TPOT_HEADER,
            wire.PROMISED_E2E_HEADER,
            wire.PREDICTED_TTFT_HEADER,
        )
    },
}
"""Response headers; those but the first are absent where nothing is promised."""
_PRIORITY: Final[Schema] = {"minimum": MIN_PRIORITY, "maximum": MAX_PRIORITY}


_MESSAGES: Final[Schema] = {
    "type": "array",
    "minItems": 1,
    "maxItems": MAX_MESSAGES,
    "items": {
        "type": "object",
        "required": ["role"],
        "properties": {"role": {"type": "string", "minLength": 1}},
    },
}


def _prompt(most: int) -> Schema:
    tokens = {**_TOKEN_IDS, "minItems": 1}
    several = {"type": "array", "minItems": 1, "maxItems": most}
    return {"anyOf": [_TEXT, tokens, {**several, "items": _TEXT}, {**several, "items": tokens}]}


_SCORED_ENTRY: Final[Schema] = {
    "anyOf": [
        _TEXT,
        {"type": "object", "required": ["content"], "properties": {"content": {"type": "array"}}},
    ]
}
_SCORED: Final[Schema] = {
    "anyOf": [
        *_SCORED_ENTRY["anyOf"],
        {"type": "array", "minItems": 1, "maxItems": MAX_INPUTS, "items": _SCORED_ENTRY},
    ]
}

_SHAPES: Final[dict[Endpoint, dict[str, Schema]]] = {
    "chat": {"messages": _MESSAGES, "tools": {"maxItems": MAX_ENTRIES["tools"]}},
    "completions": {"prompt": _prompt(MAX_PROMPTS)},
    "responses": {
        "input": {
            "anyOf": [
                _TEXT,
                {"type": "array", "minItems": 1, "maxItems": MAX_MESSAGES, "items": _OBJECT},
            ]
        },
    },
    "messages": {"messages": _MESSAGES, "tools": {"maxItems": MAX_ENTRIES["tools"]}},
    "count_tokens": {"messages": _MESSAGES, "tools": {"maxItems": MAX_ENTRIES["tools"]}},
    "embeddings": {"input": _prompt(MAX_INPUTS)},
    "classify": {"input": _prompt(MAX_INPUTS)},
    "pooling": {"input": _prompt(MAX_INPUTS)},
    "score": {"queries": _SCORED, "documents": _SCORED},
    "rerank": {"query": _SCORED_ENTRY, "documents": _SCORED},
    "tokenize": {"prompt": _TEXT},
    "detokenize": {"tokens": _TOKEN_IDS},
}


def _files() -> Schema:
    file = _parameter("file_id")
    form = {
        "type": "object",
        "required": ["purpose", "file"],
        "additionalProperties": False,
        "properties": {
            "purpose": {"enum": ["batch"]},
            "file": {"type": "string", "format": "binary"},
            "expires_after[anchor]": {"enum": ["created_at"]},
            "expires_after[seconds]": {"type": "integer", "minimum": HOUR_S, "maximum": MAX_S},
        },
        "dependentRequired": {
            "expires_after[anchor]": ["expires_after[seconds]"],
            "expires_after[seconds]": ["expires_after[anchor]"],
        },
    }
    upload = _operation("Upload the input of a batch", _json(_OBJECT))
    upload["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": form}}}
    order = _query("order", {"enum": ["asc", "desc"]})
    listed = _operation("List files", _json(_list()), *_paging(MAX_FILES_PAGE), order)
    listed["parameters"].append(_query("purpose", _TEXT))
    content: Schema = {"application/octet-stream": {"schema": {}}}
    return {
        "/v1/files": {"post": upload, "get": listed},
        "/v1/files/{file_id}": {
            "get": _operation("Describe a file", _json(_OBJECT), file),
            "delete": _operation("Delete a file", _json(_OBJECT), file),
        },
        "/v1/files/{file_id}/content": {"get": _operation("Read a file", content, file)},
    }


def _batches(config: RouterConfig) -> Schema:
    batch = _parameter("batch_id")
    expiry = {
        "type": ["object", "null"],
        "required": ["anchor", "seconds"],
        "additionalProperties": False,
        "properties": {
            "anchor": {"enum": ["created_at"]},
            "seconds": {"type": "integer", "minimum": HOUR_S, "maximum": MAX_S},
        },
    }
    body = {
        "type": "object",
        "required": ["completion_window", "endpoint", "input_file_id"],
        "additionalProperties": False,
        "properties": {
            "input_file_id": _TEXT,
            "endpoint": {"enum": [*BATCH_PATHS]},
            "completion_window": {"enum": [*config.batches.completion_windows]},
            "metadata": {
                "type": ["object", "null"],
                "maxProperties": MAX_METADATA,
                "propertyNames": {"maxLength": MAX_METADATA_KEY},
                "additionalProperties": {
                    "type": "string",
                    "maxLength": MAX_METADATA_VALUE,
                },
            },
            "output_expires_after": expiry,
        },
    }
    made = _operation("Have a file of requests run", _json(_OBJECT))
    made["requestBody"] = {"required": True, "content": _json(body)}
    return {
        "/v1/batches": {
            "post": made,
            "get": _operation("List batches", _json(_list()), *_paging(MAX_BATCHES_PAGE)),
        },
        "/v1/batches/{batch_id}": {"get": _operation("Describe a batch", _json(_OBJECT), batch)},
        "/v1/batches/{batch_id}/cancel": {
            "post": _operation("Stop a batch", _json(_OBJECT), batch)
        },
    }


def _operation(summary: str, content: Schema, *parameters: Schema) -> Schema:
    return {
        "summary": summary,
        "parameters": [*parameters],
        "responses": {"200": {"description": "OK", "content": content}, **_ERRORS},
    }


def _json(schema: Schema) -> Schema:
    return {"application/json": {"schema": schema}}


def _list() -> Schema:
    return {
        "type": "object",
        "required": ["object", "data"],
        "properties": {"object": {"const": "list"}, "data": {"type": "array", "items": _OBJECT}},
    }


def _header(name: str, schema: Schema) -> Schema:
    return {"name": name, "in": "header", "schema": schema}


_SESSION_NAME: Final[Schema] = {"type": "string", "maxLength": MAX_SESSION_CHARACTERS}
_SESSION: Final = [_header(each.name, _SESSION_NAME) for each in SESSION_HEADERS]
_SESSION_FIELDS: Final = tuple(each.name for each in SESSION_FIELDS if "." not in each.name)
_CLIENT_REQUEST_ID: Final = _header(wire.CLIENT_REQUEST_ID_HEADER, _TEXT)


def _query(name: str, schema: Schema) -> Schema:
    return {"name": name, "in": "query", "schema": schema}


def _parameter(name: str) -> Schema:
    return {"name": name, "in": "path", "required": True, "schema": _TEXT}


def _paging(most: int) -> tuple[Schema, ...]:
    limit = {"type": "integer", "minimum": 1, "maximum": most}
    return _query("limit", limit), _query("after", _TEXT)
