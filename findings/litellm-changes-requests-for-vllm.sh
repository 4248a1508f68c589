#!/usr/bin/env bash
# litellm 1.108.7 sends vLLM other stop texts and tools than it was given, without an error.
# Expected (docs of drop_params, off by default): what is not supported is an error, all else arrives. vLLM takes any
# number of stop texts, and "strict" in a tool. (litellm's docs of stop say "up to 4", not what becomes of a fifth.)
# Seen: hosted_vllm/ sends the first four of five stop texts, so that answers run past the fifth, and leaves out a
#       tool's "strict", so that its arguments need not obey the schema. openai/ to the same server keeps "strict" and
#       cuts "stop" just so. extra_body={"stop": [...]} or litellm.disable_stop_sequence_limit sends all five.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q litellm==1.108.7
cd "$work"
LITELLM_LOCAL_MODEL_COST_MAP=True "$work/venv/bin/python" - 2>/dev/null <<'PY'
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version

import litellm

received = []
ANSWER = json.dumps({
    "id": "c", "object": "chat.completion", "created": 1, "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "word"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}).encode()


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_POST(self):
        received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(ANSWER)))
        self.end_headers()
        self.wfile.write(ANSWER)


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
STOP = ["a", "b", "c", "d", "e"]
TOOL = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"type": "object"}}}


def send(provider, **fields):
    litellm.completion(
        model=f"{provider}/m", api_base=f"http://127.0.0.1:{server.server_port}/v1", api_key="none",
        messages=[{"role": "user", "content": "x"}], **fields,
    )
    return received[-1]


print("litellm", version("litellm"), "drop_params:", litellm.drop_params)
for provider in ("hosted_vllm", "openai"):
    stop = send(provider, stop=list(STOP))["stop"]
    around = send(provider, extra_body={"stop": STOP})["stop"]
    strict = send(provider, tools=[json.loads(json.dumps(TOOL))])["tools"][0]["function"].get("strict")
    print(f"{provider}: stop {STOP} arrives as {stop}, in extra_body as {around}; strict True as {strict}")
    assert stop == STOP[:4] and around == STOP, "the behaviour has changed"
    assert strict is (None if provider == "hosted_vllm" else True), "the behaviour has changed"
PY
