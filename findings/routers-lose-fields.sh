#!/usr/bin/env bash
# Two routers parse a chat into fields that they know, write it anew, and lose the others without a word.
# Expected: a worker receives the client's body, or the client an error.
# Seen: vllm-router 0.1.17 keeps unknown fields at the top but loses those inside: a tool's "strict" (which asks
#       vLLM to obey the schema), an assistant message's "reasoning_content", a schema's "description".
#       sglang-router 0.3.2 keeps "strict" and loses what it does not know at the top: "priority", by which
#       SGLang's own --enable-priority-scheduling orders requests, and vLLM's "structured_outputs" and "cache_salt":
#       the request is served out of order, unconstrained, by a shared cache, with status 200.
#       Both write temperatures in 32 bits: 0.123456789 becomes 0.12345679.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q vllm-router==0.1.17 sglang-router==0.3.2
cd "$work"
"$work/venv/bin/python" - <<'PY'
import json
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version

received = []


class Worker(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def reply(self, status, body, headers=()):
        body = json.dumps(body).encode()
        self.send_response(status)
        for name, value in [("Content-Type", "application/json"), ("Content-Length", str(len(body))), *headers]:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.reply(200, {"model_path": "m", "served_model_name": "m", "is_generation": True})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path.endswith("/render"):  # vllm-router asks for token ids first
            return self.reply(404, {})
        received.append((self.path, body))
        answer(self, body)


def port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def send(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status
    except urllib.error.HTTPError as error:
        return error.code


def started(package):
    module = {"vllm-router": "vllm_router.launch_router", "sglang-router": "sglang_router.launch_router"}[package]
    worker = ThreadingHTTPServer(("127.0.0.1", 0), Worker)
    threading.Thread(target=worker.serve_forever, daemon=True).start()
    at = port()
    process = subprocess.Popen(
        ["venv/bin/python", "-m", module, "--port", str(at), "--prometheus-port", str(port()),
         "--policy", "round_robin", "--worker-urls", f"http://127.0.0.1:{worker.server_port}"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )
    for _ in range(300):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{at}/v1/models", timeout=5)
            break
        except OSError:
            assert process.poll() is None, f"{package} has ended"
            time.sleep(0.2)
    return process, f"http://127.0.0.1:{at}"


def answer(handler, _):
    handler.reply(200, {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": []})


TOOL = {"name": "f", "description": "x", "strict": True, "parameters": {"type": "object"}}
BODY = {
    "model": "m",
    "messages": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning": "r", "reasoning_content": "r"},
        {"role": "user", "content": "c"},
    ],
    "temperature": 0.123456789,
    "priority": 5,
    "structured_outputs": {"choice": ["yes", "no"]},
    "cache_salt": "s",
    "tools": [{"type": "function", "function": TOOL}],
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "n", "description": "d", "strict": True, "schema": {"type": "object"}},
    },
}


def changes(sent, got, path=""):
    if isinstance(sent, dict):
        return [c for key in sent for c in changes(sent[key], (got or {}).get(key), f"{path}.{key}".lstrip("."))]
    if isinstance(sent, list) and got:
        return [c for n, (one, other) in enumerate(zip(sent, got)) for c in changes(one, other, f"{path}.{n}")]
    return [] if sent == got else [path]


seen = {}
for package in ("vllm-router", "sglang-router"):
    process, url = started(package)
    try:
        assert send(f"{url}/v1/chat/completions", BODY) == 200
    finally:
        process.kill()
    seen[package] = changes(BODY, received[-1][1])
    print(package, version(package), "lost or changed:", seen[package])
common = ["response_format.json_schema.description", "temperature"]
assert sorted(seen["vllm-router"]) == sorted(
    [*common, "messages.1.reasoning_content", "tools.0.function.strict"]
), "the behaviour has changed"
assert sorted(seen["sglang-router"]) == sorted(
    [*common, "messages.1.reasoning", "priority", "structured_outputs.choice", "cache_salt"]
), "the behaviour has changed"
PY
