#!/usr/bin/env bash
# smolagents 1.26.0 sleeps for minutes after a refusal that says "Retry-After: 1".
# Expected: as by openai's client, which it calls: three requests, a second apart, then the error.
# Seen: after these three it sleeps by a clock of its own (RETRY_WAIT of 60 s, doubled and more before its first use), and
#       sends three more, twice, so that the agent learns of the 429 after six minutes at least. With "x-should-retry:
#       false" it sleeps after the first. (This script watches 12 s.) OpenAIServerModel(..., retry=False) ends in time.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q 'smolagents[openai]==1.26.0'
cd "$work"
"$work/venv/bin/python" - <<'PY'
import json
import os
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version

from smolagents import OpenAIServerModel

received = []


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        received.append(body["model"])
        answer = json.dumps({"error": {"message": "busy", "type": "rate_limit_error"}}).encode()
        self.send_response(429)
        final = {"x-should-retry": "false"} if body["model"] == "final" else {}
        about = {"Content-Type": "application/json", "Content-Length": len(answer)}
        for name, value in {"Retry-After": 1, **about, **final}.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(answer)


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}/v1"
ended = {}


def ask(name, **options):
    model = OpenAIServerModel(name, api_base=url, api_key="none", **options)
    try:
        model([{"role": "user", "content": [{"type": "text", "text": "x"}]}])
    except Exception as error:
        ended[name] = type(error).__name__


print("smolagents", version("smolagents"), "openai", version("openai"))
for name, options in {"plain": {}, "final": {}, "off": {"retry": False}}.items():
    threading.Thread(target=ask, args=(name,), kwargs=options, daemon=True).start()
time.sleep(12)
seen = {name: (received.count(name), ended.get(name)) for name in ("plain", "final", "off")}
print("requests in 12 s, and the error:", seen, flush=True)
as_before = seen == {"plain": (3, None), "final": (1, None), "off": (3, "RateLimitError")}
os._exit(0 if as_before else 1)
PY
