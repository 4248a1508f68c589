#!/usr/bin/env bash
# langfuse 5.0.4 keeps nothing of a request that was cancelled before its answer began, and a broken stream as a good one.
# Its client for OpenAI (from langfuse.openai import AsyncOpenAI) is to trace each request. Requests are cancelled by
# asyncio.wait_for, by a task group, and by a web server whose own user has left: mostly the slow ones.
# Expected, as of openinference-instrumentation-openai 0.1.66: an observation of each, with the level ERROR if it has failed.
# Seen:  ended by                                          langfuse                         openinference
#        wait_for, before the answer's head                none, with and without stream    ERROR
#        wait_for, in the middle of a stream               level DEFAULT, half a text       ERROR
#        an event {"error": ...}, for openai an APIError   level DEFAULT, half a text       ERROR
#        the client's own timeout, before the head         level ERROR                      ERROR
#       So latencies and an error rate of its traces leave out the requests for which users waited too long.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q langfuse==5.0.4 openai==3.57.0 openinference-instrumentation-openai==0.1.66
cd "$work"
cat > seen.py <<'PY'
import asyncio
import json
import logging
import os
import sys
from importlib.metadata import version

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

logging.disable(logging.CRITICAL)
spans = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(spans))
if sys.argv[1] == "langfuse":
    from langfuse import Langfuse
    from langfuse.openai import AsyncOpenAI

    Langfuse(public_key="p", secret_key="s", base_url="http://127.0.0.1:9", tracer_provider=provider)  # none listens
    names = "langfuse", "openai"
else:
    from openai import AsyncOpenAI
    from openinference.instrumentation.openai import OpenAIInstrumentor

    OpenAIInstrumentor().instrument(tracer_provider=provider)
    names = "openinference-instrumentation-openai", "openai"
print(*(f"{name} {version(name)}" for name in names))
asked = asyncio.Event()  # set when the server has the request, or has sent half of its answer


def event(content, reason=None):
    choice = {"index": 0, "delta": {"content": content}, "finish_reason": reason}
    return {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}


async def serve(reader, writer):
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    body = json.loads(await reader.readexactly(int(head.split("content-length:")[1].split("\r\n")[0])))
    if body["model"] == "silent":
        asked.set()
        await reader.read()
    else:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
        error = {"error": {"message": "engine died", "type": "internal", "code": 500}}
        rest = {"whole": event("two", "stop"), "broken": error, "half": None}[body["model"]]
        for each in (event("one "), rest):
            if each is None:
                await reader.read()
            else:
                writer.write(f"data: {json.dumps(each)}\n\n".encode())
                await writer.drain()
        writer.write(b"data: [DONE]\n\n")
    writer.close()


def observations():
    found = []
    for span in spans.get_finished_spans():
        level = span.attributes.get("langfuse.observation.level", "DEFAULT")
        found.append(level if sys.argv[1] == "langfuse" else span.status.status_code.name)
    spans.clear()
    return found


async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    client = AsyncOpenAI(base_url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", api_key="k", max_retries=0)

    async def ask(model, stream, options=client):
        answer = await options.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "x"}], stream=stream
        )
        if stream:
            async for _ in answer:
                asked.set()

    async def cancelled(model, stream):
        asked.clear()
        task = asyncio.create_task(ask(model, stream))
        await asked.wait()
        await asyncio.sleep(0.2)
        try:
            await asyncio.wait_for(task, 0)
        except TimeoutError:
            return observations()

    async def failed(model, stream, options=client):
        try:
            await ask(model, stream, options)
        except Exception as error:
            return type(error).__name__, observations()

    await ask("whole", True)
    return {
        "whole": observations(),
        "cancelled before the head": await cancelled("silent", False),
        "the same, stream": await cancelled("silent", True),
        "cancelled in the middle": await cancelled("half", True),
        "broken": await failed("broken", True),
        "client's timeout": await failed("silent", True, client.with_options(timeout=0.5)),
    }


seen = asyncio.run(main())
for name, result in seen.items():
    print(f"  {name}: {result}")
good, bad = ("DEFAULT", "ERROR") if sys.argv[1] == "langfuse" else ("OK", "ERROR")
early, late = ([], [good]) if sys.argv[1] == "langfuse" else ([bad], [bad])
expected = [[good], early, early, late, ("APIError", late), ("APITimeoutError", [bad])]
sys.stdout.flush()

os._exit(0 if list(seen.values()) == expected else 1)  # langfuse tries to deliver for a while at its end
PY
"$work/venv/bin/python" seen.py langfuse
"$work/venv/bin/python" seen.py openinference
