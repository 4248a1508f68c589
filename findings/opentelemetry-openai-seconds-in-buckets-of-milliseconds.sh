#!/usr/bin/env bash
# opentelemetry-instrumentation-openai 0.62.4 counts seconds in the buckets that OpenTelemetry has for milliseconds.
# Expected (semantic conventions of generative AI): gen_ai.client.operation.duration in buckets from 0.01 s on, and
# gen_ai.server.time_to_first_token from 0.001 s on, so that a P95 can be read from them.
# Seen: both, and the time to generate, have the bounds 0, 5, 10, 25 ... 10,000 with the unit s: first tokens of 0.1, 0.5
#       and 2 s are all in the bucket up to 5, so that histogram_quantile(.95) is 4.75 s whatever the server does.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q opentelemetry-instrumentation-openai==0.62.4 opentelemetry-sdk openai==2.54.0
cd "$work"
"$work/venv/bin/python" - <<'PY'
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version

import openai
from opentelemetry.instrumentation.openai import OpenAIInstrumentor
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        time.sleep(body["max_tokens"] / 100)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
        usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
        for word, reason in (("one ", None), ("two", "stop")):
            choice = {"index": 0, "delta": {"content": word}, "finish_reason": reason}
            self.wfile.write(f"data: {json.dumps(chunk | {'choices': [choice]})}\n\n".encode())
        self.wfile.write(f"data: {json.dumps(chunk | {'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n".encode())


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
reader = InMemoryMetricReader()
OpenAIInstrumentor().instrument(meter_provider=MeterProvider([reader]))
client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key="none")


print("opentelemetry-instrumentation-openai", version("opentelemetry-instrumentation-openai"))
question = [{"role": "user", "content": "x"}]
for hundredths_s in (10, 50, 200):
    list(client.chat.completions.create(model="m", messages=question, stream=True, max_tokens=hundredths_s))
times = {}
for scope in reader.get_metrics_data().resource_metrics[0].scope_metrics:
    for metric in scope.metrics:
        if metric.unit == "s":
            (point,) = metric.data.data_points
            times[metric.name] = list(point.explicit_bounds[:4]), list(point.bucket_counts[:4])
            print(metric.name, "bounds, s:", *times[metric.name][0], "... counts:", *times[metric.name][1])
assert {"gen_ai.client.operation.duration", "gen_ai.server.time_to_first_token"} <= set(times), "the behaviour has changed"
assert all(seen == ([0, 5, 10, 25], [0, 3, 0, 0]) for seen in times.values()), "the behaviour has changed"
PY
