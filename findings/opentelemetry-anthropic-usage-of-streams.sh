#!/usr/bin/env bash
# opentelemetry-instrumentation-anthropic 0.62.4 counts a streamed message otherwise than the same message whole.
# Expected (Anthropic's docs: the usage of message_delta is cumulative, and there may be several): the last one counts.
# Seen: 1. output tokens of message_start and of each message_delta are added up: 1, then 3, then 5 so far are 9,
#          in the span and in gen_ai.client.token.usage.
#       2. of input tokens message_start alone is read. vLLM 0.32 has the whole prompt there, and with
#          --enable-prompt-tokens-details tells in message_delta how much of it was cached: 1,000 cached tokens of 1,210
#          are 0, so a hit rate of streams is 0.
#       The same message without streaming is right, as are streams in openinference-instrumentation-anthropic 3.1.0 and
#       in the client itself.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q opentelemetry-sdk opentelemetry-instrumentation-anthropic==0.62.4 \
  openinference-instrumentation-anthropic==3.1.0 anthropic==2.14.0
cd "$work"
cat > seen.py <<'PY'
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version

import anthropic
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

CACHED = {"input_tokens": 210, "cache_read_input_tokens": 1000}
WHOLE = {"id": "x", "type": "message", "role": "assistant", "model": "m", "stop_reason": "end_turn", "stop_sequence": None}
TEXT = {"type": "text", "text": "hi"}
STREAMS = {  # the usage of message_start, and of each message_delta
    "several": [{**CACHED, "output_tokens": 1}, {"output_tokens": 3}, {"output_tokens": 5}],
    "vllm": [{"input_tokens": 1210, "output_tokens": 0}, {**CACHED, "output_tokens": 5}],
}


def events(usage):
    yield {"type": "message_start", "message": {**WHOLE, "content": [], "stop_reason": None, "usage": usage[0]}}
    yield {"type": "content_block_start", "index": 0, "content_block": {**TEXT, "text": ""}}
    yield {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "hi"}}
    yield {"type": "content_block_stop", "index": 0}
    for each in usage[1:]:
        yield {"type": "message_delta", "delta": {"stop_reason": "end_turn", "stop_sequence": None}, "usage": each}
    yield {"type": "message_stop"}


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if asked.get("stream"):
            kind = "text/event-stream"
            parts = events(STREAMS[asked["model"]])
            body = "".join(f"event: {each['type']}\ndata: {json.dumps(each)}\n\n" for each in parts)
        else:
            kind = "application/json"
            body = json.dumps({**WHOLE, "content": [TEXT], "usage": {**CACHED, "output_tokens": 5}})
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(body.encode())


package = sys.argv[1]
if package == "opentelemetry-instrumentation-anthropic":
    from opentelemetry.instrumentation.anthropic import AnthropicInstrumentor

    names = ["gen_ai.usage.input_tokens", "gen_ai.usage.cache_read.input_tokens", "gen_ai.usage.output_tokens"]
else:
    from openinference.instrumentation.anthropic import AnthropicInstrumentor

    names = [f"llm.token_count.{name}" for name in ("prompt", "prompt_details.cache_read", "completion")]
spans = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(spans))
AnthropicInstrumentor().instrument(tracer_provider=provider)

server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
client = anthropic.Anthropic(base_url=f"http://127.0.0.1:{server.server_port}", api_key="none", max_retries=0)
asked = {"max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}
client.messages.create(model="m", **asked)
for model in STREAMS:
    with client.messages.stream(model=model, **asked) as stream:
        usage = stream.get_final_message().usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (210, 1000, 5), usage
seen = [tuple(span.attributes[name] for name in names) for span in spans.get_finished_spans()]
seen = dict(zip(["whole", *STREAMS], seen, strict=True))
print(package, version(package), "(input, of it cached, output):", seen)
right = (1210, 1000, 5)
wrong = {"several": (1210, 1000, 9), "vllm": (1210, 0, 5)}
expected = dict.fromkeys(seen, right) | (wrong if package.startswith("opentelemetry") else {})
assert seen == expected, "the behaviour has changed"
PY
for package in opentelemetry-instrumentation-anthropic openinference-instrumentation-anthropic; do
  "$work/venv/bin/python" seen.py "$package"
done
