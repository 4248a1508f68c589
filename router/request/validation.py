"""The check of an OpenAI body before an engine sees it: unsafe fields, bounds of work, fields that
the router uses. The engine checks the rest."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from sluice.protocol.requests import Endpoint, RequestBody
from sluice.router import wire
from sluice.router.errors import ApiError, Reason, invalid, shown
from sluice.router.request.prompt import scored
from sluice.router.wire import MAX_TOKENS

# Bounds on the engine cost of one body's options, in addition to its tokens.
#
# Without them the size of the body would be the only bound: a hundred thousand biases are read in
# each step of a batch, and the time to compile a pattern grows with the cube of its length.

MAX_ENTRIES: Final = {
    "allowed_token_ids": 65_536,
    "bad_words": 128,
    "documents": 1_024,
    "functions": 1_024,
    "logit_bias": 1_024,
    "logprob_token_ids": 128,
    "stop": 16,
    "stop_sequences": 16,
    "stop_token_ids": 1_024,
    "tools": 1_024,
}
"""Maximum entries of lists and objects, by field. An engine may allow fewer."""

MAX_NAME_CHARACTERS: Final = 512  # maximum characters of a model's name

MAX_STOP_CHARACTERS: Final = 4_096
"""Maximum characters of all stop texts: a stream holds back as many."""

MAX_SCHEMA_CHARACTERS: Final = 65_536
"""Maximum characters of an output constraint as JSON: schemas, choices, grammars."""

MAX_GRAMMAR_CHARACTERS: Final = 8_192  # maximum characters of a grammar in it

MAX_PATTERN_CHARACTERS: Final = 2_048
"""Maximum characters of all regular expressions in it. The worst patterns of this length, such as
``a?`` and then ``a`` hundreds of times, take xgrammar seconds of one core."""

_STOPS: Final = ("stop", "stop_sequences")
_CONSTRAINTS: Final = ("response_format", "structured_outputs", "text", "output_config")
_FORMATTED: Final = ("text", "output_config")
"""Of these, the ones with the constraint in their field `format`."""
_PATTERNS: Final = frozenset(("pattern", "regex", "whitespace_pattern"))
_TEXTS_OF_JSON: Final = ("json", "structural_tag")
"""Fields of `structured_outputs` that may be a string of JSON."""


def check_options(body: dict[str, Any]) -> None:
    """Refuse options that are too large. ``O(options)``. Raises ApiError: 400."""
    for name, most in MAX_ENTRIES.items():
        value = body.get(name)
        if isinstance(value, list | dict) and len(value) > most:
            raise invalid(f"{name} must have at most {most} entries, got {len(value)}", name)
    for name in _STOPS:
        stop = body.get(name)
        texts = stop if isinstance(stop, list) else [stop]
        if sum(len(text) for text in texts if isinstance(text, str)) > MAX_STOP_CHARACTERS:
            raise invalid(f"{name} must have at most {MAX_STOP_CHARACTERS} characters in all", name)
    for name in _CONSTRAINTS:
        if isinstance(body.get(name), dict):
            _check_constraint(name, body[name])


def is_structured(body: dict[str, Any]) -> bool:
    """Whether the output must match a grammar that the body states. ``O(tools)``."""
    for name in _CONSTRAINTS:
        value = body.get(name)
        form = value.get("format") if name in _FORMATTED and isinstance(value, dict) else value
        if isinstance(form, dict) and form and form.get("type") != "text":
            return True
    choice = body.get("tool_choice")
    if isinstance(choice, dict):
        choice = choice.get("type", "required")
    if choice not in (None, "auto", "none"):
        return True
    tools = body.get("tools")
    return isinstance(tools, list) and any(map(_is_strict, tools))


def refuse_structured(body: dict[str, Any]) -> None:
    """Refuse structured output where not allowed. ``O(tools)``. Raises ApiError: 403."""
    if is_structured(body):
        raise ApiError(
            Reason.NOT_PERMITTED,
            "Structured output is disabled for this API key or for all keys: leave out "
            f"{', '.join(_CONSTRAINTS)}, strict tools and a tool_choice that demands a call.",
        )


def _is_strict(tool: Any) -> bool:
    if not isinstance(tool, dict):
        return False
    function = tool.get("function")
    return bool(tool.get("strict") or (isinstance(function, dict) and function.get("strict")))


def check_media(contents: list[Any], name: str) -> None:
    """Refuse media that an engine would fetch. ``O(contents)``. Raises ApiError: 400."""
    for key, value in _entries(contents):
        if key == "source" and isinstance(value, dict):
            # Anthropic's: with another type than `url` it holds the medium.
            address = value.get("url") if value.get("type") == "url" else None
        elif key.endswith("_url"):
            address = value.get("url") if isinstance(value, dict) else value
        else:
            continue
        if isinstance(address, str) and address[:5].lower() != "data:":
            raise invalid(
                f"{key} must contain the medium itself, as a data: URL, got {shown(address)}: "
                "fetching media from URLs is disabled (router.fetch_media)",
                name,
            )


def _check_constraint(name: str, value: dict[str, Any]) -> None:
    if len(json.dumps(value)) > MAX_SCHEMA_CHARACTERS:
        raise invalid(f"{name} must have at most {MAX_SCHEMA_CHARACTERS} characters", name)
    patterns = grammars = 0
    for key, text in _entries([value, *map(_parsed, map(value.get, _TEXTS_OF_JSON))]):
        if isinstance(text, str):
            patterns += len(text) if key in _PATTERNS else 0
            grammars += len(text) if key == "grammar" else 0
    if patterns > MAX_PATTERN_CHARACTERS:
        raise invalid(
            f"{name} must have at most {MAX_PATTERN_CHARACTERS} characters of regular expressions, "
            f"got {patterns}",
            name,
        )
    if grammars > MAX_GRAMMAR_CHARACTERS:
        raise invalid(
            f"{name} must have at most {MAX_GRAMMAR_CHARACTERS} characters of grammars, "
            f"got {grammars}",
            name,
        )


def _entries(values: list[Any]) -> Iterator[tuple[str, Any]]:
    """The keys and values of all objects in ``values``."""
    level = list(values)
    while level:
        value = level.pop()
        if isinstance(value, dict):
            yield from value.items()
            level.extend(value.values())
        elif isinstance(value, list):
            level.extend(value)


def _parsed(text: Any) -> Any:
    try:
        return json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        return None  # which the engine refuses


# Integers as JSON Schema has them: a number without a fraction, also if it is written ``16.0``.


def as_integer(value: Any) -> Any:
    """``value``, as an ``int`` if it is a float without a fraction."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


