"""An engine that computes nothing, with vLLM's interface, for ``sluice bench gateway``. Each token
is an event in its own iteration of the loop, or a fixed time after the last."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import click
import msgspec
from aiohttp import web

MODEL = "simulated"


_STATED = {"ignore_eos": True, "stream_options": {"include_usage": True}}
"""For engines whose tokens are not words: generate all tokens, and report usage."""


def chat_body(tokens: int) -> bytes:
    """A streamed chat completion of ``tokens`` tokens."""
    message = {"role": "user", "content": "What does a sluice do? " * 8}
    body = {"model": MODEL, "messages": [message], "max_tokens": tokens, "stream": True}
    return json.dumps(body | _STATED).encode()


def events(tokens: int, request_id: str) -> Iterator[bytes]:
    """The server-sent events of a chat completion of ``tokens`` tokens, each a word."""
    head = (
        f'data: {{"id":"chatcmpl-{request_id}","object":"chat.completion.chunk",'
        f'"created":1700000000,"model":"{MODEL}","choices":[{{"index":0,"delta":'
    )
    yield f'{head}{{"role":"assistant","content":""}},"finish_reason":null}}]}}\n\n'.encode()
    token = f'{head}{{"content":" sluice"}},"finish_reason":null}}]}}\n\n'.encode()
    for _ in range(tokens - 1):
        yield token
    yield f'{head}{{"content":" sluice"}},"finish_reason":"length"}}]}}\n\n'.encode()
    yield b"data: [DONE]\n\n"


@click.command()
@click.option("--port", required=True, type=click.IntRange(1, 65_535))
@click.option("--step-ms", default=0.0, type=click.FloatRange(0, 10_000))
def main(port: int, step_ms: float) -> None:
    """Serve on this machine until the process is terminated."""

    async def chat(request: web.Request) -> web.StreamResponse:
        body = msgspec.json.decode(await request.read())
        # Routers may send the field under its newer name.
        limit = body.get("max_completion_tokens") or body.get("max_tokens") or 1
        tokens = min(100_000, max(1, int(limit)))
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for event in events(tokens, f"{id(request):x}"):
            await response.write(event)
            await asyncio.sleep(step_ms / 1e3)
        await response.write_eof()
        return response

    async def health(_: web.Request) -> web.Response:
        return web.Response()

    async def models(_: web.Request) -> web.Response:
        entry = {"id": MODEL, "object": "model", "created": 0, "owned_by": "bench"}
        return web.json_response({"object": "list", "data": [entry]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    app.router.add_get("/health", health)
    app.router.add_get("/v1/models", models)
    web.run_app(app, host="127.0.0.1", port=port, print=None, access_log=None)


if __name__ == "__main__":
    main()
