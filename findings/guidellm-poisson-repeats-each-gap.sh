#!/usr/bin/env bash
# guidellm 0.8.1 sends no Poisson process: each of its ten worker processes draws the gaps between requests
# from a generator of the same seed, and all of them move one common clock.
# Expected (--profile kind=poisson): gaps that are independent of each other, on average 1 / rate.
# Seen: each gap comes about ten times in a row, so that a run of 60 requests has six of them: the load comes
# in phases of an even pace, of 0.8 to 40 times the rate, and the mean rate of a short run is far off (x 1.5
# here; another seed, another error). The correlation of a gap with the next is near 1, where it should be near 0.
# GUIDELLM__MAX_WORKER_PROCESSES=1 makes it a Poisson process.
set -euo pipefail
work=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null; rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q guidellm==0.8.1
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
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

CHUNK = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
EVENTS = [
    CHUNK | {"choices": [{"index": 0, "delta": {"content": "word"}, "finish_reason": "stop"}]},
    CHUNK | {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 1, "total_tokens": 5}},
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
        print(time.monotonic(), flush=True)
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self.wfile.write("".join(f"data: {json.dumps(event)}\n\n" for event in EVENTS).encode() + b"data: [DONE]\n\n")


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
open("port", "w").write(str(server.server_port))
server.serve_forever()
PY
for workers in 10 1; do
  rm -f port
  "$work/venv/bin/python" server.py >"arrivals-$workers" 2>/dev/null &
  until [ -s port ]; do sleep 0.1; done
  GUIDELLM__MAX_WORKER_PROCESSES=$workers "$work/venv/bin/guidellm" run \
    --backend "kind=openai_http,target=http://127.0.0.1:$(cat port),model=m" --profile kind=poisson,rate=10 \
    --constraint kind=max_requests,count=60 --tokenizer kind=huggingface_auto,model=./tokenizer \
    --data kind=synthetic_text,prompt_tokens=4,output_tokens=1 --output kind=json,path=out.json \
    --disable-console >log 2>&1 || { tail -20 log; exit 1; }
done
"$work/venv/bin/python" - <<'PY'
from importlib.metadata import version

import numpy

print("guidellm", version("guidellm"), "asked for 10 requests a second")
seen = {}
for workers in (10, 1):
    arrivals = [float(line) for line in open(f"arrivals-{workers}")]
    assert len(arrivals) == 60
    gaps = numpy.diff(arrivals)
    seen[workers] = numpy.corrcoef(gaps[:-1], gaps[1:])[0, 1]
    print(f"{workers} workers{' (default)' if workers == 10 else ''}: {1 / gaps.mean():.1f} a second, "
          f"correlation of neighbours {seen[workers]:.2f}, gaps in ms: {[round(1000 * gap) for gap in gaps[:30]]}")
assert seen[10] > 0.5 and abs(seen[1]) < 0.4, "the behaviour has changed"
PY
