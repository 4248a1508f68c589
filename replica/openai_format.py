"""OpenAI requests and responses of the simulated engine; vLLM has its own.

An output is always ``max_tokens`` long, of words chosen by prompt, choice and position alone. What
the text could not obey is refused. A prompt counts one token per four characters begun, at least
one; token ids count exactly."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, Final, NamedTuple
from zlib import crc32

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from sluice.protocol.errors import RequestError
from sluice.protocol.requests import Endpoint

MAX_CHOICES = 16  # Most choices (prompts times `n`) of one request

DEFAULT_MAX_TOKENS = 16
_CHARACTERS_PER_TOKEN = 4
# 64 words, none of which needs escaping in JSON.
_WORDS = (
    *("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world"),
    *("school", "state", "family", "student", "group", "country", "problem", "hand", "part"),
    *("place", "case", "week", "company", "system", "program", "question", "work", "number"),
    *("night", "point", "home", "water", "room", "mother", "area", "money", "story", "fact"),
    *("month", "lot", "right", "study", "book", "eye", "job", "word", "business", "issue", "side"),
    *("kind", "head", "house", "service", "friend", "father", "power", "hour", "game", "line"),
    *("end", "member", "law", "car"),
)


class Prompt(NamedTuple):
    """A prompt's length in tokens, and the seed of its answer."""

    tokens: int
    seed: int


@dataclass(frozen=True, slots=True)
class Call:
    """What the simulated engine takes from a request body."""

    endpoint: Endpoint
    prompts: tuple[Prompt, ...]
    n: int
    max_tokens: int
    stream: bool
    include_usage: bool

    @property
    def choices(self) -> int:
        """Choices of the response."""
        return self.n * len(self.prompts)


class _StreamOptions(BaseModel):
    model_config = ConfigDict(extra="allow")
    include_usage: bool | None = None


