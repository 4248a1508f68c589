#!/usr/bin/env bash
# openlit 1.45.0 makes up the tokens of a stream whose server has reported none: it halves the number of letters.
# Expected (semantic conventions of generative AI, gen_ai.client.token.usage: an instrumentation that cannot have the
# number "MAY allow users to enable offline token counting. Otherwise it MUST NOT report usage metric."): no figure.
# Seen: a stream has a usage only if "stream_options": {"include_usage": true} asks for it. Without, a prompt of 6 tokens
#       and 10 tokens of output are gen_ai.usage.input_tokens 17 and output_tokens 70, in the span and in the metric, and
#       nothing says that they are a guess (two letters a token; in English there are more than four). What a model
#       writes of a tool call or thinks is not in it. Bills and token rates of streams are several times too high.
#       gen_ai.server.request.duration of this stream, which takes 2 s, is 14 s: it is not measured, but the time to the
#       first token and a mean gap between chunks for each further token of those 70.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q openlit==1.45.0 openai==2.54.0 opentelemetry-api==1.45.1 \
  opentelemetry-sdk==1.45.1 opentelemetry-exporter-otlp==1.45.1 opentelemetry-instrumentation==0.66b1 \
  opentelemetry-semantic-conventions==0.66b1 opentelemetry-util-http==0.66b1
cd "$work"
"$work/venv/bin/python" - 2>log <<'PY'
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version

import openlit
from openai import OpenAI
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

spans, reader = InMemorySpanExporter(), InMemoryMetricReader()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(spans))
trace.set_tracer_provider(provider)
metrics.set_meter_provider(MeterProvider(metric_readers=[reader]))
openlit.init(disable_events=True)
WORDS, LAST_S = [" international"] * 10, 2.0
USAGE = {"prompt_tokens": 6, "completion_tokens": 10, "total_tokens": 16}
BASE = {"id": "c", "created": 1, "model": "m"}


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def event(self, choices, **fields):
        chunk = {**BASE, "object": "chat.completion.chunk", "choices": choices, **fields}
        self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        choice = {"index": 0, "finish_reason": "stop"}
        if not asked.get("stream"):
            choice["message"] = {"role": "assistant", "content": "".join(WORDS)}
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            answer = {**BASE, "object": "chat.completion", "choices": [choice], "usage": USAGE}
            self.wfile.write(json.dumps(answer).encode())
            return
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for word in WORDS:
            self.event([{"index": 0, "delta": {"role": "assistant", "content": word}, "finish_reason": None}])
        time.sleep(LAST_S)
        self.event([{**choice, "delta": {}}])
        if asked.get("stream_options", {}).get("include_usage"):
            self.event([], usage=USAGE)
        self.wfile.write(b"data: [DONE]\n\n")


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
client = OpenAI(base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key="none")


def usage(**options):
    """Tokens of the prompt and of the output in the span."""
    spans.clear()
    prompt = [{"role": "user", "content": "one two three four five six"}]
    answer = client.chat.completions.create(model="m", messages=prompt, **options)
    if options:
        list(answer)
    [span] = [each for each in spans.get_finished_spans() if "gen_ai.usage.input_tokens" in each.attributes]
    return span.attributes["gen_ai.usage.input_tokens"], span.attributes["gen_ai.usage.output_tokens"]


def sums():
    """The metrics' names, with the kind of token, and their counts and sums."""
    data = reader.get_metrics_data()
    found = [metric for each in data.resource_metrics for scope in each.scope_metrics for metric in scope.metrics]
    points = [(metric.name, point) for metric in found for point in metric.data.data_points if hasattr(point, "sum")]
    return {(name, point.attributes.get("gen_ai.token.type")): (point.count, point.sum) for name, point in points}


streamed = usage(stream=True)
seen = sums()
counted = [seen["gen_ai.client.token.usage", kind] for kind in ("input", "output")]
taken_s, claimed_s = (seen[f"gen_ai.{name}.duration", None][1] for name in ("client.operation", "server.request"))
asked_for = usage(stream=True, stream_options={"include_usage": True})
whole = usage()
print("openlit", version("openlit"), "tokens of a stream:", streamed, "in the metric, with their number:", counted)
print("of a stream that reports its usage:", asked_for, "of a whole answer:", whole)
print(f"the stream took {taken_s:.1f} s; gen_ai.server.request.duration is {claimed_s:.1f} s")
assert asked_for == whole == (6, 10), "the behaviour has changed"
assert streamed == (17, 70) and counted == [(1, 17), (1, 70)], "the behaviour has changed"
assert taken_s < 2 * LAST_S < claimed_s / 2, "the behaviour has changed"
PY
