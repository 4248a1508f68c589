"""The client of a replay: an open loop over HTTP, one stream to each request.

A request is sent at its own time, whatever became of those before it. How late the client itself
was is measured with everything else: a figure taken by a late client says more of the client.
"""

from __future__ import annotations

import asyncio
import enum
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import aiohttp

from router import wire
from scheduling.objective import SLO
from simulation.workload import Arrival, Workload

GRACE_S = 300.0
"""How long after the last arrival the client waits for ends, seconds."""

_CHARACTERS_PER_TOKEN = 4
_FIRST_TOKEN = re.compile(rb'"text": ?"[^"]')
_USAGE = re.compile(rb'"completion_tokens": ?(\d+)')
_ERROR_CODE = re.compile(rb'"error": ?\{.*?"code": ?"?([a-z_0-9]+)', re.DOTALL)
_END = b"data: [DONE]"
_TAIL_BYTES = 2048


class End(enum.StrEnum):
    """How a request ended."""

    ANSWERED = "answered"
    """A stream with every token and its end mark."""
    REFUSED = "refused"
    """A 4xx or a 503 with a reason, and nothing served."""
    FAILED = "failed"
    """Another error that said so, in the status or in the stream."""
    SILENT = "silent"
    """Anything else: a stream that stopped, lacked tokens, or never ended."""


@dataclass(slots=True)
class Outcome:
    """One request, as its client saw it. Durations are from when it was sent, seconds.

    Attributes:
        slo: its objective.
        prompt_tokens, output_tokens: what was asked for.
        sent_s: from the replay's start.
        late_s: how much later than planned it was sent.
        end: how it ended.
        reason: the error's code, or what broke; empty for an answer.
        admission: the header that says in which tier it was served; empty without one.
        predicted_ttft_s: what was promised, where it was.
        ttft_s: until its first token; ``None`` if none came.
        tpot_s: mean time per token after the first; 0 for a single one.
    """

    slo: SLO
    prompt_tokens: int
    output_tokens: int
    sent_s: float
    late_s: float
    end: End = End.SILENT
    reason: str = "unfinished"
    admission: str = ""
    predicted_ttft_s: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None

    @property
    def attained(self) -> bool:
        """Whether it was answered within every objective that it states."""
        if self.end is not End.ANSWERED or self.ttft_s is None or self.tpot_s is None:
            return False
        pairs = ((self.ttft_s, self.slo.ttft_s), (self.tpot_s, self.slo.tpot_s))
        return all(limit is None or value <= limit for value, limit in pairs)


def text_body(model: str, number: int, arrival: Arrival) -> dict[str, Any]:
    """A completion whose prompt has about the tokens of ``arrival``, by the count of a simulated
    engine, and is like no other's."""
    characters = arrival.prompt_tokens * _CHARACTERS_PER_TOKEN
    return {
        "model": model,
        "prompt": f"{number} ".ljust(characters, "x")[:characters],
        "max_tokens": arrival.output_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def replay(
    url: str,
    model: str,
    workload: Workload,
    grace_s: float = GRACE_S,
    on_sent: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.monotonic,
    body: Callable[[str, int, Arrival], dict[str, Any]] = text_body,
) -> list[Outcome]:
    """Send ``workload`` to the completions endpoint at ``url``; the outcomes in order of arrival.

    Ends when every request has, or ``grace_s`` after the last arrival; what is left is silent.
    ``on_sent`` is called after the last arrival. ``body`` makes the request of an arrival, from the
    model's name and the arrival's number.
    """
    outcomes: list[Outcome] = []
    tasks: list[asyncio.Task[None]] = []
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        started_s = clock()
        for number, arrival in enumerate(workload.arrivals):
            await asyncio.sleep(started_s + arrival.arrival_s - clock())
            now_s = clock() - started_s
            outcome = Outcome(
                arrival.slo,
                arrival.prompt_tokens,
                arrival.output_tokens,
                now_s,
                now_s - arrival.arrival_s,
            )
            outcomes.append(outcome)
            request = _Request(session, url, outcome, clock)
            tasks.append(asyncio.create_task(request.run(body(model, number, arrival))))
        on_sent()
        if tasks:
            _, unfinished = await asyncio.wait(tasks, timeout=grace_s)
            for task in unfinished:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return outcomes


class _Request:
    """One request under way. It keeps the last bytes of the stream, not all of it."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        outcome: Outcome,
        clock: Callable[[], float],
    ) -> None:
        self._session = session
        self._url = url
        self._outcome = outcome
        self._clock = clock
        self._last_s = 0.0

    async def run(self, body: dict[str, Any]) -> None:
        """Send it, read it to its end, and write down what came."""
        outcome = self._outcome
        headers = {wire.SLO_HEADERS[wire.CLASS]: outcome.slo.service_class}
        begun = False
        sent_s = self._clock()
        try:
            async with self._session.post(self._url, json=body, headers=headers) as response:
                begun = True
                _read_head(outcome, response)
                if response.status == 200:
                    self._judge(await self._read(response, sent_s))
                else:
                    _refused(outcome, response.status, await response.content.read(_TAIL_BYTES))
        except (aiohttp.ClientError, OSError) as error:
            # Before the head nobody has taken the request; after it, the stream just stopped.
            outcome.end = End.SILENT if begun else End.FAILED
            outcome.reason = type(error).__name__

    async def _read(self, response: aiohttp.ClientResponse, sent_s: float) -> bytes:
        """The last bytes of the stream; its first and last token's times on the way."""
        outcome = self._outcome
        tail = b""
        async for data in response.content.iter_any():
            self._last_s = self._clock()
            tail = (tail + data)[-_TAIL_BYTES:]
            if outcome.ttft_s is None and _FIRST_TOKEN.search(tail):
                outcome.ttft_s = self._last_s - sent_s
        self._last_s -= sent_s
        return tail

    def _judge(self, tail: bytes) -> None:
        outcome = self._outcome
        error = _ERROR_CODE.search(tail)
        usage = _USAGE.search(tail)
        if error is not None:
            outcome.end, outcome.reason = End.FAILED, error[1].decode()
        elif _END not in tail or outcome.ttft_s is None:
            outcome.reason = "no end mark"
        elif usage is None or int(usage[1]) != outcome.output_tokens:
            outcome.reason = "tokens are missing"
        else:
            outcome.end, outcome.reason = End.ANSWERED, ""
            gaps = max(1, outcome.output_tokens - 1)
            outcome.tpot_s = (self._last_s - outcome.ttft_s) / gaps


def _read_head(outcome: Outcome, response: aiohttp.ClientResponse) -> None:
    outcome.admission = response.headers.get(wire.ADMISSION_HEADER, "")
    predicted_ms = response.headers.get(wire.PREDICTED_TTFT_HEADER)
    if predicted_ms is not None:
        outcome.predicted_ttft_s = float(predicted_ms) / 1e3


def _refused(outcome: Outcome, status: int, body: bytes) -> None:
    """An error status. One without a reason in its body is a failure."""
    code = _ERROR_CODE.search(body)
    refused = code is not None and (status < 500 or status == 503)
    outcome.end = End.REFUSED if refused else End.FAILED
    outcome.reason = code[1].decode() if code is not None else f"status {status}"
