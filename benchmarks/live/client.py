"""The client of the live benchmarks: an open loop over HTTP, which checks every answer.

A simulated engine's text follows from prompt and position, so missing, duplicated and foreign
tokens are detected; of a real engine only ids, finish reasons, usage and end mark are checked."""

from __future__ import annotations

import asyncio
import enum
import json
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count
from math import inf
from typing import Any, NamedTuple

import aiohttp

from sluice.protocol.requests import Endpoint
from sluice.replica.openai_format import Call, output_text, parse_call
from sluice.router import wire
from sluice.scheduling.request.objective import SLO, TPOTMeter
from sluice.simulation.cluster import LOOP_ENDED
from sluice.simulation.workload import Arrival, Turn, Workload

MAX_EVENT_BYTES = 1 << 20
"""Maximum length of an event of a stream."""


class WrongAnswerError(Exception):
    """An answer that does not match its request; the message names the defect in a few words."""


class StatedError(Exception):
    """An answer that ends in an explicit error; the message is its code."""


class Expected(NamedTuple):
    """The expected answer: texts and prompt tokens (``None``: unknown), choices, output tokens,
    usage."""

    texts: tuple[str, ...] | None
    choices: int
    prompt_tokens: int | None
    output_tokens: int
    usage: bool


def simulated(endpoint: Endpoint, body: dict[str, Any]) -> Expected:
    """A simulated engine's answer to a valid ``body``."""
    call: Call = parse_call(endpoint, body, body["model"], 2**40)
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
        self.announced = False
        """Whether the stream has said that its promise is going to be missed."""

    def feed(self, data: bytes) -> None:
        """Check bytes of a stream; raises :class:`WrongAnswerError` or :class:`StatedError`."""
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
        if event.startswith(b": "):  # a comment
            self.announced = True
            return
        if not event.startswith(b"data: ") or b"\n" in event:
            raise WrongAnswerError("not an event")
        if event[6:] == b"[DONE]":
            self._done = True
            return
        piece = _parsed(event[6:])
        if "error" in piece:
            error = piece["error"]
            raise StatedError(str(error.get("code") if isinstance(error, dict) else error))
        if self._id is None:
            self._id = piece.get("id")
        elif piece.get("id") != self._id:
            raise WrongAnswerError("another id in the stream")
        if self._usage is not None:
            raise WrongAnswerError("more after the usage")
        self._see_choices(piece, "delta")
        self._usage = piece.get("usage")

    def _see_choices(self, event: dict[str, Any], inner: str) -> None:
        for choice in event.get("choices", ()):
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


GRACE_S = 300.0
"""How long after the last arrival the client waits for requests to end, seconds."""

_ERROR_CODE = re.compile(rb'"error": ?\{.*?"code": ?"?([a-z_0-9]+)', re.DOTALL)


class LoadError(RuntimeError):
    """A load without the answers that its figures need; the message says what is missing."""


Json = dict[str, Any]
Body = Callable[[str, int, Arrival], Json]
"""Makes a request from the model's name, the arrival's number and the arrival."""


class End(enum.StrEnum):
    """How a request ended."""

    ANSWERED = "answered"  # complete and without duplicates
    REFUSED = "refused"  # a 4xx or a 503 with a reason, without output
    FAILED = "failed"  # another explicit error, in the status or in the stream
    CUT = "cut"  # the connection ended in the middle of an answer, which its client sees
    LEFT = "left"  # the client disconnected, as planned
    SILENT = "silent"
    """Anything else is lost: no end, or tokens missing, duplicated or wrong without an error."""


@dataclass(slots=True)
class Outcome:
    """One request, as its client saw it. ``sent_s`` and ``ended_s`` count from the replay's start,
    other durations from when it was sent. The TTFT of an answer that is not streamed is its end
    minus the time that its objective allows for the later tokens."""

    slo: SLO
    prompt_tokens: int
    output_tokens: int
    sent_s: float
    late_s: float
    end: End = End.SILENT
    reason: str = "unfinished"
    ended_s: float | None = None
    admission: str = ""
    ttft_s: float | None = None
    tpot_s: float | None = None
    gap_s: float = 0.0
    announced_s: float | None = None

    @property
    def met(self) -> tuple[bool, ...]:
        """Whether it met TTFT, TPOT and end-to-end time; without an answer none is met."""
        if self.end is not End.ANSWERED or self.ttft_s is None or self.tpot_s is None:
            return False, False, False
        ended_s = inf if self.ended_s is None else self.ended_s
        observed = (self.ttft_s, self.tpot_s, ended_s - self.sent_s)
        pairs = zip(observed, self.slo.times_s, strict=True)
        return tuple(limit is None or value <= limit for value, limit in pairs)

    @property
    def attained(self) -> bool:
        """Whether it was answered within every objective that it states."""
        return all(self.met)


