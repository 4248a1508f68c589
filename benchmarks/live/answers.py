"""Checks that an answer is the requested one, complete and without duplicates.

A simulated engine's text is a function of the prompt and the position in the answer
(:mod:`sluice.replica.openai_format`), so a token that is missing, duplicated or of another answer
is detected, also in resumed streams. A real engine's text is not known beforehand; there the frame
is checked: the ids, the finish reasons, the usage and the end mark.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from sluice.replica.engine import Endpoint
from sluice.replica.openai_format import Call, output_text, parse_call

MAX_EVENT_BYTES = 1 << 20
"""Maximum length of an event of a stream."""

_DONE = "[DONE]"
_UNBOUNDED = 2**40


class WrongAnswerError(Exception):
    """An answer that does not match its request; the message names the defect in a few words."""


class ToldError(Exception):
    """An answer that ends in an explicit error; the message is its code."""


class Expected(NamedTuple):
    """The expected answer: the text of each choice and the prompt's tokens, ``None`` where they are
    not known; the number of choices; all output tokens; and whether it has usage."""

    texts: tuple[str, ...] | None
    choices: int
    prompt_tokens: int | None
    output_tokens: int
    usage: bool


def simulated(endpoint: Endpoint, body: dict[str, Any]) -> Expected:
    """A simulated engine's answer to a valid ``body``."""
    call: Call = parse_call(endpoint, body, body["model"], _UNBOUNDED)
    texts = tuple(
        output_text(call.prompts[choice // call.n].seed, choice, 0, call.max_tokens)
        for choice in range(call.choices)
    )
    prompt_tokens = sum(prompt.tokens for prompt in call.prompts)
    usage = call.include_usage or not call.stream
    return Expected(texts, call.choices, prompt_tokens, call.max_tokens * call.choices, usage)


def of_any_engine(body: dict[str, Any], output_tokens: int) -> Expected:
    """What is known beforehand of a real engine's answer with ``output_tokens`` per choice."""
    choices = int(body.get("n") or 1)
    usage = not body.get("stream") or bool((body.get("stream_options") or {}).get("include_usage"))
    return Expected(None, choices, None, output_tokens * choices, usage)


class AnswerCheck:
    """Checks one answer against the expected one while it arrives."""

    def __init__(self, expected: Expected) -> None:
        self._expected = expected
        self._rest = b""
        self._id: str | None = None
        self._said = [0] * expected.choices
        self._finished = [False] * expected.choices
        self._usage: dict[str, Any] | None = None
        self._done = False
        self.chunks = 0
        """Events so far that had text."""
        self.first_chunks = 0
        """Events with text of the first choice."""

    def feed(self, data: bytes) -> None:
        """Check the next bytes of a stream.

        Raises:
            WrongAnswerError: they do not continue the expected answer.
            ToldError: the stream has ended in an error.
        """
        *events, self._rest = (self._rest + data).split(b"\n\n")
        for event in events:
            self._take(event)
        if len(self._rest) > MAX_EVENT_BYTES:
            raise WrongAnswerError("an event without an end")

    def end_stream(self) -> None:
        """The stream is over; raises :class:`WrongAnswerError` if something is missing."""
        if not self._done or self._rest:
            raise WrongAnswerError("no end mark")
        self._check_all()

    def whole(self, data: bytes) -> None:
        """Check an answer that is not streamed; raises :class:`WrongAnswerError`, too."""
        answer = _parsed(data)
        self._see_choices(answer, "message")
        self._usage = answer.get("usage")
        self._check_all()

    def _take(self, event: bytes) -> None:
        if self._done:
            raise WrongAnswerError("more after the end mark")
        if not event.startswith(b"data: ") or b"\n" in event:
            raise WrongAnswerError("not an event")
        if event[6:] == _DONE.encode():
            self._done = True
            return
        told = _parsed(event[6:])
        if "error" in told:
            error = told["error"]
            raise ToldError(str(error.get("code") if isinstance(error, dict) else error))
        if self._id is None:
            self._id = told.get("id")
        elif told.get("id") != self._id:
            raise WrongAnswerError("another id in the stream")
        if self._usage is not None:
            raise WrongAnswerError("more after the usage")
        self._see_choices(told, "delta")
        self._usage = told.get("usage")

    def _see_choices(self, told: dict[str, Any], inner: str) -> None:
        for choice in told.get("choices", ()):
            index = choice.get("index", 0)
            if not 0 <= index < len(self._said):
                raise WrongAnswerError("a choice that was not asked for")
            text = choice["text"] if "text" in choice else choice[inner].get("content")
            if text:
                self._see_text(index, text)
            if choice.get("finish_reason") is not None:
                if self._finished[index]:
                    raise WrongAnswerError("two ends of one choice")
                self._finished[index] = True

    def _see_text(self, index: int, text: str) -> None:
        self.chunks += 1
        self.first_chunks += index == 0
        if self._finished[index]:
            raise WrongAnswerError("text after the end of its choice")
        said = self._said[index]
        self._said[index] = said + len(text)
        if self._expected.texts is not None and not self._expected.texts[index].startswith(
            text, said
        ):
            raise WrongAnswerError("tokens are missing or there twice")

    def _check_all(self) -> None:
        expected = self._expected
        if expected.texts is not None and self._said != [len(text) for text in expected.texts]:
            raise WrongAnswerError("tokens are missing")
        if not all(self._finished):
            raise WrongAnswerError("no finish reason")
        if not expected.usage:
            return
        usage = self._usage or {}
        if usage.get("completion_tokens") != expected.output_tokens:
            raise WrongAnswerError("another number of tokens")
        if expected.prompt_tokens not in (None, usage.get("prompt_tokens")):
            raise WrongAnswerError("another number of prompt tokens")


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except ValueError:
        raise WrongAnswerError("not JSON") from None
    if not isinstance(found, dict):
        raise WrongAnswerError("not an object")
    return found
