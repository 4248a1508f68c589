#!/usr/bin/env bash
# Two readers of streams take letters of an answer for the end of a line: guidellm 0.8.1 and huggingface_hub 2.4.0.
# U+2028 (line separator) and U+0085 are in the texts that models learn from; JSON allows them bare in a string, and vLLM
# sends them so.
# Expected (HTML standard): lines of server-sent events end at CR and LF alone, so the answer is "one\u2028two three".
# Seen: both read lines by iter_lines (of httpx and httpx2), which ends them at all of Python's line ends, and parse half
#       an event: JSONDecodeError. guidellm counts the request as failed, and huggingface_hub loses the rest of the answer.
#       openai 2.54.0 has the whole text.
set -euo pipefail
work=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null; rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q guidellm==0.8.1 huggingface_hub==2.4.0 openai==2.54.0
cd "$work"
cat >server.py <<'PY'
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        body = json.dumps({"object": "list", "data": [{"id": "m", "object": "model"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        texts = ["one two", " three"] if body["model"] == "plain" else ["one\u2028two", " three"]
        for text, reason in zip(texts, (None, "stop")):
            choice = {"index": 0, "delta": {"role": "assistant", "content": text}, "finish_reason": reason}
            chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
            self.wfile.write(f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
PY
python3 server.py >port 2>/dev/null &
until [ -s port ]; do sleep 0.2; done
"$work/venv/bin/python" - <<'PY'
import os

from tokenizers import Tokenizer, models, pre_tokenizers

words = Tokenizer(models.WordLevel({"<unk>": 0, "word": 1}, unk_token="<unk>"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
os.mkdir("tokenizer")
words.save("tokenizer/tokenizer.json")
open("tokenizer/tokenizer_config.json", "w").write('{"tokenizer_class": "PreTrainedTokenizerFast"}')
PY
for model in plain separator; do
  "$work/venv/bin/guidellm" run \
    --backend "kind=openai_http,target=http://127.0.0.1:$(cat port),model=$model,request_format=/v1/chat/completions" \
    --profile kind=synchronous --constraint kind=max_requests,count=2 \
    --tokenizer kind=huggingface_auto,model=./tokenizer \
    --data kind=synthetic_text,prompt_tokens=8,output_tokens=8 --output "kind=json,path=$model.json" >log 2>&1 ||
    { tail log; exit 1; }
done
"$work/venv/bin/python" - "$(cat port)" <<'PY'
import json
import sys
from importlib.metadata import version

from huggingface_hub import InferenceClient
from openai import OpenAI

print(*(f"{package} {version(package)}" for package in ("guidellm", "huggingface_hub", "httpx", "openai")))
failed = {}
for model in ("plain", "separator"):
    (run,) = json.load(open(f"{model}.json"))["benchmarks"]
    failed[model] = {request["info"]["error"].split("(")[0] for request in run["requests"]["errored"]}
    print(f"guidellm, {model}: {len(run['requests']['successful'])} successful, failed by {failed[model]}")
assert failed == {"plain": set(), "separator": {"JSONDecodeError"}}, "the behaviour has changed"
there = {"base_url": f"http://127.0.0.1:{sys.argv[1]}/v1", "api_key": "none"}
clients = {"openai": OpenAI(**there).chat.completions, "huggingface_hub": InferenceClient(**there).chat.completions}
for name, client in clients.items():
    for model, whole in (("plain", "one two three"), ("separator", "one\u2028two three")):
        try:
            question = [{"role": "user", "content": "x"}]
            seen = "".join(
                chunk.choices[0].delta.content
                for chunk in client.create(model=model, messages=question, stream=True)
            )
        except ValueError as error:
            seen = type(error).__name__
        print(f"{name}, {model}: {seen!r}")
        broken = (name, model) == ("huggingface_hub", "separator")
        assert seen == ("JSONDecodeError" if broken else whole), "the behaviour has changed"
PY