def prompt_text(number: int, tokens: int) -> str:
    """A prompt of ``tokens`` by the count of a simulated engine, unlike that of other numbers."""
    characters = tokens * 4
    return f"{number} ".ljust(characters, "x")[:characters]


def stream_body(model: str, prompt: str | list[int], tokens: int, **more: Any) -> Json:
    """A streamed completion with usage; ``more`` has further fields."""
    options = {"stream": True, "stream_options": {"include_usage": True}}
    return {"model": model, "prompt": prompt, "max_tokens": tokens, **options, **more}


def text_body(model: str, number: int, arrival: Arrival) -> Json:
    """A streamed completion with a unique prompt, for simulated engines."""
    return stream_body(model, prompt_text(number, arrival.prompt_tokens), arrival.output_tokens)


async def replay(
    url: str,
    model: str,
    workload: Workload,
    grace_s: float = GRACE_S,
    on_sent: Callable[[], None] = lambda: None,
    body: Body = text_body,
    leaves_after: Callable[[int], int | None] = lambda _: None,
    exact: bool = True,
    headers: Callable[[Arrival], Mapping[str, str]] = lambda _: {},
) -> list[Outcome]:
    """Send ``workload`` to the completions endpoint at ``url``; the outcomes in order of arrival,
    at most ``grace_s`` after the last one. The client of arrival n disconnects after
    ``leaves_after[n]`` pieces; ``exact``: the engines' text is known. The turns of a loop are sent
    one after another, until one is not answered."""
    outcomes: list[Outcome] = []
    tasks: list[asyncio.Task[None]] = []

    async def follow(outcome: Outcome, turn: Turn, send: Callable[[], Awaitable[None]]) -> None:
        await asyncio.wait([tasks[before] for before in turn.after])
        if all(outcomes[before].end is End.ANSWERED for before in turn.after):
            await asyncio.sleep(turn.gap_s)
            outcome.sent_s, outcome.late_s = time.monotonic() - started_s, 0.0
            await send()
        else:
            outcome.end, outcome.reason = End.FAILED, LOOP_ENDED

    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        started_s = time.monotonic()
        for number, arrival in enumerate(workload.arrivals):
            await asyncio.sleep(started_s + arrival.arrival_s - time.monotonic())
            now_s = time.monotonic() - started_s
            tokens = arrival.prompt_tokens, arrival.output_tokens
            outcome = Outcome(arrival.slo, *tokens, now_s, now_s - arrival.arrival_s)
            outcomes.append(outcome)
            stated = {wire.SLO_HEADERS[wire.CLASS]: arrival.slo.service_class, **headers(arrival)}
            one = _Request(session, url, outcome, leaves_after(number), stated)
            send = partial(one.run, body(model, number, arrival), exact)
            turn = arrival.turn
            sent = follow(outcome, turn, send) if turn is not None and turn.after else send()
            tasks.append(asyncio.create_task(sent))
        on_sent()
        if tasks:
            _, unfinished = await asyncio.wait(tasks, timeout=grace_s)
            for task in unfinished:
                task.cancel()
            await asyncio.gather(*unfinished, return_exceptions=True)
    return outcomes


async def saturated(
    url: str,
    model: str,
    arrivals: Iterator[Arrival],
    body: Body,
    in_flight: int,
    warm_up_s: float,
    seconds: float,
) -> float:
    """Requests a second that end in ``seconds`` after ``warm_up_s``, with ``in_flight`` requests
    always in flight: a closed loop over ``arrivals``. Raises :class:`LoadError`."""
    numbers, ended_s, begun_s = count(), list[float](), time.monotonic()
    end_s = begun_s + warm_up_s + seconds

    async def one_by_one() -> None:
        while time.monotonic() < end_s:
            number, arrival = next(numbers), next(arrivals)
            one = Workload("one", (arrival._replace(arrival_s=0.0),))
            made = body(model, number, arrival)
            (outcome,) = await replay(url, model, one, body=lambda *_, made=made: made, exact=False)
            if outcome.end is not End.ANSWERED:
                raise LoadError(f"a request was not answered: {outcome.reason}")
            ended_s.append(time.monotonic())

    await asyncio.gather(*(one_by_one() for _ in range(in_flight)))
    ended = sum(begun_s + warm_up_s < each <= end_s for each in ended_s)
    if not ended:
        raise LoadError(f"no request ended in {seconds:g} s: take more --seconds")
    return ended / seconds


