#!/usr/bin/env bash
# litellm 1.110.2: of a stream with several choices only the first one ends, and with the last one's reason.
# Expected (OpenAI's API): with n=2 each choice has a finish_reason in its last chunk, here "stop" for the first and
# "length" for the second, which max_tokens has cut.
# Seen: both texts come with their index, but one finish_reason alone: "length", with index 0. So the whole answer counts
#       as cut and the cut one has no end. If servers send the reason in a chunk without text, as OpenAI does (vLLM sends
#       it with the last text), the one reason is that of index 0, and "length" is lost. By hosted_vllm/ and openai/ alike.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q litellm==1.110.2
cd "$work"
LITELLM_LOCAL_MODEL_COST_MAP=True LITELLM_LOG=ERROR "$work/venv/bin/python" - <<'PY'
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version

import litellm
import openai

TEXT = [(0, {"role": "assistant", "content": ""}, None), (1, {"role": "assistant", "content": ""}, None),
        (0, {"content": "whole "}, None), (1, {"content": "cut "}, None)]
STREAMS = {
    "with the last text": [*TEXT, (0, {"content": "answer"}, "stop"), (1, {"content": "off"}, "length")],
    "in a chunk of its own": [*TEXT, (0, {"content": "answer"}, None), (1, {"content": "off"}, None),
                              (0, {}, "stop"), (1, {}, "length")],
}


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for index, delta, reason in STREAMS[served]:
            choice = {"index": index, "delta": delta, "finish_reason": reason}
            chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}/v1"
asked = {"messages": [{"role": "user", "content": "x"}], "n": 2, "stream": True}


def ends(stream):
    texts, reasons = {}, {}
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    return texts, reasons


print("litellm", version("litellm"), "openai", version("openai"))
whole = {0: "whole answer", 1: "cut off"}
for served in STREAMS:
    seen = ends(openai.OpenAI(base_url=url, api_key="none").chat.completions.create(model="m", **asked))
    print(f"the reason {served}\n  openai:", seen)
    assert seen == (whole, {0: "stop", 1: "length"})
    for provider in ("hosted_vllm", "openai"):
        seen = ends(litellm.completion(model=f"{provider}/m", api_base=url, api_key="none", **asked))
        print(f"  litellm, {provider}/:", seen)
        reason = "length" if served == "with the last text" else "stop"
        assert seen == (whole, {0: reason}), "the behaviour has changed"
PY