INTEGER: Final = BeforeValidator(as_integer)
"""Annotates an ``int`` field of a strict model."""


MAX_CHOICES = 16
"""Maximum number of choices (``n``) of a prompt."""

MAX_PROMPTS = 128  # maximum number of prompts of one completion request
MAX_INPUTS = 2048  # maximum number of inputs of one embeddings request, as OpenAI allows

MAX_MESSAGES = 4096
"""Maximum number of messages of one chat request, and of items of one response's input."""

MAX_CONTENT_PARTS = 16_384
"""Maximum number of content parts of one chat request, over all its messages."""

_WITH_MEDIA = (
    *("messages", "input", "system", "query", "documents", "queries", "items"),
    *("data_1", "data_2", "text_1", "text_2"),
)
"""The fields that may hold media, alone or in a list."""

_COUNTS = ("n", "max_tokens", "max_completion_tokens", "max_output_tokens")
_TOKEN_IDS = ("prompt", "input", "tokens")
"""Fields with integers, and with lists of them."""

_SLICE = 1 << 16  # token ids that are checked in one call

_ENGINE_FIELDS = ("kv_transfer_params", "ec_transfer_params")
_SERVER_FIELDS = {
    "request_id": "the server makes it; see the response header " + wire.REQUEST_ID_HEADER,
    "priority": f"state {wire.SLO_FIELD}.{wire.PRIORITY} instead",
    # vLLM takes these of its earlier versions, and ignores them.
    **{
        f"guided_{name}": f"state structured_outputs.{name} instead"
        for name in ("json", "regex", "choice", "grammar")
    },
    **dict.fromkeys(
        ("guided_decoding_backend", "guided_whitespace_pattern"),
        "the engine's configuration states it",
    ),
}
_NOT_KEPT = {
    "background": "the answer comes with the request; leave it out",
    "conversation": "nothing is kept between requests; send the whole conversation as input",
    "previous_response_id": "no response is kept; send the whole conversation as input",
    "prompt": "no prompts are kept here; send it as instructions and input",
    "previous_input_messages": "send the whole conversation as input",
}
"""Fields of the responses API that need state beyond one request."""