@dataclass(slots=True)
class _Request:
    """One running request."""

    _session: aiohttp.ClientSession
    _url: str
    _outcome: Outcome
    _leaves_after: int | None
    _headers: Mapping[str, str]

    async def run(self, body: Json, exact: bool) -> None:
        outcome, begun_s = self._outcome, time.monotonic()
        chat = "messages" in body
        url = self._url.replace("/completions", "/chat/completions") if chat else self._url
        if exact:
            expected = simulated("chat" if chat else "completions", body)
        else:
            expected = of_any_engine(body, outcome.output_tokens)
        begun = False
        try:
            sent_s = time.monotonic()
            async with self._session.post(url, json=body, headers=self._headers) as response:
                begun = True
                outcome.admission = response.headers.get(wire.ADMISSION_HEADER, "")
                if wire.DEGRADED_HEADER in response.headers:
                    outcome.slo = _promised(outcome.slo, response.headers)
                if response.status != 200:
                    _refused(outcome, response.status, await response.content.read(2048))
                elif body.get("stream"):
                    await self._stream(response, expected, sent_s)
                else:
                    AnswerCheck(expected).whole(await response.read())
                    took_s = time.monotonic() - sent_s
                    outcome.tpot_s = min(outcome.slo.tpot_s or 0.0, took_s / outcome.output_tokens)
                    outcome.ttft_s = took_s - (outcome.output_tokens - 1) * outcome.tpot_s
                    outcome.end, outcome.reason = End.ANSWERED, ""
        except StatedError as error:
            outcome.end, outcome.reason = End.FAILED, str(error)
        except WrongAnswerError as error:
            outcome.end, outcome.reason = End.SILENT, str(error)
        except (aiohttp.ClientError, OSError) as error:
            # Before the response's head, no server has accepted the request.
            outcome.end = End.CUT if begun else End.FAILED
            outcome.reason = type(error).__name__
        outcome.ended_s = outcome.sent_s + time.monotonic() - begun_s

    async def _stream(
        self, response: aiohttp.ClientResponse, expected: Expected, sent_s: float
    ) -> None:
        outcome, check = self._outcome, AnswerCheck(expected)
        meter, last_s = TPOTMeter(outcome.slo.tpot_anchor), sent_s
        async for data in response.content.iter_any():
            before_s, last_s = last_s, time.monotonic()
            if outcome.ttft_s is not None:
                outcome.gap_s = max(outcome.gap_s, last_s - before_s)
            check.feed(data)
            if check.announced and outcome.announced_s is None:
                outcome.announced_s = last_s - sent_s
            meter.emit(check.first_chunks - meter.tokens, last_s)
            if outcome.ttft_s is None and check.chunks:
                outcome.ttft_s = last_s - sent_s
            if self._leaves_after is not None and check.chunks >= self._leaves_after:
                outcome.end, outcome.reason = End.LEFT, ""
                response.close()
                return
        check.end_stream()
        if outcome.ttft_s is None:
            raise WrongAnswerError("no text")
        # Tokens without text of their own count as arrived with the last piece of text.
        meter.emit(outcome.output_tokens - meter.tokens, meter.last_token_s or last_s)
        outcome.end, outcome.reason, outcome.tpot_s = End.ANSWERED, "", meter.tpot_s or 0.0


def _promised(slo: SLO, headers: Mapping[str, str]) -> SLO:
    """The objective that is promised in place of ``slo``, which counts from then on."""
    names = wire.PROMISED_TTFT_HEADER, wire.PROMISED_TPOT_HEADER, wire.PROMISED_E2E_HEADER
    found = [headers.get(name) for name in names]
    return slo.with_times([None if each is None else float(each) / 1e3 for each in found])


def _refused(outcome: Outcome, status: int, body: bytes) -> None:
    """An error status. One without a reason in its body is a failure."""
    code = _ERROR_CODE.search(body)
    refused = code is not None and (status < 500 or status == 503)
    outcome.end = End.REFUSED if refused else End.FAILED
    outcome.reason = code[1].decode() if code is not None else f"status {status}"
