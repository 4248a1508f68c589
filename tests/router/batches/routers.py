"""Routers on one folder, behind real sockets, with the official client."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import openai
from openai.types import Batch
from pydantic import SecretStr

from sluice.protocol.requests import EngineRequest, ResponseItem
from sluice.router.batches.store import NAME
from sluice.router.config import BatchesConfig, RouterConfig
from tests.router.far_side import Edge, FarSide, serve
from tests.router.listening import listening

URL = "/v1/chat/completions"
KEY = "first-key"
OTHER_KEY = "second-key"


class UnixClock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now_s = 1.7e9

    def __call__(self) -> float:
        return self.now_s


class Held:
    """A replica that serves so many requests, and keeps the rest waiting."""

    def __init__(self, served: int) -> None:
        self.left = served

    async def __call__(
        self, side: FarSide, replica: str, request: EngineRequest
    ) -> AsyncIterator[ResponseItem]:
        self.left -= 1
        if self.left < 0:
            await asyncio.Event().wait()
        async for item in serve(side, replica, request):
            yield item


bytes_url: str | None = None
"""Where the bytes of files are, if it is not the folder."""


def config(directory: Path, keys: Iterable[str] = (), **batches: Any) -> RouterConfig:
    settings = {"directory": directory, "url": bytes_url, **batches}
    return RouterConfig(
        api_keys=tuple(SecretStr(key) for key in keys), batches=BatchesConfig(**settings)
    )


class Served:
    """A router that serves.

    Attributes:
        client: of the first key, or of none.
    """

    def __init__(self, edge: Edge, url: str, client: openai.AsyncOpenAI) -> None:
        self.edge = edge
        self.url = url
        self.client = client

    def of(self, key: str) -> openai.AsyncOpenAI:
        return self.client.with_options(api_key=key)


@asynccontextmanager
async def serving(
    settings: RouterConfig, side: FarSide | None = None, now: UnixClock | None = None
) -> AsyncIterator[Served]:
    """A router on a free port, with all that its start and end do."""
    edge = Edge(side or FarSide(a=serve), config=settings, unix_clock=now or UnixClock())
    async with listening(edge) as system:
        url = f"{system.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
            yield Served(edge, url, client)


def line(custom_id: str, url: str = URL, **body: Any) -> dict[str, Any]:
    content = {"messages": [{"role": "user", "content": f"say {custom_id}"}]}
    if url != URL:
        content = {"prompt": f"say {custom_id}"}
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": url,
        "body": {"model": "m", **content, **body},
    }


def jsonl(lines: Iterable[Any]) -> bytes:
    return b"".join(json.dumps(entry).encode() + b"\n" for entry in lines)


async def upload(client: openai.AsyncOpenAI, lines: Iterable[Any]) -> str:
    file = await client.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
    return file.id


async def submit(
    client: openai.AsyncOpenAI, lines: Iterable[Any], endpoint: Any = URL, **options: Any
) -> Batch:
    return await client.batches.create(
        input_file_id=await upload(client, lines),
        endpoint=endpoint,
        completion_window="24h",
        **options,
    )


async def until(client: openai.AsyncOpenAI, batch_id: str, *statuses: str) -> Batch:
    """Wait until the batch is in one of ``statuses``."""
    async with asyncio.timeout(120):
        while (batch := await client.batches.retrieve(batch_id)).status not in statuses:
            pass
    return batch


async def results(client: openai.AsyncOpenAI, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    content = await client.files.content(file_id)
    return [json.loads(each) for each in content.text.splitlines()]


def said(calls: list[tuple[str, EngineRequest]]) -> list[str]:
    """Which lines replicas were asked for."""
    return [request.body["messages"][0]["content"].removeprefix("say ") for _, request in calls]


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def rows(directory: Path, query: str) -> list[tuple[Any, ...]]:
    """What a query of the state finds."""
    with closing(sqlite3.connect(directory / NAME)) as database:
        return database.execute(query).fetchall()


async def until_true(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
