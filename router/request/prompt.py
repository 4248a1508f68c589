"""Limits on the prompt and output length of one request, of the router and of its key."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import takewhile
from math import ceil
from typing import Any, Final, TypeGuard

from sluice.protocol.requests import ANTHROPIC, EMBEDDING, GENERATING, POOLING, SPEECH, Endpoint
from sluice.router.config import RouterConfig
from sluice.router.errors import ApiError, Reason, invalid, shown
from sluice.router.tenancy.limits import NO_CAPS, TenantLimits
from sluice.scheduling.fleet.prefix import (
    CHUNK_ENDS,
    MIN_MESSAGE_END,
    NO_PREFIX,
    TOKEN_UNITS,
    PromptPrefix,
)
from sluice.scheduling.request.job import MAX_CHUNKS, MAX_MESSAGE_ENDS

# Prefix hashes of a prompt, see :mod:`sluice.scheduling.fleet.prefix`, from its text or token ids.
#
# The tokens of a prompt depend on more than its text: on the model, the tools, the template. All
# of these are hashed before the text, so that prompts share a hash only if their tokens begin
# alike. Templates render tools in different places; here they come first, as in some templates,
# which predicts fewer shared prefixes.
#
# The hashes are not keyed: only the controller and the replicas receive them. Anything that a
# client could learn by probing, it learns from any prefix cache's response times; the field
# ``cache_salt`` separates prompts here as it does in vLLM's cache.

# Estimated size of a call's prompt before it is tokenised, for the controller's placement.

MIN_RATIO = 1.0
MAX_RATIO = 16.0
FIRST_RATIO = 4.0
"""Characters per token until answers of engines correct it; usual for English text."""

SMOOTHING = 0.1  # weight of the newest observation in the moving average
MAX_CONVERSATIONS = 4096  # of which the ratio is known
MESSAGE_TOKENS = 4  # approximate tokens that a chat template adds to a message
MEDIA_TOKENS = 512  # assumed tokens of an image or of audio; only the engine knows the number

AUDIO_CHARACTERS_PER_S = 50
"""A second of audio counts as this many characters of text: 12.5 tokens by :data:`FIRST_RATIO`."""

AUDIO_BYTES_PER_S = 4_000
"""Assumed bytes of a second of compressed audio, 32 kbit/s: most formats take more."""

_MIN_WAV_BYTES_PER_S = 1_000
"""Bytes of a second of the poorest WAV. A header that states fewer is not believed."""

COMPLETION_TOKENS = 16
"""Output tokens of a completion that states no maximum: OpenAI's default, and vLLM's."""

SCORED = (
    ("queries", "documents"),
    ("queries", "items"),
    ("data_1", "data_2"),
    ("text_1", "text_2"),
)
"""The names that a scoring request may give to what it scores and against what."""

MAX_OUTPUT_TOKENS = 1 << 31  # upper bound of the counted output tokens


@dataclass(frozen=True, slots=True)
class PromptSize:
    """Countable parts of a prompt: ``characters`` of text and the number of known ``tokens``.
    ``conversation``: the session of which it is a turn; 0: of none."""

    characters: int = 0
    tokens: int = 0
    conversation: int = 0


def measure(endpoint: Endpoint, body: dict[str, Any]) -> PromptSize:
    """Measure a validated body. ``O(messages)``: it never reads the text."""
    if endpoint == "completions":
        return _measure_prompt(body["prompt"])
    if endpoint in SPEECH:
        return PromptSize(audio_characters(body["file"]) + len(body.get("prompt") or ""))
    if endpoint in GENERATING | ANTHROPIC:
        return _measure_chat(messages_of(endpoint, body), body.get("tools"))
    if endpoint in ("score", "rerank"):
        return _measure_pairs(*scored(endpoint, body))
    if endpoint in EMBEDDING:
        text = body.get("input")
    elif endpoint == "tokenize":
        text = body.get("prompt")
    else:
        return PromptSize(tokens=len(body["tokens"]))
    if text is None:
        return _measure_chat(body["messages"], body.get("tools"))
    return _measure_prompt(text)


def audio_characters(audio: bytes) -> int:
    """Characters that audio counts as, by duration; exact for WAV, else an upper bound.
    ``O(1)``."""
    per_s = AUDIO_BYTES_PER_S
    if audio[:4] == b"RIFF" and audio[8:16] == b"WAVEfmt ":
        # By the fields that decoders go by; the header's own bytes per second may say anything.
        rate, frame = int.from_bytes(audio[24:28], "little"), int.from_bytes(audio[32:34], "little")
        per_s = max(rate * frame, _MIN_WAV_BYTES_PER_S)
    return ceil(AUDIO_CHARACTERS_PER_S * len(audio) / per_s)


def longest_ids(endpoint: Endpoint, body: dict[str, Any]) -> tuple[str, int]:
    """The field of an unchecked body that holds prompts, and the number of token ids of the longest
    one; 0 if no prompt is token ids, or the engine is asked to truncate them. ``O(prompts)``."""
    name = "input" if endpoint in EMBEDDING else "prompt"
    given = body.get(name)
    if endpoint not in EMBEDDING | {"completions"} or not isinstance(given, list) or not given:
        return name, 0
    if body.get("truncate_prompt_tokens") is not None:
        return name, 0
    if isinstance(given[0], list):
        return name, max(len(prompt) for prompt in given if isinstance(prompt, list))
    return name, len(given) if isinstance(given[0], int) else 0


def output_limit(endpoint: Endpoint, body: dict[str, Any]) -> int:
    """Maximum tokens over all prompts and choices; 0: the model's length bounds it."""
    tokens = 1 if endpoint in POOLING else None
    for field in _OUTPUT_FIELDS.get(endpoint, ()):
        if tokens is None:
            tokens = body.get(field)
    if endpoint == "completions":
        # With 0 the engine makes one, which it does not send.
        tokens = COMPLETION_TOKENS if tokens is None else max(1, tokens)
    if not tokens:
        return 0
    return min(tokens * outputs_of(endpoint, body), MAX_OUTPUT_TOKENS)


