#!/usr/bin/env bash
# aiperf 0.13.0 counts a request as served when its stream breaks off with an error.
# A server that fails after it has sent its status tells so by an event of the stream:
#   data: {"error": {"message": ..., "code": 500}}
# Expected: such requests are errors. Seen: all of them are completed requests, with a TTFT and a latency, and
# request_error_rate is 0. (guidellm 0.8.1 counts them as errored; vLLM 0.32's own benchmark as successful.)
set -euo pipefail
work=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null; rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q aiperf==0.13.0
cd "$work"
"$work/venv/bin/python" - <<'PY'
from tokenizers import Tokenizer, models, pre_tokenizers

words = Tokenizer(models.WordLevel({"<unk>": 0, "word": 1}, unk_token="<unk>"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
words.save("tokenizer.json")
open("tokenizer_config.json", "w").write('{"tokenizer_class": "PreTrainedTokenizerFast"}')
PY
mkdir tokenizer && mv tokenizer.json tokenizer_config.json tokenizer
cat >server.py <<'PY'
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

EVENTS = [
    {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m",
     "choices": [{"index": 0, "delta": {"role": "assistant", "content": "word"}, "finish_reason": None}]},
    {"error": {"message": "the engine is gone", "type": "server_error", "code": 500}},
]


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        body = json.dumps({"object": "list", "data": [{"id": "m", "object": "model"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for event in EVENTS:
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
open("port", "w").write(str(server.server_port))
server.serve_forever()
PY
"$work/venv/bin/python" server.py &
until [ -s port ]; do sleep 0.1; done
"$work/venv/bin/aiperf" profile --model m --url "http://127.0.0.1:$(cat port)" --endpoint-type chat --streaming \
  --request-count 3 --concurrency 1 --tokenizer ./tokenizer --synthetic-input-tokens-mean 4 --ui none \
  --output-artifact-dir out >log 2>&1 || { tail -20 log; exit 1; }
"$work/venv/bin/python" - <<'PY'
import json
from importlib.metadata import version

result = json.load(open("out/profile_export_aiperf.json"))
served, errors = (result[key]["avg"] for key in ("completed_request_count", "request_error_rate"))
print("aiperf", version("aiperf"), "served:", served, "error rate:", errors)
assert (served, errors) == (3, 0), "the behaviour has changed"
PY