_NOT_SERVED = {
    "compaction": "send a prompt that asks for a summary",
    "container": "no tools run here",
    "mcp_servers": "no tools run here; call them and send their results",
    "thread": "nothing is kept between requests; send all messages",
}
"""Fields of Anthropic's API without which the answer would be to something else."""

_ARGS_FIELD = "vllm_xargs"
_RESERVED_ARGS_PREFIX = "sluice"

_SCORED = "a string or an object with a list as content, or a list of these"

_Count = Annotated[int, Field(ge=1, le=MAX_TOKENS), INTEGER] | None
_Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARACTERS)]


class _Any(BaseModel, strict=True, extra="ignore"):
    """The fields that all endpoints share and the router relies on."""

    model: _Name


class _Generate(_Any):
    stream: bool | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES), INTEGER] | None = None
    max_tokens: _Count = None
    max_completion_tokens: _Count = None
    max_output_tokens: _Count = None


class _Complete(_Generate):
    # With 0 and `echo` the answer is the prompt, with its log probabilities.
    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS), INTEGER] | None = None


class _Speech(_Any):
    stream: bool | None = None
    n: Annotated[int, Field(ge=1, le=1), INTEGER] | None = None
    max_completion_tokens: _Count = None


class _Embed(_Any):
    encoding_format: Literal["float", "base64"] | None = None


class _Tokens(_Any):
    model: _Name | None = None  # type: ignore[assignment]


_FIELDS: dict[Endpoint, type[_Any]] = {
    "chat": _Generate,
    "completions": _Complete,
    "responses": _Generate,
    "messages": _Generate,
    "count_tokens": _Any,
    "embeddings": _Embed,
    "classify": _Any,
    "pooling": _Embed,
    "score": _Any,
    "rerank": _Any,
    "transcriptions": _Speech,
    "translations": _Speech,
    "tokenize": _Tokens,
    "detokenize": _Tokens,
}


@cache
def field_schemas(endpoint: Endpoint) -> Mapping[str, Any]:
    """JSON schemas of the fields that are checked by type and bound, by name."""
    properties = _FIELDS[endpoint].model_json_schema()["properties"]
    noise = ("title", "default")
    return {
        name: {key: value for key, value in schema.items() if key not in noise}
        for name, schema in properties.items()
    }


def check_body(
    endpoint: Endpoint, body: dict[str, Any], fetch_media: bool = False
) -> dict[str, Any]:
    """Check a body for an engine, and return it with an ``int`` for each integer that the router
    reads. ``O(messages)`` or ``O(prompt tokens)``, and ``O(options)``. Raises ApiError: 400."""
    _check_internal(body)
    schemas = partial(field_schemas, endpoint)
    validated(_FIELDS[endpoint], body, str, lambda name: _allowed(schemas()[name]))
    for name in _COUNTS:
        if type(body.get(name)) is float:
            body = {**body, name: as_integer(body[name])}
    try:
        _CHECKS[endpoint](body)
    except ApiError:
        body = _with_integer_ids(body)
        _CHECKS[endpoint](body)
    check_options(body)
    if not fetch_media:
        _check_media(body)
    return body


def _with_integer_ids(body: dict[str, Any]) -> dict[str, Any]:
    """``body`` with an ``int`` for each number without a fraction in lists of token ids."""
    lists = {name: body.get(name) for name in _TOKEN_IDS}
    return {**body, **{n: _integers_in(ids) for n, ids in lists.items() if isinstance(ids, list)}}


def _integers_in(values: list[Any]) -> list[Any]:
    return [
        _integers_in(value) if isinstance(value, list) else as_integer(value) for value in values
    ]


_ROUTER_FIELDS = frozenset(
    (wire.SLO_FIELD, wire.SERVICE_TIER_FIELD, wire.NVEXT_FIELD, *_SERVER_FIELDS)
)


def engine_body(parsed: RequestBody, body: dict[str, Any]) -> RequestBody:
    """What an engine gets of a body, which was ``parsed``: no fields that are the router's own."""
    if body is parsed and _ROUTER_FIELDS.isdisjoint(body):
        return parsed
    return parsed.with_fields({n: value for n, value in body.items() if n not in _ROUTER_FIELDS})


