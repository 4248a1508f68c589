#!/usr/bin/env bash
# langchain 1.5.2 runs a tool with arguments that max_tokens has cut, if the answer was streamed.
# A call of {"account": "savings-2", "amount": 1250} is cut after "12"; its finish_reason is "length".
# Expected, as of the same agent without streaming: the call is in invalid_tool_calls, and no tool runs.
# Seen, with create_agent and langchain-openai 1.7.4: with streaming=True, and in agent.stream(stream_mode="messages"),
#       which streams the model for the user's page without being asked for more, the cut text is mended to
#       {"account": "savings-2", "amount": 12}, has its place in tool_calls, and the tool runs with 12.
#       So a limit of tokens changes what a tool does. openai-agents 0.24.0 does not run the tool, streamed or not.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q langchain==1.5.2 langchain-core==1.8.3 langchain-openai==1.7.4 langgraph==1.2.24 \
  openai-agents==0.24.0 openai==3.57.0
cd "$work"
"$work/venv/bin/python" - <<'PY'
import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version

import agents
import openai
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI

CUT = '{"account": "savings-2", "amount": 1250}'[:-3]
CALL = {"index": 0, "id": "c", "type": "function", "function": {"name": "transfer", "arguments": CUT}}
FIRST = ({"role": "assistant", "content": None, "tool_calls": [CALL]}, "length")
NEXT = ({"role": "assistant", "content": "done"}, "stop")
BASE = {"id": "x", "created": 1, "model": "m"}


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        message, reason = FIRST if asked["messages"][-1]["role"] == "user" else NEXT
        choice = {"index": 0, "finish_reason": reason}
        if asked.get("stream"):
            kind = "text/event-stream"
            choices = [{**choice, "delta": message, "finish_reason": None}, {**choice, "delta": {}}]
            chunks = [{**BASE, "object": "chat.completion.chunk", "choices": [each]} for each in choices]
            body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
        else:
            kind = "application/json"
            body = json.dumps({**BASE, "object": "chat.completion", "choices": [{**choice, "message": message}]})
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(body.encode())


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}/v1"
ran = []


def transfer(account: str, amount: int) -> str:
    """Moves money."""
    ran.append(amount)
    return "moved"


def agent(**options):
    return create_agent(ChatOpenAI(model="m", base_url=url, api_key="none", max_retries=0, **options), [transfer])


def first_answer(messages):
    answer = messages[1]
    return answer.response_metadata["finish_reason"], answer.tool_calls, len(answer.invalid_tool_calls)


async def with_agents(streamed):
    client = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
    model = agents.OpenAIChatCompletionsModel(model="m", openai_client=client)
    bank = agents.Agent(name="a", model=model, tools=[agents.function_tool(transfer)])
    if streamed:
        async for _ in agents.Runner.run_streamed(bank, "x").stream_events():
            pass
    else:
        await agents.Runner.run(bank, "x")
    await client.close()


agents.set_tracing_disabled(True)
asked = {"messages": [("user", "x")]}
seen = {}
for name, run in {
    "langchain": lambda: first_answer(agent().invoke(asked)["messages"]),
    "langchain, streaming": lambda: first_answer(agent(streaming=True).invoke(asked)["messages"]),
    "langchain, stream_mode": lambda: list(agent().stream(asked, stream_mode="messages")) and None,
    "openai-agents": lambda: asyncio.run(with_agents(False)),
    "openai-agents, streamed": lambda: asyncio.run(with_agents(True)),
}.items():
    ran.clear()
    answer = run()
    seen[name] = list(ran)
    print(f"{name}: the tool ran with {ran}; {answer}")
print("langchain", version("langchain"), "langchain-openai", version("langchain-openai"))
assert seen == {
    "langchain": [],
    "langchain, streaming": [12],
    "langchain, stream_mode": [12],
    "openai-agents": [],
    "openai-agents, streamed": [],
}, "the behaviour has changed"
PY
