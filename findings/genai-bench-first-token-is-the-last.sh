#!/usr/bin/env bash
# genai-bench 0.0.5 takes the whole time of an answer for its TTFT if the answer is a tool call, or its stream not chunked.
# Both are usual: agents' answers are mostly tool calls, and a proxy that speaks HTTP/1.0 ends a body by closing it.
# Expected: the TTFT is the time to the first event that has anything of the answer, here 0.3 s, and a TPOT of 0.1 s.
# Seen: 1. a tool call of 0.8 s has a TTFT of 0.8 s and no TPOT: it looks for "content" and "reasoning" alone.
#          (guidellm 0.8.1 and aiperf 0.13.0 have 0.3 s.)
#       2. a text in a body that ends with its connection has a TTFT of 0.8 s, as it reads such a body to its end first.
#       3. where the event with the usage comes 0.5 s after the last token, these count as time between tokens: the TPOT
#          is 0.2 s. (guidellm and aiperf: 0.1.)
#       So a server with more tool calls, or behind another proxy, has another TTFT at the same speed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q genai-bench==0.0.5
cd "$work"
"$work/venv/bin/python" - 2>log <<'PY'
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version

from genai_bench.metrics.request_metrics_collector import RequestMetricsCollector
from genai_bench.user.openai_user import OpenAIUser

import requests  # after genai_bench, which patches ssl

FIRST_S, GAP_S, TOKENS = 0.3, 0.1, 6


def event(choices, **fields):
    return {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": choices, **fields}


def stream(deltas, pause_s=0.0):
    """Seconds to wait and events."""
    yield FIRST_S
    for number, delta in enumerate(deltas):
        yield from [GAP_S] * bool(number)
        yield event([{"index": 0, "delta": delta, "finish_reason": None}])
    yield event([{"index": 0, "delta": {}, "finish_reason": "stop"}])
    yield pause_s
    yield event([], usage={"prompt_tokens": 1, "completion_tokens": TOKENS, "total_tokens": TOKENS + 1})


TEXT = [{"content": "word "}] * TOKENS
CALL = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "find", "arguments": ""}}
PIECES = [{"index": 0, "function": {"arguments": piece}} for piece in ('{"a"', ": ", '"b', "c", '"}')]
ANSWERS = {
    "/text": lambda: stream(TEXT),
    "/tool": lambda: stream([{"tool_calls": [piece]} for piece in (CALL, *PIECES)]),
    "/closed": lambda: stream(TEXT),
    "/late": lambda: stream(TEXT, 0.5),
}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def send(self, text):
        data = text.encode()
        self.wfile.write(data if self.close_connection else b"%x\r\n%s\r\n" % (len(data), data))

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        closed = self.path == "/closed"
        self.send_header(*(("Connection", "close") if closed else ("Transfer-Encoding", "chunked")))
        self.end_headers()
        for step in ANSWERS[self.path]():
            if isinstance(step, float):
                time.sleep(step)
            else:
                self.send(f"data: {json.dumps(step)}\n\n")
        self.send("data: [DONE]\n\n")
        self.wfile.write(b"" if closed else b"0\r\n\r\n")


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
print("genai-bench", version("genai-bench"))
seen = {}
for path in ANSWERS:
    start_s = time.monotonic()
    response = requests.post(f"http://127.0.0.1:{server.server_port}{path}", json={}, stream=True)
    answer = object.__new__(OpenAIUser).parse_chat_response(response, start_s, 1, 0.0)
    collector = RequestMetricsCollector()
    collector.calculate_metrics(answer)
    seen[path] = collector.metrics
    print(f"{path}: TTFT {seen[path].ttft:.2f} s, TPOT {seen[path].tpot:.3f} s, whole {seen[path].e2e_latency:.2f} s")
assert seen["/text"].ttft < 0.6 < seen["/text"].e2e_latency
for path in ("/tool", "/closed"):
    assert seen[path].ttft > 0.75 and seen[path].tpot < 0.01, "the behaviour has changed"
assert seen["/late"].tpot - seen["/text"].tpot > 0.05, "the behaviour has changed"
PY
