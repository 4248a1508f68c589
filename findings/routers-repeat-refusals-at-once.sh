#!/usr/bin/env bash
# Two routers repeat a refused request at once, whatever the refusal says of when to come back.
# A worker under load answers 429 with "Retry-After: 20".
# Expected (RFC 9110): no repetition before that, or the answer goes to the client.
# Seen: the worker gets each request five times within some 0.5 s, by default, and the client then the 429. So the
#       work of refusing is fivefold just when there is too much of it.
#       sglang-router 0.3.2 also counts the repetitions as failures of the worker: after two refused requests the
#       third is a 503 "no available workers", though the worker would serve it. vllm-router 0.1.17 serves it.
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
busy = True


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
    if busy:
        handler.reply(429, {"error": {"message": "busy", "code": 429}}, [("Retry-After", "20")])
    else:
        handler.reply(200, {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": []})


BODY = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
seen = {}
for package in ("vllm-router", "sglang-router"):
    received.clear()
    busy = True
    process, url = started(package)
    try:
        start = time.monotonic()
        statuses = [send(f"{url}/v1/chat/completions", BODY) for _ in range(2)]
        took, times = time.monotonic() - start, len(received)
        busy = False
        statuses.append(send(f"{url}/v1/chat/completions", BODY))
    finally:
        process.kill()
    print(package, version(package), f"two refused requests reach the worker {times} times in {took:.1f} s,",
          "the statuses, with the third request's:", statuses)
    assert times == 10 and took < 20, "the behaviour has changed"
    seen[package] = statuses
assert seen == {"vllm-router": [429, 429, 200], "sglang-router": [429, 429, 503]}, "the behaviour has changed"
PY
