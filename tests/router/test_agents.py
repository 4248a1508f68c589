"""Agents' own loops over the API: real clients, real tools, and a model that asks for them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import anthropic
from anthropic import beta_async_tool

from tests.router.far_side import Edge, FarSide
from tests.router.listening import listening
from tests.router.scripted_model import DONE, asking, obey


def read_file_tool(read: list[str]) -> Any:
    @beta_async_tool
    async def read_file(path: str) -> str:
        """Read a file.

        Args:
            path: where it is
        """
        read.append(path)
        return await asyncio.to_thread(Path(path).read_text)

    return read_file


async def test_anthropics_tool_runner(tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("hello")
    read: list[str] = []
    edge = Edge(FarSide(a=obey))
    call = ("read_file", {"path": str(notes)})
    async with (
        listening(edge) as system,
        anthropic.AsyncAnthropic(base_url=system.url, api_key="none", max_retries=0) as client,
    ):
        for streams in (False, True):
            runner = client.beta.messages.tool_runner(
                model="m",
                max_tokens=64,
                tools=[read_file_tool(read)],
                messages=[{"role": "user", "content": asking(call, call)}],
                stream=streams,
            )
            last = await runner.until_done()
            assert last.content[0].text == DONE
    assert read == [str(notes)] * 4
    assert [request.endpoint for _, request in edge.side.calls] == ["messages"] * 6