def outputs_of(endpoint: Endpoint, body: dict[str, Any]) -> int:
    """Number of outputs that a validated body asks for: the choices of all its prompts."""
    if endpoint in EMBEDDING:
        return _prompts(body.get("input"))
    if endpoint in ("score", "rerank"):
        return max(map(len, scored(endpoint, body)))
    if endpoint in SPEECH or endpoint in ("responses", "messages"):
        return 1
    prompts = _prompts(body["prompt"]) if endpoint == "completions" else 1
    return prompts * (body.get("n") or 1)


def _prompts(prompt: Any) -> int:
    several = isinstance(prompt, list) and not isinstance(prompt[0], int)
    return len(prompt) if several else 1


def scored(endpoint: Endpoint, body: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """What a scoring body scores, and against what. A list of one is scored against each entry of
    the other list. Raises KeyError: a field is missing."""
    pairs = (("query", "documents"),) if endpoint == "rerank" else SCORED
    names = next((pair for pair in pairs if all(name in body for name in pair)), pairs[0])
    left, right = (body[name] for name in names)
    return left if isinstance(left, list) else [left], right if isinstance(right, list) else [right]


def messages_of(endpoint: Endpoint, body: dict[str, Any]) -> list[dict[str, Any]]:
    """A body's validated conversation, the system's part first; some messages have no role."""
    if endpoint in ANTHROPIC:
        system = body.get("system")
        if isinstance(system, list):
            system = [part for part in system if not _is_attribution(part)]
        first = [{"role": "system", "content": system}] if system else []
        return [*first, *body["messages"]]
    if endpoint == "chat":
        messages: list[dict[str, Any]] = body["messages"]
        return messages
    given = body["input"]
    items = [{"content": given}] if isinstance(given, str) else given
    instructions = body.get("instructions")
    return [{"content": instructions}, *items] if isinstance(instructions, str) else items


def _is_attribution(part: Any) -> bool:
    """Claude Code's first block of the system prompt. It differs by conversation, and vLLM leaves
    it out: with it no two of them would seem to begin alike."""
    text = part.get("text") if isinstance(part, dict) else None
    return isinstance(text, str) and text.startswith("x-anthropic-billing-header")


class TokenEstimator:
    """Estimates prompt tokens: exact for token ids, else by characters per token, learned: those of
    the same conversation's last prompt, else of all. Of a long conversation most is cached, so that
    a few percent of it are more than a turn has to compute."""

    def __init__(self) -> None:
        self.ratio = FIRST_RATIO
        # By conversation, least recently seen first.
        self._ratios: dict[int, float] = {}

    def estimate(self, size: PromptSize) -> int:
        """Tokens of a prompt, at least 1."""
        ratio = self._ratios.get(size.conversation, self.ratio)
        return max(1, size.tokens + round(size.characters / ratio))

    def learn(self, size: PromptSize, prompt_tokens: int) -> None:
        """Update the ratio with a prompt that had ``prompt_tokens``."""
        from_text = prompt_tokens - size.tokens
        if size.characters == 0 or from_text <= 0:
            return
        seen = min(max(size.characters / from_text, MIN_RATIO), MAX_RATIO)
        self.ratio += SMOOTHING * (seen - self.ratio)
        if size.conversation:
            self._ratios.pop(size.conversation, None)
            self._ratios[size.conversation] = seen
            if len(self._ratios) > MAX_CONVERSATIONS:
                del self._ratios[next(iter(self._ratios))]


def _measure_chat(messages: list[dict[str, Any]], tools: Any) -> PromptSize:
    characters = tokens = 0
    for message in messages:
        tokens += MESSAGE_TOKENS
        content = message.get("content")
        parts = content if isinstance(content, list) else [content]
        for part in parts:
            text = part.get("text") if isinstance(part, dict) else part
            if isinstance(text, str):
                characters += len(text)
            elif _is_of_tool(part):
                characters += _characters(part)
            elif part is not None:
                tokens += MEDIA_TOKENS
        if not message.keys() <= _PLAIN_KEYS:
            characters += sum(_characters(message.get(key)) for key in _CALL_KEYS)
    if tools:
        characters += len(repr(tools))
    return PromptSize(characters, tokens)


def _is_of_tool(part: Any) -> TypeGuard[dict[str, Any]]:
    """Whether a part of a message of Anthropic's is text in another form, without a medium."""
    if not isinstance(part, dict) or str(part.get("type")) not in _TOOL_PARTS:
        return False
    content = part.get("content")
    nested = content if isinstance(content, list) else ()
    return all(isinstance(each, dict) and "text" in each for each in nested)


def _characters(value: Any) -> int:
    """Characters of all texts in a value. ``O(values)``."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list):
        return 0
    return sum(map(_characters, value))


def _measure_pairs(left: list[Any], right: list[Any]) -> PromptSize:
    """The engine reads what is scored once for each entry that it is scored against."""
    pairs = max(len(left), len(right))
    characters = tokens = 0
    for entries in (left, right):
        times = pairs if len(entries) == 1 else 1
        for entry in entries:
            parts = [entry] if isinstance(entry, str) else entry["content"]
            for part in parts:
                text = part.get("text") if isinstance(part, dict) else part
                characters += times * len(text) if isinstance(text, str) else 0
                tokens += 0 if isinstance(text, str) else times * MEDIA_TOKENS
    return PromptSize(characters, tokens)


def _measure_prompt(prompt: str | list[Any]) -> PromptSize:
    if isinstance(prompt, str):
        return PromptSize(characters=len(prompt))
    if isinstance(prompt[0], int):
        return PromptSize(tokens=len(prompt))
    size = sum(len(entry) for entry in prompt)
    return PromptSize(characters=size) if isinstance(prompt[0], str) else PromptSize(tokens=size)


_SALT = "cache_salt"
_SETTINGS = (
    "model",
    _SALT,
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
    "documents",
    "reasoning_effort",
    "tool_choice",
    "reasoning",
)
"""Fields that change the rendering of the whole prompt."""

_UNREADABLE = frozenset(("prompt_embeds", "truncate_prompt_tokens"))
"""Fields with which a prompt does not begin with its text."""

_PLAIN_KEYS = frozenset(("content", "role"))
_CALL_KEYS = ("tool_calls", "name", "arguments", "output")
"""Fields of messages with calls and results of tools, which are part of the prompt."""

_TOOL_PARTS = frozenset(("tool_use", "tool_result", "thinking", "redacted_thinking", "refusal"))
"""Parts of messages that have no ``text`` and are no medium."""

_WITH_PREFIX = GENERATING - SPEECH
_MEDIUM_UNITS = MEDIA_TOKENS * TOKEN_UNITS


def prefix_of(endpoint: Endpoint, body: dict[str, Any]) -> PromptPrefix:
    """Hash the beginning of a prompt; none if shorter than a chunk, or of several prompts.
    ``O(characters)`` up to the last of :data:`~sluice.scheduling.fleet.prefix.CHUNK_ENDS`."""
    if endpoint not in _WITH_PREFIX or not _UNREADABLE.isdisjoint(body):
        return NO_PREFIX
    settings = {}
    for field in _SETTINGS:
        if body.get(field) is not None:
            settings[field] = body[field]
    hasher = blake2b(json.dumps([endpoint, settings]).encode(), digest_size=8)
    if endpoint != "completions":
        return _of_texts(hasher, *_chat_texts(messages_of(endpoint, body), body.get("tools")))
    prompt = body["prompt"]
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return _of_texts(hasher, [prompt])
    return _of_tokens(hasher, prompt) if isinstance(prompt[0], int) else NO_PREFIX


def salted(body: dict[str, Any], owner: str) -> dict[str, Any]:
    """``body`` with a ``cache_salt`` of only this ``owner``: its prompts share no KV with others. A
    salt that is not a string is left for the engine to refuse."""
    salt = body.get(_SALT)
    if salt is not None and not isinstance(salt, str):
        return body
    text = json.dumps([owner, salt]).encode()
    return {**body, _SALT: blake2b(text, digest_size=16, person=b"sluice-salt").hexdigest()}


def _chat_texts(messages: list[dict[str, Any]], tools: Any) -> tuple[list[str | None], list[int]]:
    """The texts of a conversation in order, ``None`` for a medium; and how many of them there are
    up to the end of each message."""
    texts: list[str | None] = [json.dumps(tools, ensure_ascii=False)] if tools else []
    ends: list[int] = []
    for message in messages:
        content, rest = message.get("content"), ""
        if not message.keys() <= _PLAIN_KEYS:
            others = {key: each for key, each in message.items() if key not in _PLAIN_KEYS}
            rest = json.dumps(others, ensure_ascii=False)
        # A text with zeros can look like two messages; the only effect is a wrong prediction.
        texts.append(f"\0{message.get('role')}\0{rest}\0")
        for part in content if isinstance(content, list) else [content]:
            text = part.get("text") if isinstance(part, dict) else part
            if isinstance(text, str):
                texts.append(text)
            elif _is_of_tool(part):
                # Anthropic's clients mark another part in each turn for the cache.
                plain = {key: each for key, each in part.items() if key != "cache_control"}
                texts.append(json.dumps(plain, ensure_ascii=False))
            elif part is not None:
                texts.append(None)
        ends.append(len(texts))
    return texts, ends


def _of_texts(hasher: blake2b, texts: list[str | None], ends: Sequence[int] = ()) -> PromptPrefix:
    """Hash the texts up to the first medium, whose tokens are not in the body. ``ends``: of the
    messages, numbers of texts."""
    size = 0
    for text in texts:
        size += _MEDIUM_UNITS if text is None else len(text)
    hashes: list[int] = []
    message_ends: list[int] = []
    last = ends[-MAX_MESSAGE_ENDS:] if size > MIN_MESSAGE_END and None not in texts else ()
    position = 0
    for number, text in enumerate(texts, 1):
        if text is None or len(hashes) == MAX_CHUNKS:
            break
        begin = 0
        while len(hashes) < MAX_CHUNKS and CHUNK_ENDS[len(hashes)] <= position + len(text):
            end = CHUNK_ENDS[len(hashes)] - position
            hasher.update(text[begin:end].encode())
            hashes.append(_digest(hasher))
            begin = end
        if len(hashes) < MAX_CHUNKS:
            hasher.update(text[begin:].encode())
        position += len(text)
        if number in last and position > MIN_MESSAGE_END:
            message_ends.append(_digest(hasher))
    if len(hashes) == MAX_CHUNKS:
        message_ends.clear()  # not all of it has been hashed
    return PromptPrefix(tuple(hashes), size, tuple(message_ends))


def _of_tokens(hasher: blake2b, ids: list[int]) -> PromptPrefix:
    size = len(ids) * TOKEN_UNITS
    hashes: list[int] = []
    begin = 0
    for end in takewhile(lambda end: end <= size, CHUNK_ENDS):
        chunk = ids[begin // TOKEN_UNITS : end // TOKEN_UNITS]
        hasher.update(array("I", chunk).tobytes())
        hashes.append(_digest(hasher))
        begin = end
    return PromptPrefix(tuple(hashes), size)


def _digest(hasher: blake2b) -> int:
    """63 bits of everything so far; 0 would mean no chunk."""
    return int.from_bytes(hasher.digest(), "big") >> 1 or 1


CHARACTERS_PER_TOKEN: Final = 4
"""Characters that count as a token, whatever the tokenizer: a client can compute it beforehand."""

UNSTATED_OUTPUT_TOKENS: Final = 512  # expected output tokens of a request without any limit of them

_PROMPT_FIELDS: Final = (
    "messages",
    "system",
    "prompt",
    "tokens",
    "input",
    "instructions",
    "suffix",
    "tools",
    "functions",
    "documents",
    "chat_template_kwargs",
    "query",
    "instruction",
    "file",
    *(name for pair in SCORED for name in pair),
)
"""All fields that a chat template may put into the prompt, and tokens to be decoded."""

_PROMPTS: Final = ("file", "prompt", "messages", "input", "tokens", "documents", "query")
"""The fields that a refusal names."""

_MEDIA: Final = frozenset(
    ("image_url", "input_image", "image_pil", "audio_url", "input_audio", "video_url")
)
_SOURCES: Final = {"image": "source"}
"""By the kind of a part of a message of Anthropic's, where the medium is."""

_OUTPUT_FIELDS: Final[dict[str, tuple[str, ...]]] = {
    "chat": ("max_completion_tokens", "max_tokens"),
    "completions": ("max_tokens",),
    "responses": ("max_output_tokens",),
    "messages": ("max_tokens",),
    "transcriptions": ("max_completion_tokens",),
    "translations": ("max_completion_tokens",),
}
"""Endpoints that generate, and their fields for output tokens; the first given one counts."""


def output_to_expect(endpoint: Endpoint, most: int) -> int:
    """Output tokens to reserve for a request that may have at most ``most``; 0 is no limit."""
    return most or (UNSTATED_OUTPUT_TOKENS if endpoint in _OUTPUT_FIELDS else 0)


class TokenLimits:
    """Applies the limits to bodies: the smaller of the router's and the key's."""

    def __init__(self, config: RouterConfig) -> None:
        self._prompt = config.max_prompt_tokens
        self._output = config.max_output_tokens
        self._unlimited = self._prompt is None and self._output is None

    def hold(
        self, endpoint: Endpoint, body: dict[str, Any], caps: TenantLimits
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """``body`` within the limits, and the changed fields. ``O(body)`` where prompts are
        limited. Raises ApiError: 400; prompt too long, or more choices than tokens. 403; too much
        output."""
        own = caps.max_prompt_tokens, caps.max_output_tokens
        if self._unlimited and own == (None, None):
            return body, {}
        most = _least(self._prompt, caps.max_prompt_tokens)
        if most is not None:
            _check_prompt(body, most)
        most = _least(self._output, caps.max_output_tokens)
        fields = _OUTPUT_FIELDS.get(endpoint)
        if most is None or fields is None:
            return body, {}
        return _hold_output(endpoint, body, fields, most, caps)


def shortened(endpoint: Endpoint, body: dict[str, Any], tokens: int) -> dict[str, Any]:
    """``body`` with at most ``tokens`` of output in each choice; itself if it asks for no more, or
    cannot have so few."""
    fields = _OUTPUT_FIELDS.get(endpoint)
    if fields is None or (body.get("min_tokens") or 0) > tokens:
        return body
    thinking = body.get("thinking")
    if isinstance(thinking, dict) and (thinking.get("budget_tokens") or 0) >= tokens:
        return body  # Anthropic's, which must be less
    most = tokens * outputs_of(endpoint, body)
    return _hold_output(endpoint, body, fields, most, NO_CAPS)[0]


def _hold_output(
    endpoint: Endpoint, body: dict[str, Any], fields: tuple[str, ...], most: int, caps: TenantLimits
) -> tuple[dict[str, Any], dict[str, str]]:
    asked = output_limit(endpoint, body)
    if 0 < asked <= most:
        return body, {}
    stated = [field for field in fields if body.get(field) is not None]
    each = most // (output_limit(endpoint, {**body, **dict.fromkeys(fields, 1)}) or 1)
    if stated and caps.beyond == "refuse" and asked > most:
        raise ApiError(
            Reason.NOT_PERMITTED,
            f"{stated[0]} must be at most {each} with this API key and this number of choices, "
            f"got {shown(body[stated[0]])}",
            stated[0],
        )
    if each < 1:
        raise invalid(f"a request may ask for at most {most} choices over all its prompts", "n")
    held = {field: min(body[field], each) for field in stated} or {fields[0]: each}
    return {**body, **held}, {field: str(value) for field, value in held.items()}


def _check_prompt(body: dict[str, Any], most: int) -> None:
    characters = tokens = 0
    level: list[Any] = [body[field] for field in _PROMPT_FIELDS if field in body]
    while level:
        value = level.pop()
        if isinstance(value, str):
            characters += len(value)
        elif isinstance(value, bytes):
            characters += audio_characters(value)
        elif isinstance(value, dict):
            kind = value.get("type")
            if isinstance(kind, str) and (kind in _MEDIA or kind in _SOURCES):
                tokens += MEDIA_TOKENS
                # The object's other fields are text that may become part of the prompt.
                medium = _MEDIA | {_SOURCES.get(kind, "")}
                value = {name: part for name, part in value.items() if name not in medium}
            level.extend(value.values())
            characters += sum(map(len, value))
        elif isinstance(value, list):
            if value and all(type(entry) is int for entry in value):
                tokens += len(value)
            else:
                level.extend(value)
    tokens += ceil(characters / CHARACTERS_PER_TOKEN)
    if tokens > most:
        raise invalid(
            f"the prompt has about {tokens} tokens, a token for each {CHARACTERS_PER_TOKEN} "
            f"characters of text; allowed are {most}",
            next((field for field in _PROMPTS if body.get(field)), None),
        )


def _least(one: int | None, other: int | None) -> int | None:
    given = [limit for limit in (one, other) if limit is not None]
    return min(given, default=None)
