#!/usr/bin/env bash
# langchain-openai 1.7.4 counts tokens several times in streams that report them as they go.
# vLLM's "stream_options": {"include_usage": true, "continuous_usage_stats": true} puts the usage so far into each
# chunk of a stream; the last one has the whole.
# Expected: the last one counts, as for openai 2.54.0's own stream() and llama-index-llms-openai 0.8.3.
# Seen: langchain adds all of them up: a prompt of 4 and 3 tokens of output are 16 and 9, and so are the bill and
# the budget of whoever goes by usage_metadata. The longer the answer, the larger the factor.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q langchain-openai==1.7.4 openai==2.54.0 llama-index-llms-openai==0.8.3
cd "$work"
"$work/venv/bin/python" - <<'PY'
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version

from langchain_openai import ChatOpenAI
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai import OpenAI as LlamaIndexOpenAI
from openai import OpenAI

PROMPT, TOKENS = 4, 3


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for n in range(1, TOKENS + 2):
            made = min(n, TOKENS)
            choice = {"index": 0, "delta": {"content": "word "}, "finish_reason": "stop" if n == TOKENS else None}
            chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m",
                     "choices": [choice] if n <= TOKENS else [],
                     "usage": {"prompt_tokens": PROMPT, "completion_tokens": made, "total_tokens": PROMPT + made}}
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}/v1"
options = {"include_usage": True, "continuous_usage_stats": True}
seen = {}

whole = None
for chunk in ChatOpenAI(base_url=url, api_key="none", model="m").stream("x", stream_options=options):
    whole = chunk if whole is None else whole + chunk
seen["langchain-openai"] = whole.usage_metadata["input_tokens"], whole.usage_metadata["output_tokens"]

messages = [{"role": "user", "content": "x"}]
with OpenAI(base_url=url, api_key="none").chat.completions.stream(
    model="m", messages=messages, stream_options=options
) as stream:
    usage = stream.get_final_completion().usage
seen["openai"] = usage.prompt_tokens, usage.completion_tokens

model = LlamaIndexOpenAI(api_base=url, api_key="none", model="gpt-4o")
last = list(model.stream_chat([ChatMessage(role="user", content="x")], stream_options=options))[-1]
seen["llama-index-llms-openai"] = last.additional_kwargs["prompt_tokens"], last.additional_kwargs["completion_tokens"]

for package, counts in seen.items():
    print(package, version(package), "prompt and output:", counts)
right = (PROMPT, TOKENS)
assert seen == {
    "langchain-openai": (4 * PROMPT, 1 + 2 + 3 + 3), "openai": right, "llama-index-llms-openai": right
}, "the behaviour has changed"
PY
