#!/usr/bin/env bash
# llama-index-llms-openai-like 0.8.1 sends a request twelve times to a server that refuses it, and each of them with a
# temperature that nobody has set.
# Expected: as by openai's client, which it calls: three requests, with the pauses of "Retry-After", one if the answer
# has "x-should-retry: false"; and no temperature, so that the model's own generation_config counts, as in vLLM.
# Seen: its own repetitions go around the client's: with max_retries=3, the default, a 429 comes back after 12 requests
#       (3 x (1 + 3)), and with "x-should-retry: false" after 3.
#       Each body has "temperature": 0.1. OpenAILike(temperature=None) is refused.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q llama-index-llms-openai-like==0.8.1
cd "$work"
"$work/venv/bin/python" - 2>/dev/null <<'PY'
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version

from llama_index.llms.openai_like import OpenAILike
from openai import OpenAI, RateLimitError

received, headers = [], {}


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_POST(self):
        received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        body = json.dumps({"error": {"message": "busy", "type": "rate_limit_error"}}).encode()
        self.send_response(429)
        for name, value in {"Content-Type": "application/json", "Content-Length": len(body), **headers}.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(body)


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}/v1"


def requests(ask):
    received.clear()
    try:
        ask()
    except RateLimitError:
        return len(received)
    raise AssertionError("no error")


question = [{"role": "user", "content": "x"}]
clients = {
    "openai": lambda: OpenAI(base_url=url, api_key="none").chat.completions.create(model="m", messages=question),
    "llama-index": lambda: OpenAILike(model="m", api_base=url, api_key="none", is_chat_model=True).complete("x"),
}
print("llama-index-llms-openai-like", version("llama-index-llms-openai-like"), "openai", version("openai"))
seen = {}
for name, ask in clients.items():
    for answer in ({"Retry-After": "1"}, {"x-should-retry": "false"}):
        headers.clear()
        headers.update(answer)
        seen[name, *answer] = requests(ask)
        print(f"{name}, {answer}: {seen[name, *answer]} requests, temperature {received[0].get('temperature')}")
assert received[0]["temperature"] == 0.1, "the behaviour has changed"
assert seen == {("openai", "Retry-After"): 3, ("openai", "x-should-retry"): 1, ("llama-index", "Retry-After"): 12,
                ("llama-index", "x-should-retry"): 3}, "the behaviour has changed"
try:
    OpenAILike(model="m", api_base=url, api_key="none", temperature=None)
except ValueError:
    pass
else:
    raise AssertionError("the behaviour has changed")
PY