def _as_integer(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


_Integer = Annotated[int, BeforeValidator(_as_integer)]  # `2.0` is one, as for vLLM
_Number = Annotated[float, Field(allow_inf_nan=False, strict=False)]
_Penalty = Annotated[_Number, Field(ge=-2, le=2)]

_NEEDS_A_MODEL: Final = (
    *(
        "stop",
        "stop_token_ids",
        "bad_words",
        "allowed_token_ids",
        "logit_bias",
        "structured_outputs",
    ),
    *("logprobs", "top_logprobs", "prompt_logprobs", "echo", "suffix", "functions"),
)
_ZERO_ASKS: Final = ("logprobs", "prompt_logprobs")
"""Zero asks for the log probabilities of the tokens themselves."""


class _Common(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)
    model: str | None = None
    n: Annotated[_Integer, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Annotated[_Integer, Field(ge=1)] | None = None
    min_tokens: Annotated[_Integer, Field(ge=0)] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    temperature: Annotated[_Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[_Number, Field(gt=0, le=1)] | None = None
    min_p: Annotated[_Number, Field(ge=0, le=1)] | None = None
    top_k: Annotated[_Integer, Field(ge=-1)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repetition_penalty: Annotated[_Number, Field(gt=0)] | None = None
    seed: Annotated[_Integer, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    ignore_eos: bool | None = None
    response_format: dict[str, Any] | None = None
    tools: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None
    tool_choice: str | dict[str, Any] | None = None

    def output_tokens(self) -> int:
        return self.max_tokens or DEFAULT_MAX_TOKENS

    @model_validator(mode="after")
    def _check(self) -> _Common:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is allowed only with stream")
        if (self.min_tokens or 0) > self.output_tokens():
            raise ValueError(f"min_tokens must be at most max_tokens ({self.output_tokens()})")
        return self


class _Completion(_Common):
    prompt: str | list[int] | list[str] | list[list[int]]


class _TextPart(BaseModel):
    model_config = ConfigDict(extra="allow")
    type: str = Field(pattern="^text$")
    text: str


class _Message(BaseModel):
    model_config = ConfigDict(extra="allow")
    role: str
    content: str | list[_TextPart] | None = None


class _Chat(_Common):
    messages: list[_Message] = Field(min_length=1)
    max_completion_tokens: Annotated[_Integer, Field(ge=1)] | None = None

    def output_tokens(self) -> int:
        return self.max_completion_tokens or self.max_tokens or DEFAULT_MAX_TOKENS


def parse_call(endpoint: Endpoint, body: dict[str, Any], model: str, max_model_tokens: int) -> Call:
    """Read a request body. Raises RequestError: it is invalid, for another model, or too long."""
    if endpoint not in ("chat", "completions"):
        raise RequestError(
            f"The simulated engine does not offer {endpoint}; it offers chat and completions.",
            "model",
            404,
            "endpoint_not_offered",
        )
    try:
        parsed = (_Chat if endpoint == "chat" else _Completion).model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        param = ".".join(str(part) for part in first["loc"]) or None
        raise RequestError(f"{param or 'body'}: {first['msg']}", param) from error
    _refuse_what_needs_a_model(parsed, body)
    if parsed.model is not None and parsed.model != model:
        message = f"The model `{parsed.model}` does not exist; this server has `{model}`."
        raise RequestError(message, "model", 404, "model_not_found")
    call = Call(
        endpoint=endpoint,
        prompts=_prompts(parsed),
        n=parsed.n or 1,
        max_tokens=parsed.output_tokens(),
        stream=bool(parsed.stream),
        include_usage=bool(parsed.stream_options and parsed.stream_options.include_usage),
    )
    if call.choices > MAX_CHOICES:
        raise RequestError(
            f"prompts times n must be at most {MAX_CHOICES}, got {call.choices}", "prompt"
        )
    longest = max(prompt.tokens for prompt in call.prompts)
    if longest + call.max_tokens > max_model_tokens:
        raise RequestError(
            f"This model's maximum context length is {max_model_tokens} tokens, but "
            f"{longest} prompt tokens and {call.max_tokens} output tokens were requested.",
            "max_tokens",
        )
    return call


def _refuse_what_needs_a_model(parsed: _Common, body: dict[str, Any]) -> None:
    """Refuse what the text would have to obey. Raises RequestError: see :func:`parse_call`."""
    refused = [
        name
        for name in _NEEDS_A_MODEL
        if body.get(name) or (name in _ZERO_ASKS and type(body.get(name)) is int)
    ]
    if (parsed.response_format or {}).get("type", "text") != "text":
        refused.append("response_format")
    if parsed.tool_choice not in (None, "auto", "none"):
        refused.append("tool_choice")
    if refused:
        raise RequestError(
            f"The simulated engine has no model: leave out {', '.join(refused)}.", refused[0]
        )


def _prompts(parsed: _Common) -> tuple[Prompt, ...]:
    if isinstance(parsed, _Chat):
        return (_text_prompt("\n".join(_message_text(message) for message in parsed.messages)),)
    prompt = parsed.prompt if isinstance(parsed, _Completion) else ""
    if isinstance(prompt, str):
        return (_text_prompt(prompt),)
    if not prompt:
        raise RequestError("prompt must not be empty", "prompt")
    if isinstance(prompt[0], int):
        return (_token_prompt(prompt),)
    return tuple(
        _text_prompt(item) if isinstance(item, str) else _token_prompt(item) for item in prompt
    )


def _message_text(message: _Message) -> str:
    if isinstance(message.content, list):
        return "".join(part.text for part in message.content)
    return message.content or ""


def _text_prompt(text: str) -> Prompt:
    return Prompt(
        max(1, -(-len(text) // _CHARACTERS_PER_TOKEN)), crc32(text.encode(errors="replace"))
    )


def _token_prompt(tokens: Any) -> Prompt:
    if not tokens:
        raise RequestError("a prompt of token ids must not be empty", "prompt")
    return Prompt(len(tokens), crc32(repr(tokens).encode()))


def output_text(seed: int, choice: int, start: int, stop: int) -> str:
    """Text of output tokens ``start`` to ``stop`` (exclusive, from 0) of a choice."""
    base = seed ^ (choice * 0x9E3779B1)
    words = [
        _WORDS[((base ^ (token * 0x85EBCA6B)) * 0xC2B2AE35 >> 15) % len(_WORDS)]
        for token in range(start, stop)
    ]
    text = " ".join(words)
    return " " + text if start and text else text


class ResponseWriter:
    """Writes the response to one call. Choices are numbered prompt by prompt."""

    def __init__(self, call: Call, request_id: str, model: str, created_s: int) -> None:
        self._call = call
        chat = call.endpoint == "chat"
        self._head: dict[str, Any] = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{request_id}",
            "object": "chat.completion" if chat else "text_completion",
            "created": created_s,
            "model": model,
        }
        self._chat = chat
        head = dict(self._head)
        if chat:
            head["object"] = "chat.completion.chunk"
        # A chunk is this, the choice, and the end: dumped once, since a chunk is made per token.
        self._chunk_head = "data: " + json.dumps(head)[:-1]

    def _seed(self, choice: int) -> int:
        return self._call.prompts[choice // self._call.n].seed

    def opening(self) -> bytes:
        """First chunk of a stream: in a chat, the role of every choice."""
        if not self._chat:
            return b""
        return "".join(
            f'{self._chunk_head}, "choices": [{{"index": {choice}, "delta": '
            '{"role": "assistant", "content": ""}, "logprobs": null, "finish_reason": null}]}\n\n'
            for choice in range(self._call.choices)
        ).encode()

    def delta(self, choice: int, start: int, stop: int) -> bytes:
        """Chunk with tokens ``start`` to ``stop`` (exclusive, from 0) of a choice."""
        text = output_text(self._seed(choice), choice, start, stop)
        content = f'"delta": {{"content": "{text}"}}' if self._chat else f'"text": "{text}"'
        reason = '"length"' if stop == self._call.max_tokens else "null"
        return (
            f'{self._chunk_head}, "choices": [{{"index": {choice}, {content}, '
            f'"logprobs": null, "finish_reason": {reason}}}]}}\n\n'
        ).encode()

    def closing(self) -> bytes:
        """End of a stream, with the usage if it was asked for."""
        if not self._call.include_usage:
            return b"data: [DONE]\n\n"
        usage = json.dumps(self._usage())
        return f'{self._chunk_head}, "choices": [], "usage": {usage}}}\n\ndata: [DONE]\n\n'.encode()

    def body(self) -> bytes:
        """The whole response, not streamed."""
        choices = []
        for choice in range(self._call.choices):
            text = output_text(self._seed(choice), choice, 0, self._call.max_tokens)
            content: dict[str, Any] = {"text": text}
            if self._chat:
                content = {"message": {"role": "assistant", "content": text}}
            choices.append(
                {"index": choice, **content, "logprobs": None, "finish_reason": "length"}
            )
        return json.dumps({**self._head, "choices": choices, "usage": self._usage()}).encode()

    def _usage(self) -> dict[str, int]:
        prompt = sum(prompt.tokens for prompt in self._call.prompts)
        output = self._call.max_tokens * self._call.choices
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
        }


def models_body(model: str, max_model_tokens: int, created_s: int) -> dict[str, Any]:
    """The list-models body of one model."""
    entry = {
        "id": model,
        "object": "model",
        "created": created_s,
        "owned_by": "sluice",
        "max_model_len": max_model_tokens,
    }
    return {"object": "list", "data": [entry], "endpoints": ["chat", "completions"]}