def _check_media(body: dict[str, Any]) -> None:
    for name in _WITH_MEDIA:
        given = body.get(name)
        given = [given] if isinstance(given, dict) else given
        if not isinstance(given, list):
            continue
        for message in given:
            # Most messages are text, and need no walk.
            if isinstance(message, dict) and not isinstance(message.get("content"), str):
                check_media([message], name)


def _check_internal(body: dict[str, Any]) -> None:
    for name in _ENGINE_FIELDS:
        if body.get(name) is not None:
            raise invalid(f"{name} is for the server's own use; leave it out", name)
    for name, why in _SERVER_FIELDS.items():
        if body.get(name) is not None:
            raise invalid(f"{name} cannot be set: {why}", name)
    extra = body.get(_ARGS_FIELD)
    if extra is None:
        return
    if not isinstance(extra, dict):
        raise invalid(f"{_ARGS_FIELD} must be an object, got {shown(extra)}", _ARGS_FIELD)
    for key in extra:
        if key.lower().startswith(_RESERVED_ARGS_PREFIX) or key in _ENGINE_FIELDS:
            raise invalid(
                f"{_ARGS_FIELD} must not have the key {shown(key)}: it is for the server's own use",
                _ARGS_FIELD,
            )


_Model = TypeVar("_Model", bound=BaseModel)


def validated(
    kind: type[_Model],
    values: Mapping[str, Any],
    name_of: Callable[[str], str],
    allowed: Callable[[str], str],
    param: str | None = None,
) -> _Model:
    """What a client states, by field. ``name_of``: its names of fields; ``allowed``: their values
    in words; ``param``: of an error, if not the field. Raises ApiError: 400."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    field = str(first["loc"][0])
    name, got = name_of(field), shown(values[field]) if field in values else "nothing"
    raise invalid(f"{name} must be {allowed(field)}, got {got}", param or name)


def _allowed(schema: dict[str, Any]) -> str:
    """What a field's schema allows, in words; ``null`` is not named."""
    stated = schema.get("anyOf", [schema])[0]
    if "enum" in stated:
        return " or ".join(stated["enum"])
    match stated["type"]:
        case "integer":
            return f"an integer from {stated['minimum']} to {stated['maximum']}"
        case "string":
            return f"a string of {stated['minLength']} to {stated['maxLength']} characters"
        case _:
            return "true or false"


def _check_messages(body: dict[str, Any]) -> None:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise invalid(
            f"messages must be a list of at least one message, got {shown(messages)}", "messages"
        )
    if len(messages) > MAX_MESSAGES:
        raise invalid(
            f"messages must be at most {MAX_MESSAGES} messages, got {len(messages)}", "messages"
        )
    for index, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        if not isinstance(role, str) or not role:
            raise invalid(
                f"messages[{index}] must be an object with a role, which is a string", "messages"
            )
    _check_parts(messages, "messages")


def _check_parts(messages: list[dict[str, Any]], name: str) -> None:
    parts = 0
    for message in messages:
        content = message.get("content")
        parts += len(content) if isinstance(content, list) else 0
    if parts > MAX_CONTENT_PARTS:
        raise invalid(
            f"{name} must have at most {MAX_CONTENT_PARTS} content parts together, got {parts}",
            name,
        )


def _check_completion(body: dict[str, Any]) -> None:
    _check_prompt(body.get("prompt"), "prompt", MAX_PROMPTS)
    if body.get("max_tokens") == 0 and not body.get("echo"):
        raise invalid("max_tokens may be 0 only with echo: the answer would be empty", "max_tokens")


def _check_response(body: dict[str, Any]) -> None:
    for name, why in _NOT_KEPT.items():
        if body.get(name):
            raise invalid(f"{name} is not supported: {why}", name)
    given = body.get("input")
    if isinstance(given, str):
        return
    if not isinstance(given, list) or not given or not all(isinstance(i, dict) for i in given):
        raise invalid(
            f"input must be a string or a list of at least one object, got {shown(given)}", "input"
        )
    if len(given) > MAX_MESSAGES:
        raise invalid(f"input must be at most {MAX_MESSAGES} items, got {len(given)}", "input")
    _check_parts(given, "input")


