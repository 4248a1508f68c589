#!/usr/bin/env bash
# evalscope 1.14.1 (perf) gives a stream without any text a TTFT of 0 ms, and counts it in the mean and percentiles.
# A model may end its answer with its first token: the events are the role, finish_reason "stop" and the usage.
# Expected: such an answer has no TTFT, or the time to its first event.
# Seen: of six answers that all take 0.5 s, every second one without text, p50 of the TTFT is 0.0 ms and the mean
#       about half of the true one; all six are successes. So a server that gives more empty answers looks faster,
#       and an objective of the TTFT searched with --sla-params is met at too high a rate.
set -euo pipefail
work=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null; rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q 'evalscope[perf]==1.14.1'
cd "$work"
cat >server.py <<'PY'
import json
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def chunk(delta=None, reason=None, **fields):
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": reason}]
    return {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": choices, **fields}


class Handler(BaseHTTPRequestHandler):
    answers = 0

    def log_message(self, *_):
        pass

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        Handler.answers += 1
        text = [chunk({"content": "word "}), chunk({"content": "word"})] if Handler.answers % 2 else []
        time.sleep(0.5)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        usage = {"prompt_tokens": 4, "completion_tokens": len(text) + 1, "total_tokens": len(text) + 5}
        for event in [chunk({"role": "assistant", "content": ""}), *text, chunk({}, "stop"), chunk(usage=usage)]:
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
open("port", "w").write(str(server.server_port))
server.serve_forever()
PY
"$work/venv/bin/python" server.py &
until [ -s port ]; do sleep 0.1; done
seq 6 >prompts
"$work/venv/bin/evalscope" perf --model m --url "http://127.0.0.1:$(cat port)/v1/chat/completions" --api openai \
  --dataset line_by_line --dataset-path prompts --number 6 --parallel 1 --no-test-connection --outputs-dir out \
  >log 2>&1 || { tail -20 log; exit 1; }
"$work/venv/bin/python" - <<'PY'
import json
from glob import glob
from importlib.metadata import version

(folder,) = glob("out/*/m/parallel_1_number_6")
summary = json.load(open(f"{folder}/benchmark_summary.json"))
rows = {row["Percentiles"]: row for row in json.load(open(f"{folder}/benchmark_percentile.json"))}
served, mean, latency = (summary[key] for key in ("Success Requests", "Avg TTFT (ms)", "Avg Latency (s)"))
print("evalscope", version("evalscope"), "served:", served, "latency:", latency, "s; TTFT mean:", mean, "ms, p50:", rows["50%"]["TTFT (ms)"])
assert served == 6 and rows["50%"]["TTFT (ms)"] == 0 and mean < 600 * latency, "the behaviour has changed"
PY
