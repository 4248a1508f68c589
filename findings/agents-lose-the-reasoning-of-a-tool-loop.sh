#!/usr/bin/env bash
# Three of five agent libraries leave a model's reasoning out of the loop of its tools, one by its own class for vLLM too.
# vLLM sends "reasoning" beside a tool call, and takes it back in the assistant's message ("for interleaved thinking", as
# its source has it): models with it are to go on with what they have thought before the call.
# Expected: the second request of a loop has the reasoning of the first answer.
# Seen: pydantic-ai-slim 2.68.0 and openai-agents 0.24.0 send it back. haystack-ai 3.4.1, langchain-openai 1.7.4, and agno
#       3.1.10 by OpenAILike and by its own VLLM send the call and its result alone, without a word: what the
#       model thought before the call is not in the prompt after it.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q 'pydantic-ai-slim[openai]==2.68.0' haystack-ai==3.4.1 agno==3.1.10 openai-agents==0.24.0 \
  langchain==1.5.2 langchain-openai==1.7.4 openai==3.57.0
cd "$work"
export HAYSTACK_TELEMETRY_ENABLED=False
"$work/venv/bin/python" - 2>"$work/log" <<'PY'
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version

received = []


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_POST(self):
        messages = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"]
        received.append([message.get("reasoning") for message in messages if message["role"] == "assistant"])
        message, reason = {"role": "assistant", "content": "sunny", "reasoning": "Done."}, "stop"
        if not received[-1]:
            call = {"name": "look", "arguments": '{"city": "Rome"}'}
            calls = [{"id": "call_1", "type": "function", "function": call}]
            message = {"role": "assistant", "content": None, "reasoning": "I must look.", "tool_calls": calls}
            reason = "tool_calls"
        answer = {"id": "c", "object": "chat.completion", "created": 1, "model": "m"}
        answer["choices"] = [{"index": 0, "message": message, "finish_reason": reason}]
        answer["usage"] = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}/v1"


def look(city: str) -> str:
    """The weather of a city."""
    return "sunny"


def pydantic_ai():
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("m", provider=OpenAIProvider(base_url=url, api_key="k"))
    Agent(model, tools=[look]).run_sync("x")


def openai_agents():
    from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    model = OpenAIChatCompletionsModel("m", AsyncOpenAI(base_url=url, api_key="k"))
    Runner.run_sync(Agent(name="a", model=model, tools=[function_tool(look)]), "x")


def haystack():
    from haystack.components.agents import Agent
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.tools import create_tool_from_function
    from haystack.utils import Secret

    model = OpenAIChatGenerator(api_key=Secret.from_token("k"), model="m", api_base_url=url)
    agent = Agent(chat_generator=model, tools=[create_tool_from_function(look)])
    agent.run(messages=[ChatMessage.from_user("x")])


def langchain():
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    agent = create_agent(ChatOpenAI(model="m", base_url=url, api_key="k"), tools=[look])
    agent.invoke({"messages": [{"role": "user", "content": "x"}]})


def agno():
    from agno.agent import Agent
    from agno.models.openai import OpenAILike

    Agent(model=OpenAILike(id="m", base_url=url, api_key="k"), tools=[look], telemetry=False).run("x")


def agno_vllm():
    from agno.agent import Agent
    from agno.models.vllm import VLLM

    Agent(model=VLLM(id="m", base_url=url, api_key="k"), tools=[look], telemetry=False).run("x")


for name in ("pydantic-ai-slim", "openai-agents", "haystack-ai", "langchain-openai", "agno", "openai"):
    print(name, version(name))
seen = {}
for run in (pydantic_ai, openai_agents, haystack, langchain, agno, agno_vllm):
    received.clear()
    run()
    assert len(received) == 2 and received[0] == [], received
    seen[run.__name__] = received[1]
    print(f"reasoning in the second request of {run.__name__}: {received[1]}")
kept, lost = ["I must look."], [None]
assert list(seen.values()) == [kept, kept, lost, lost, lost, lost], "the behaviour has changed"
PY
