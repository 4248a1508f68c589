"""Estimated size of a call's prompt before it is tokenised, for the controller's placement."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any

from sluice.protocol.requests import ANTHROPIC, EMBEDDING, GENERATING, POOLING, SPEECH, Endpoint

MIN_RATIO = 1.0
MAX_RATIO = 16.0
FIRST_RATIO = 4.0
"""Characters per token until answers of engines correct it; usual for English text."""

SMOOTHING = 0.1
"""Weight of the newest observation in the moving average."""

MESSAGE_TOKENS = 4
"""Approximate tokens that a chat template adds to a message."""

MEDIA_TOKENS = 512
"""Assumed tokens of an image or of audio; only the engine knows the number."""

AUDIO_CHARACTERS_PER_S = 50
"""A second of audio counts as this many characters of text. With :data:`FIRST_RATIO` that is 12.5
tokens, usual for models that read audio as a part of the prompt; then the ratio is learned as for
text."""

AUDIO_BYTES_PER_S = 4_000
"""Assumed bytes of a second of compressed audio, 32 kbit/s: most formats take more, so it is
shorter than assumed."""

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

MAX_OUTPUT_TOKENS = 1 << 31
"""Upper bound of the counted output tokens."""


@dataclass(frozen=True, slots=True)
class PromptSize:
    """Countable parts of a prompt: ``characters`` of text and the number of known ``tokens``."""

    characters: int = 0
    tokens: int = 0


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
    """The characters that audio counts as, by its duration: exactly that of a WAV, an upper bound
    for usual files of other formats. ``O(1)``."""
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
    """Maximum tokens that a validated body may generate, over all its prompts and choices; 0 if
    only the model's length bounds it."""
    if endpoint == "chat":
        tokens = body.get("max_completion_tokens") or body.get("max_tokens") or 0
    elif endpoint == "completions":
        stated = body.get("max_tokens")
        # With 0 the engine makes one, which it does not send.
        tokens = COMPLETION_TOKENS if stated is None else max(1, stated)
    elif endpoint == "responses":
        tokens = body.get("max_output_tokens") or 0
    elif endpoint == "messages":
        tokens = body.get("max_tokens") or 0
    elif endpoint in SPEECH:
        tokens = body.get("max_completion_tokens") or 0
    elif endpoint in POOLING:
        tokens = 1
    else:
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
    the other list.

    Raises:
        KeyError: a field is missing.
    """
    pairs = (("query", "documents"),) if endpoint == "rerank" else SCORED
    names = next((pair for pair in pairs if all(name in body for name in pair)), pairs[0])
    left, right = (body[name] for name in names)
    return left if isinstance(left, list) else [left], right if isinstance(right, list) else [right]


def messages_of(endpoint: Endpoint, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The validated conversation of a body, with what the system says first; some messages of a
    response have no role."""
    if endpoint in ANTHROPIC:
        system = body.get("system")
        first = [{"role": "system", "content": system}] if system else []
        return [*first, *body["messages"]]
    if endpoint == "chat":
        messages: list[dict[str, Any]] = body["messages"]
        return messages
    given = body["input"]
    items = [{"content": given}] if isinstance(given, str) else given
    instructions = body.get("instructions")
    return [{"content": instructions}, *items] if isinstance(instructions, str) else items


class TokenEstimator:
    """Estimates prompt tokens: exact for token ids, else by characters per token, learned."""

    def __init__(self) -> None:
        self.ratio = FIRST_RATIO

    def estimate(self, size: PromptSize) -> int:
        """Tokens of a prompt, at least 1."""
        return max(1, size.tokens + round(size.characters / self.ratio))

    def learn(self, size: PromptSize, prompt_tokens: int) -> None:
        """Update the ratio with a prompt that had ``prompt_tokens``."""
        from_text = prompt_tokens - size.tokens
        if size.characters == 0 or from_text <= 0:
            return
        seen = min(max(size.characters / from_text, MIN_RATIO), MAX_RATIO)
        self.ratio += SMOOTHING * (seen - self.ratio)


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
            elif part is not None:
                tokens += MEDIA_TOKENS
    if tools:
        characters += len(repr(tools))
    return PromptSize(characters, tokens)


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
