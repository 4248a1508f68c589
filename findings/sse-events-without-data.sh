#!/usr/bin/env bash
# Three of four readers of server-sent events hand on events that have no data, and the one in OpenAI's client
# breaks off a good stream for it.
# Expected (HTML standard, "if the data buffer is an empty string ... return"): a block of fields without
# data, as "retry: 3000" or "id: 7" at the start of a stream, sets the field and gives no event.
# Seen: openai 2.54.0, anthropic 2.14.0 and httpx-sse 0.4.3 give an event with data "", and openai parses it
#       as JSON: a chat that begins with "retry: 3000" ends with JSONDecodeError before its first token.
#       sseclient-py 1.9.0 is right. Comments (": ping") are harmless for all.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q openai==2.54.0 anthropic==2.14.0 httpx-sse==0.4.3 sseclient-py==1.9.0
cd "$work"
"$work/venv/bin/python" - <<'PY'
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version

import anthropic
import httpx
import httpx_sse
import openai
import sseclient
from anthropic._streaming import SSEDecoder as AnthropicDecoder
from openai._streaming import SSEDecoder as OpenAIDecoder

FIELDS = {"retry": b"retry: 3000\n\n", "id": b"id: 7\n\n", "event": b"event: ping\n\n", "comment": b": ping\n\n"}
READERS = {
    "openai": lambda body: OpenAIDecoder().iter_bytes(iter([body])),
    "anthropic": lambda body: AnthropicDecoder().iter_bytes(iter([body])),
    "httpx-sse": lambda body: httpx_sse.EventSource(
        httpx.Response(200, headers={"Content-Type": "text/event-stream"}, content=body)
    ).iter_sse(),
    "sseclient-py": lambda body: sseclient.SSEClient(iter([body])).events(),
}
for package, read in READERS.items():
    seen = {name: [event.data for event in read(block + b"data: x\n\n")] for name, block in FIELDS.items()}
    print(package, version(package), seen)
    extra = [] if package == "sseclient-py" else [""]
    assert seen == {name: [*(extra if name != "comment" else []), "x"] for name in FIELDS}, "the behaviour has changed"

CHUNK = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m",
         "choices": [{"index": 0, "delta": {"content": "word"}, "finish_reason": "stop"}]}


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        name = self.path.split("/")[1]
        self.wfile.write(FIELDS[name] + f"data: {json.dumps(CHUNK)}\n\ndata: [DONE]\n\n".encode())


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
seen = {}
for name in FIELDS:
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.server_port}/{name}", api_key="none", max_retries=0)
    try:
        stream = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}], stream=True)
        seen[name] = "".join(chunk.choices[0].delta.content for chunk in stream)
    except json.JSONDecodeError as error:
        seen[name] = f"JSONDecodeError: {error}"
    print("a chat by openai, the stream begins with", FIELDS[name], "->", seen[name])
assert seen.pop("comment") == "word"
assert all(text.startswith("JSONDecodeError") for text in seen.values()), "the behaviour has changed"
PY
