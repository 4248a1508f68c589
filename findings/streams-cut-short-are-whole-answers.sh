#!/usr/bin/env bash
# Half of an answer is taken for a whole one: clients whose stream ends before its last event, as after a proxy that
# ends it properly when its server is lost, tell nobody, and whether they do differs within one package.
# Expected (docs: a chat's stream has a finish_reason and ends with "data: [DONE]", Anthropic's with message_stop, one
# of responses with response.completed): an error.
# Seen, of "one two three" cut after "two":
#   openai-agents 0.24.0     chat: the final output is "one two"; responses: ModelBehaviorError
#   openai (npm) 6.49.0      chat: .stream() raises, a loop over create() just ends; responses.stream().finalResponse()
#                            has the output_text "one two" and the status "in_progress"
#   @ai-sdk/anthropic 3.0.140          text "one two", finishReason "other", no error
#   @ai-sdk/openai-compatible 2.0.92   an error
#   anthropic 2.14.0         get_final_message() is "one two" with a stop_reason of None
#       Claude Code, Codex, OpenCode and Qwen Code all repeat the request.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q openai-agents==0.24.0 openai==3.57.0 anthropic==2.14.0
cd "$work"
npm install --silent --no-audit --no-fund openai@6.49.0 ai@6.0.326 @ai-sdk/anthropic@3.0.140 \
  @ai-sdk/openai-compatible@2.0.92 zod@4
cat > seen.mjs <<'JS'
import { createAnthropic } from '@ai-sdk/anthropic'
import { createOpenAICompatible } from '@ai-sdk/openai-compatible'
import { streamText } from 'ai'
import OpenAI from 'openai'

globalThis.AI_SDK_LOG_WARNINGS = false
const baseURL = process.argv[2]
const seen = {}
async function note(name, ask) {
  seen[name] = await ask().catch(error => error.constructor.name)
}
async function sdk(model) {
  const errors = []
  const result = streamText({ model, prompt: 'x', maxRetries: 0, onError: ({ error }) => errors.push(error.name) })
  return [await result.text, await result.finishReason, errors]
}
const client = new OpenAI({ baseURL, apiKey: 'none', maxRetries: 0 })
const asked = { model: 'm', messages: [{ role: 'user', content: 'x' }] }
await note('openai create', async () => {
  let text = ''
  for await (const chunk of await client.chat.completions.create({ ...asked, stream: true })) {
    text += chunk.choices[0].delta.content
  }
  return text
})
await note('openai stream', () => client.chat.completions.stream(asked).finalContent())
await note('openai responses', async () => {
  const response = await client.responses.stream({ model: 'm', input: 'x' }).finalResponse()
  return [response.output_text, response.status]
})
await note('ai anthropic', () => sdk(createAnthropic({ baseURL, apiKey: 'none' })('m')))
await note('ai openai-compatible', () => sdk(createOpenAICompatible({ name: 'x', baseURL, apiKey: 'none' })('m')))
console.log(JSON.stringify(seen))
JS
"$work/venv/bin/python" - <<'PY'
import asyncio
import json
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import agents
import anthropic
import openai

BASE = {"id": "x", "model": "m"}
RESPONSE = {**BASE, "object": "response", "created_at": 1, "status": "in_progress", "output": [], "tools": [],
            "parallel_tool_calls": True, "tool_choice": "auto"}
ITEM = {"type": "message", "id": "i", "role": "assistant", "status": "in_progress", "content": []}
PART = {"type": "output_text", "text": "", "annotations": []}
MESSAGE = {**BASE, "type": "message", "role": "assistant", "content": [], "stop_reason": None, "stop_sequence": None,
           "usage": {"input_tokens": 1, "output_tokens": 1}}
PLACE = {"item_id": "i", "output_index": 0, "content_index": 0}
STREAMS = {
    "/chat/completions": [
        {**BASE, "object": "chat.completion.chunk", "created": 1,
         "choices": [{"index": 0, "delta": {"role": "assistant", "content": text}, "finish_reason": None}]}
        for text in ("one", " two")
    ],
    "/messages": [
        {"type": "message_start", "message": MESSAGE},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "one two"}},
    ],
    "/responses": [
        {"type": "response.created", "response": RESPONSE},
        {"type": "response.output_item.added", "output_index": 0, "item": ITEM},
        {"type": "response.content_part.added", **PLACE, "part": PART},
        {"type": "response.output_text.delta", **PLACE, "delta": "one two", "logprobs": []},
    ],
}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        events = next(each for path, each in STREAMS.items() if self.path.split("?")[0].endswith(path))
        for number, event in enumerate(events):
            named = f"event: {event['type']}\n" if "type" in event else ""
            if "response" in event.get("type", ""):
                event = {**event, "sequence_number": number}
            data = f"{named}data: {json.dumps(event)}\n\n".encode()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.write(b"0\r\n\r\n")  # the end of a whole body


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}"
done = subprocess.run(["node", "seen.mjs", url], capture_output=True, text=True, check=True)
seen = json.loads(done.stdout.splitlines()[-1])


async def run(kind):
    client = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
    stream = agents.Runner.run_streamed(agents.Agent(name="a", model=kind(model="m", openai_client=client)), "x")
    try:
        async for _ in stream.stream_events():
            pass
    except Exception as error:
        return type(error).__name__
    return stream.final_output


agents.set_tracing_disabled(True)


async def both():
    seen["openai-agents chat"] = await run(agents.OpenAIChatCompletionsModel)
    seen["openai-agents responses"] = await run(agents.OpenAIResponsesModel)


asyncio.run(both())
client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
asked = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}
try:
    with client.messages.stream(**asked) as stream:
        message = stream.get_final_message()
    seen["anthropic"] = [message.content[0].text, message.stop_reason]
except Exception as error:
    seen["anthropic"] = type(error).__name__
for name, each in seen.items():
    print(f"{name}: {each}")
assert seen == {
    "openai create": "one two",
    "openai stream": "OpenAIError",
    "openai responses": ["one two", "in_progress"],
    "ai anthropic": ["one two", "other", []],
    "ai openai-compatible": ["one two", "error", ["AI_InvalidResponseDataError"]],
    "openai-agents chat": "one two",
    "openai-agents responses": "ModelBehaviorError",
    "anthropic": ["one two", None],
}, "the behaviour has changed"
PY
