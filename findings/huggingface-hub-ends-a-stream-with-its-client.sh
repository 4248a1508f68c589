#!/usr/bin/env bash
# huggingface_hub 2.4.0: a stream breaks off if the client that began it has no name.
#   for chunk in InferenceClient(base_url=...).chat_completion(messages, stream=True): ...
# Expected, as of openai's client: the stream keeps what it needs, and whole text comes.
# Seen: no text at all, but StreamClosed, and ReadError from AsyncInferenceClient: the connection is closed as soon as
#       Python collects the client. So a function that makes a client and returns its stream fails, with an error that
#       reads like the server's fault (the server sees a client that leaves). With the client in a variable all of it comes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q huggingface_hub==2.4.0 openai==2.54.0
cd "$work"
"$work/venv/bin/python" - <<'PY'
import asyncio
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version

from huggingface_hub import AsyncInferenceClient, InferenceClient
from openai import OpenAI


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        try:
            for word, reason in (("one ", None), ("two ", None), ("three", "stop")):
                choice = {"index": 0, "delta": {"role": "assistant", "content": word}, "finish_reason": reason}
                chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
                self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
                time.sleep(0.1)
            self.wfile.write(b"data: [DONE]\n\n")
        except OSError:
            pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
there = {"base_url": f"http://127.0.0.1:{server.server_port}/v1", "api_key": "none"}
asked = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True}


def text(stream):
    return "".join(chunk.choices[0].delta.content for chunk in stream)


async def text_of(stream):
    return "".join([chunk.choices[0].delta.content async for chunk in stream])


def kept():
    client = InferenceClient(**there)
    return text(client.chat_completion(**asked))


async def kept_async():
    client = AsyncInferenceClient(**there)
    return await text_of(await client.chat_completion(**asked))


async def dropped_async():
    return await text_of(await AsyncInferenceClient(**there).chat_completion(**asked))


print("huggingface_hub", version("huggingface_hub"))
seen = {}
for name, ask in {
    "openai": lambda: text(OpenAI(**there).chat.completions.create(**asked)),
    "kept": kept,
    "no name": lambda: text(InferenceClient(**there).chat_completion(**asked)),
    "async, kept": lambda: asyncio.run(kept_async()),
    "async, no name": lambda: asyncio.run(dropped_async()),
}.items():
    try:
        seen[name] = ask()
    except Exception as error:
        seen[name] = type(error).__name__
    print(f"{name}: {seen[name]}")
whole = "one two three"
assert seen == {"openai": whole, "kept": whole, "no name": "StreamClosed", "async, kept": whole,
                "async, no name": "ReadError"}, "the behaviour has changed"
PY