def _check_conversation(body: dict[str, Any]) -> None:
    for name, why in _NOT_SERVED.items():
        if body.get(name):
            reason = Reason.THREAD_UNSUPPORTED if name == "thread" else Reason.INVALID_VALUE
            raise ApiError(reason, f"{name} is not supported: {why}", name)
    system = body.get("system")
    if isinstance(system, list):
        _check_parts([{"content": system}], "system")
    elif system is not None and not isinstance(system, str):
        raise invalid(
            f"system must be a string or a list of content parts, got {shown(system)}", "system"
        )
    _check_messages(body)


def _check_scored(endpoint: Endpoint, body: dict[str, Any]) -> None:
    names = ("query", "documents") if endpoint == "rerank" else ("queries", "documents")
    try:
        left, right = scored(endpoint, body)
    except KeyError:
        missing = next(name for name in names if name not in body)
        raise invalid(f"{missing} must be {_SCORED}, got nothing", missing) from None
    for name, given in zip(names, (left, right), strict=True):
        if not 1 <= len(given) <= MAX_INPUTS:
            raise invalid(f"{name} must have 1 to {MAX_INPUTS} entries, got {len(given)}", name)
    for name, given in zip(names, (left, right), strict=True):
        for entry in given:
            content = entry.get("content") if isinstance(entry, dict) else None
            if not isinstance(entry, str) and not isinstance(content, list):
                raise invalid(f"{names[0]} and {names[1]} must be {_SCORED}", name)


def _check_sound(body: dict[str, Any]) -> None:
    if not isinstance(body.get("file"), bytes):
        raise invalid("file must be audio, as the file of a form", "file")


def _check_embeddings(body: dict[str, Any]) -> None:
    if body.get("input") is None and body.get("messages") is not None:
        _check_messages(body)
    else:
        _check_prompt(body.get("input"), "input", MAX_INPUTS)


def _check_tokenize(body: dict[str, Any]) -> None:
    if body.get("messages") is not None:
        _check_messages(body)
    elif not isinstance(prompt := body.get("prompt"), str):
        raise invalid(f"prompt must be a string, got {shown(prompt)}", "prompt")


def _check_detokenize(body: dict[str, Any]) -> None:
    tokens = body.get("tokens")
    if not isinstance(tokens, list) or (tokens and not _are_token_ids(tokens)):
        raise invalid(
            f"tokens must be a list of token ids (integers from 0 to {MAX_TOKENS})", "tokens"
        )


_CHECKS: dict[Endpoint, Callable[[dict[str, Any]], None]] = {
    "chat": _check_messages,
    "completions": _check_completion,
    "responses": _check_response,
    "messages": _check_conversation,
    "count_tokens": _check_conversation,
    "embeddings": _check_embeddings,
    "classify": _check_embeddings,
    "pooling": _check_embeddings,
    "score": partial(_check_scored, "score"),
    "rerank": partial(_check_scored, "rerank"),
    "transcriptions": _check_sound,
    "translations": _check_sound,
    "tokenize": _check_tokenize,
    "detokenize": _check_detokenize,
}


def _check_prompt(prompt: Any, name: str, most: int) -> None:
    """A prompt is text, token ids, or a list of either."""
    if isinstance(prompt, str):
        return
    if isinstance(prompt, list) and prompt:
        if isinstance(prompt[0], int):
            if _are_token_ids(prompt):
                return
        elif len(prompt) > most:
            raise invalid(f"{name} must be at most {most} {name}s, got {len(prompt)}", name)
        elif all(isinstance(entry, str) for entry in prompt) or all(
            isinstance(entry, list) and _are_token_ids(entry) for entry in prompt
        ):
            return
    raise invalid(
        f"{name} must be a string, a list of strings, a list of token ids "
        f"(integers from 0 to {MAX_TOKENS}) or a list of lists of token ids; none may be an "
        "empty list",
        name,
    )


def _are_token_ids(values: list[Any]) -> bool:
    # There may be millions: built-in functions are fast, and other threads run between the slices.
    slices = (values[begin : begin + _SLICE] for begin in range(0, len(values), _SLICE))
    return bool(values) and all(map(_are_few_token_ids, slices))


def _are_few_token_ids(values: list[Any]) -> bool:
    # type() rather than isinstance(): JSON's true is an int to Python.
    return set(map(type, values)) == {int} and min(values) >= 0 and max(values) <= MAX_TOKENS
