#!/usr/bin/env bash
# Two routers put values of their own into bodies that leave them out, or in the place of the client's.
# Expected: "model", "top_n" and sampling parameters arrive as the client wrote them, and stay away if it did not.
# Seen: POST /v1/rerank {"model": "m", "top_n": 1, ...}, the form of Jina, Cohere and vLLM, arrives with another
#       model ("default" from vllm-router 0.1.17, "unknown" from sglang-router 0.3.2) and without top_n; a worker
#       that checks names, as vLLM does, can only answer that there is no such model. /rerank keeps the model.
#       POST /v1/responses without sampling parameters arrives from sglang-router with temperature 1.0, top_p 1.0,
#       top_k -1, min_p 0.0 and repetition_penalty 1.0, which the worker takes for the client's: the defaults of the
#       model's generation_config.json no longer count.
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
    handler.reply(200, {"id": "r", "model": "m", "results": [{"index": 0, "relevance_score": 0.5}]})


RERANK = {"model": "m", "query": "q", "documents": ["a", "b"], "top_n": 1}
seen = {}
for package in ("vllm-router", "sglang-router"):
    process, url = started(package)
    try:
        for path, body in (("/v1/rerank", RERANK), ("/rerank", RERANK), ("/v1/responses", {"model": "m", "input": "x"})):
            received.clear()
            send(url + path, body)
            got = received[-1][1]
            seen[package, path] = {key: value for key, value in got.items() if body.get(key) != value and value is not None}
            lost = [key for key in body if key not in got]
            print(package, version(package), path, "arrives with", seen[package, path], "and without", lost)
            assert lost == (["top_n"] if "rerank" in path else []), "the behaviour has changed"
    finally:
        process.kill()
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
assert seen["vllm-router", "/v1/rerank"]["model"] == "default", "the behaviour has changed"
assert seen["sglang-router", "/v1/rerank"]["model"] == "unknown", "the behaviour has changed"
assert not any("model" in seen[package, "/rerank"] for package in ("vllm-router", "sglang-router"))
assert SAMPLING.items() <= seen["sglang-router", "/v1/responses"].items(), "the behaviour has changed"
assert seen["vllm-router", "/v1/responses"] == {}
PY
