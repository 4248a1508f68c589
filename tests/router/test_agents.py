"""Agents' own loops over the API: real clients, real tools, and a model that asks for them."""

from __future__ import annotations

import asyncio
import json
import subprocess
from asyncio.subprocess import DEVNULL, PIPE, STDOUT
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from anthropic import beta_async_tool

from tests.agent_clients import CLIENTS, AgentClient
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


@pytest.mark.release
@pytest.mark.parametrize("agent", CLIENTS, ids=[each.command for each in CLIENTS])
async def test_a_terminals_loop_is_a_session_and_its_sub_agents_are_of_it(
    agent: AgentClient, tmp_path: Path
) -> None:
    edge = Edge(FarSide(a=obey))
    async with listening(edge) as system:
        command, how = agent.start(tmp_path, system.url)
        streams = {"stdin": DEVNULL, "stdout": PIPE, "stderr": STDOUT}
        process = await asyncio.create_subprocess_exec(*command, **how, **streams)
        said, _ = await asyncio.wait_for(process.communicate(), 240)
    assert process.returncode == 0 and DONE in said.decode(), said
    turns = [request.turn for _, request in edge.side.calls]
    if not agent.named:  # a conversation is recognised by its first tool call
        turns = [turn for turn in turns if turn is not None]
        assert len({turn.session for turn in turns}) == 2
        return
    (main,) = {turn.program for turn in turns}
    (_,) = {turn.session for turn in turns} - {main}  # of the sub-agent


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


def shell(command: str) -> str:
    """Run a command."""
    return subprocess.run(["sh", "-c", command], capture_output=True, text=True).stdout


@pytest.mark.release
@pytest.mark.parametrize("kind", ["OpenAIResponsesModel", "OpenAIChatCompletionsModel"])
async def test_openais_agents(kind: str) -> None:
    agents = pytest.importorskip("agents", reason="install openai-agents: it needs websockets < 17")
    agents.set_tracing_disabled(True)
    edge = Edge(FarSide(a=obey))
    async with (
        listening(edge) as system,
        openai.AsyncOpenAI(base_url=f"{system.url}/v1", api_key="none", max_retries=0) as client,
    ):
        model = getattr(agents, kind)(model="m", openai_client=client)
        tool = agents.function_tool(shell)
        sub = agents.Agent(name="sub", model=model, tools=[tool])
        tools = [tool, sub.as_tool("sub", "A sub-agent")]
        main = agents.Agent(name="main", instructions="Be brief.", model=model, tools=tools)
        echo = ("shell", {"command": "echo hello"})
        asked = asking(echo, ("sub", {"input": asking(echo)}), echo)
        result = await agents.Runner.run(main, asked)
        assert result.final_output == DONE
        streamed = agents.Runner.run_streamed(main, asking(echo))
        assert [event async for event in streamed.stream_events()]
        assert streamed.final_output == DONE
    sessions = [request.turn and request.turn.session for _, request in edge.side.calls]
    # The first tool call's id tells a conversation: not before the second turn.
    assert sessions.count(None) == 3
    assert sorted(map(sessions.count, set(sessions) - {None})) == [1, 1, 3]


@pytest.mark.release
async def test_claudes_agents(tmp_path: Path) -> None:
    sdk = pytest.importorskip("claude_agent_sdk", reason="install claude-agent-sdk")
    claude = CLIENTS[0]
    edge = Edge(FarSide(a=obey))
    async with listening(edge) as system:
        options = sdk.ClaudeAgentOptions(
            cwd=tmp_path,
            allowed_tools=["Bash", "Agent"],
            env={"HOME": str(tmp_path), **claude.settings(system.url)},
        )
        said = [message async for message in sdk.query(prompt=claude.prompt(), options=options)]
    results = [each.result for each in said if isinstance(each, sdk.ResultMessage)]
    assert set(results) == {DONE}
    turns = [request.turn for _, request in edge.side.calls]
    assert len({turn.program for turn in turns}) == 1 and len({t.session for t in turns}) == 2


@pytest.mark.parametrize("streams", [False, True])
async def test_a_loop_over_the_responses_api(streams: bool) -> None:
    edge = Edge(FarSide(a=obey))
    tool: Any = {"type": "function", "name": "shell", "parameters": {"type": "object"}}
    echo = ("shell", {"command": "echo hello"})
    items: list[Any] = [{"role": "user", "content": asking(echo, echo)}]
    headers = []
    async with (
        listening(edge) as system,
        openai.AsyncOpenAI(base_url=f"{system.url}/v1", api_key="none", max_retries=0) as client,
    ):
        while items[-1].get("type") != "message":
            asked: Any = {"model": "m", "input": items, "tools": [tool], "store": False}
            if streams:
                async with client.responses.stream(**asked) as stream:
                    answer = await stream.get_final_response()
            else:
                raw = await client.responses.with_raw_response.create(**asked)
                headers.append(raw.headers.get("x-sluice-session"))
                answer = raw.parse()
            (item,) = answer.output
            items.append(item.to_dict())
            if item.type == "function_call":
                output = await asyncio.to_thread(shell, json.loads(item.arguments)["command"])
                result = {"call_id": item.call_id, "output": output}
                items.append({"type": "function_call_output", **result})
    assert items[-1]["content"][0]["text"] == DONE
    assert [each.get("output") for each in items[2::2]] == ["hello\n", "hello\n"]
    if not streams:
        first, second, third = headers
        assert first is None and second == third and second.startswith("tool_call=")
