"""Batches beside the live load of a soak, one after the other: each line is answered once."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

import aiohttp

from sluice.benchmarks.live.replay.answer import AnswerCheck, WrongAnswerError, simulated
from sluice.benchmarks.live.replay.client import prompt_text

LINES: Final = 20
LINE_TOKENS: Final = 12
"""Tokens that each line generates."""
EVERY_S: Final = 30.0
"""From the end of a batch to the next one, seconds."""

_PROMPT_TOKENS = 40
_PAUSE_S = 0.5
_ENDED = ("completed", "failed", "expired", "cancelled")


class Batches:
    """Uploads files of completions, runs them as batches, and checks the results.

    Like OpenAI's clients, it retries calls that fail because a router is missing.

    Args:
        url: of an application of simulated engines, whose text is known.
        model: its model's name.

    Attributes:
        ends: number of lines by how they ended.
    """

    def __init__(self, url: str, model: str) -> None:
        self.ends: Counter[str] = Counter()
        self._url = url
        self._model = model

    async def run(self, over: asyncio.Event, grace_s: float) -> None:
        """Batch after batch until ``over``; the last one has ``grace_s`` from then to end."""
        timeout = aiohttp.ClientTimeout(total=30)
        number = 0
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while not over.is_set():
                bodies = [self._body(number + line) for line in range(LINES)]
                running = asyncio.create_task(self._run_one(session, bodies))
                waiting = asyncio.create_task(over.wait())
                both = (running, waiting)
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                await asyncio.wait([running], timeout=grace_s)
                waiting.cancel()
                if running.done():
                    running.result()
                else:
                    running.cancel()
                    self.ends["never ended"] += LINES
                number += LINES
                await _first(over, EVERY_S)

    def _body(self, number: int) -> dict[str, Any]:
        return {
            "model": self._model,
            "prompt": prompt_text(number, _PROMPT_TOKENS),
            "max_tokens": LINE_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
        }

    async def _run_one(self, session: aiohttp.ClientSession, bodies: list[dict[str, Any]]) -> None:
        where = {"method": "POST", "url": "/v1/completions"}
        lines = [
            json.dumps({"custom_id": str(number), **where, "body": body})
            for number, body in enumerate(bodies)
        ]
        file = "\n".join(lines)
        file_id = json.loads(await self._ask(session, "POST", "/v1/files", file=file))["id"]
        asked = {
            "input_file_id": file_id,
            "endpoint": "/v1/completions",
            "completion_window": "24h",
        }
        made = json.loads(await self._ask(session, "POST", "/v1/batches", asked))
        while made["status"] not in _ENDED:
            await asyncio.sleep(_PAUSE_S)
            made = json.loads(await self._ask(session, "GET", f"/v1/batches/{made['id']}"))
        results = []
        files = [made.get("output_file_id"), made.get("error_file_id")]
        for found in filter(None, files):
            text = await self._ask(session, "GET", f"/v1/files/{found}/content")
            results += [json.loads(line) for line in text.splitlines()]
        self._count(bodies, results)
        for each in filter(None, (file_id, *files)):
            await self._ask(session, "DELETE", f"/v1/files/{each}")

    def _count(self, bodies: list[dict[str, Any]], results: list[dict[str, Any]]) -> None:
        seen = Counter(each["custom_id"] for each in results)
        self.ends["missing"] += len(bodies) - len(seen)
        self.ends["twice"] += sum(count - 1 for count in seen.values())
        for each in results:
            self.ends[self._end_of(bodies[int(each["custom_id"])], each)] += 1

    def _end_of(self, body: dict[str, Any], result: dict[str, Any]) -> str:
        response = result["response"]
        if response is None or response["status_code"] != 200:
            return "failed"
        expected = simulated("completions", body)
        try:
            AnswerCheck(expected).whole(json.dumps(response["body"]).encode())
        except WrongAnswerError as error:
            return f"wrong: {error}"
        return "answered"

    async def _ask(
        self,
        session: aiohttp.ClientSession,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        file: str | None = None,
    ) -> str:
        """The answer's text, retried until it is not a failure of the edge.

        Raises:
            RuntimeError: the request itself is refused.
        """
        while True:
            data = None
            if file is not None:
                data = aiohttp.FormData({"purpose": "batch"})
                data.add_field("file", file, filename="lines.jsonl")
            try:
                async with session.request(
                    method, self._url + path, json=body, data=data
                ) as answer:
                    text = await answer.text()
                    if answer.status < 400 or (method == "DELETE" and answer.status == 404):
                        return text
                    if answer.status < 500 and answer.status not in (409, 429):
                        raise RuntimeError(f"{method} {path}: {answer.status} {text[:500]}")
            except (aiohttp.ClientError, TimeoutError, OSError):
                pass
            await asyncio.sleep(_PAUSE_S)


async def _first(event: asyncio.Event, seconds: float) -> None:
    """Wait for ``event``, at most ``seconds``."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


def lost_lines(ends: Mapping[str, int]) -> int:
    """Number of batch lines with neither one complete answer nor an error with a reason."""
    return sum(count for end, count in ends.items() if end not in ("answered", "failed"))
