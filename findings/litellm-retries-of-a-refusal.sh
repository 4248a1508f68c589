#!/usr/bin/env bash
# litellm 1.110.2 repeats a refused request differently by each of its two options, and for vLLM by neither as asked.
# A server under load answers 429 with "Retry-After: 2"; the caller wants two repetitions.
# Expected: three requests, two seconds apart, and then litellm.RateLimitError, by any provider.
# Seen:               hosted_vllm/                                   openai/ to the same server
#   max_retries=2     one request                                    as expected
#   num_retries=2     one request, then a bare Exception("tenacity   as expected, but the same Exception in the end
#                     import failed"): `except RateLimitError`
#                     does not see it (the package does not
#                     require tenacity)
#   the same with     three requests within two seconds: the header  five requests: three as expected, then two at once
#   tenacity          is not read
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q litellm==1.110.2
cd "$work"
cat >seen.py <<'PY'
import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version

import litellm

litellm.suppress_debug_info = True
received = []


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_POST(self):
        received.append(time.monotonic())
        self.rfile.read(int(self.headers["Content-Length"]))
        body = json.dumps({"error": {"message": "busy", "type": "rate_limit_error"}}).encode()
        self.send_response(429)
        for name, value in {"Retry-After": 2, "Content-Type": "application/json", "Content-Length": len(body)}.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(body)


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
asked = {"api_base": f"http://127.0.0.1:{server.server_port}/v1", "api_key": "none",
         "messages": [{"role": "user", "content": "x"}]}
print("litellm", version("litellm"), sys.argv[1])
cases = {("hosted_vllm", "num_retries"): (1, 0, "Exception"), ("openai", "num_retries"): (3, 2, "Exception"),
         ("hosted_vllm", "max_retries"): (1, 0, "RateLimitError"), ("openai", "max_retries"): (3, 2, "RateLimitError")}
if sys.argv[1] == "with tenacity":
    cases = {("hosted_vllm", "num_retries"): (3, 0, "RateLimitError"), ("openai", "num_retries"): (5, 2, "RateLimitError")}
for (provider, option), (requests, waits, error) in cases.items():
    received.clear()
    try:
        litellm.completion(model=f"{provider}/m", **asked, **{option: 2})
    except Exception as raised:
        seen = type(raised).__name__
    gaps_s = [later - earlier for earlier, later in zip(received, received[1:])]
    print(f"{provider}/, {option}=2: {len(received)} requests, {[round(gap_s, 1) for gap_s in gaps_s]} s apart, {seen}")
    assert (len(received), seen) == (requests, error), "the behaviour has changed"
    assert sum(gap_s > 1.9 for gap_s in gaps_s) == waits, "the behaviour has changed"
PY
export LITELLM_LOCAL_MODEL_COST_MAP=True LITELLM_LOG=ERROR
"$work/venv/bin/python" seen.py "as installed"
"$work/venv/bin/pip" install -q tenacity==9.2.1
"$work/venv/bin/python" seen.py "with tenacity"
