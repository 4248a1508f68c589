#!/usr/bin/env bash
# dspy 3.4.1 and litellm 1.110.2 answer from their caches what another server, or the same one without a constraint, has
# answered. dspy's cache is on by default, and on disk.
# Two servers, A and B, serve a model of the same name: a quantized one beside the original, a test system, a fine-tune.
# Expected, as of langchain-core 1.8.3: what changes the answer belongs to the cache's key, so B is asked, too, and so is
# A when vLLM's fields change.
# Seen:     another server                        extra_body={"structured_outputs": {"choice": ["yes", "no"]}}
#   dspy      A's answer, B gets no request, in     the server is asked
#             a later process, too
#   litellm   A's answer, B gets no request         the answer without the constraint, no request; the same for
#                                                   "chat_template_kwargs", and for a header with an objective
#       So a comparison of two deployments finds no difference, and a text that must obey is free text.
#       dspy.LM(..., cache=False) asks, and litellm does with cache={"namespace": ...}, one for each server and constraint.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q dspy==3.4.1 litellm==1.110.2 langchain-core==1.8.3 langchain-openai==1.7.4 \
  fastapi==0.165.0 orjson==3.13.0 soundfile==0.14.0 # which litellm imports for an answer from its cache
cd "$work"
export LITELLM_LOCAL_MODEL_COST_MAP=True DSPY_CACHEDIR=$work/cache
cat >servers.py <<'PY'
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def serve(name):
    """A server whose answers have its name, and the number of requests to it so far."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            server.requests += 1
            choice = {"index": 0, "message": {"role": "assistant", "content": name}, "finish_reason": "stop"}
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            answer = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps({**answer, "usage": usage}).encode())

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.requests = 0
    server.url = f"http://127.0.0.1:{server.server_port}/v1"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


ASKED = [{"role": "user", "content": "yes or no?"}]
CONSTRAINT = {"structured_outputs": {"choice": ["yes", "no"]}}
PY
cat >with_dspy.py <<'PY'
import sys

import dspy
from servers import ASKED, CONSTRAINT, serve

server, seen = serve(sys.argv[1]), []
for options in ({}, {"extra_body": CONSTRAINT}, {"cache": False}):
    requests = server.requests
    [text] = dspy.LM("openai/m", api_base=server.url, api_key="none", **options)(messages=ASKED)
    seen.append((text, server.requests - requests))
print("dspy, asking", sys.argv[1], seen)
constrained = ("A", 1) if sys.argv[1] == "A" else ("A", 0)
assert seen == [constrained, constrained, (sys.argv[1], 1)], "the behaviour has changed"
PY
"$work/venv/bin/python" with_dspy.py A 2>>log
"$work/venv/bin/python" with_dspy.py B 2>>log
"$work/venv/bin/python" - 2>>log <<'PY'
from importlib.metadata import version

import litellm
from langchain_core.caches import InMemoryCache
from langchain_core.globals import set_llm_cache
from langchain_openai import ChatOpenAI
from litellm.caching.caching import Cache
from servers import ASKED, CONSTRAINT, serve

litellm.cache = Cache(type="local")
set_llm_cache(InMemoryCache())


def with_litellm(url, **options):
    given = {"model": "hosted_vllm/m", "api_base": url, "api_key": "none", "messages": ASKED}
    return litellm.completion(**given, caching=True, **options).choices[0].message.content


def with_langchain(url, extra_body=None, extra_headers=None, cache=None):
    model = ChatOpenAI(model="m", base_url=url, api_key="none", extra_body=extra_body, default_headers=extra_headers)
    return model.invoke("yes or no?").content


seen = {}
for ask in (with_litellm, with_langchain):
    a, b = serve("A"), serve("B")
    for name, server, options in (
        ("first", a, {}),
        ("again", a, {}),
        ("constrained", a, {"extra_body": CONSTRAINT}),
        ("without thinking", a, {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}),
        ("objective", a, {"extra_headers": {"x-slo-ttft-ms": "200"}}),
        ("the other server", b, {}),
        ("namespace", b, {"cache": {"namespace": "B"}}),
    ):
        requests = server.requests
        text = ask(server.url, **options)
        seen[ask.__name__, name] = (text, server.requests - requests)
        print(f"{ask.__name__[5:]}, {name}: answer of {text}, {server.requests - requests} requests")
print(*(f"{name} {version(name)}" for name in ("dspy", "litellm", "langchain-core")))
names = ("first", "again", "constrained", "without thinking", "objective", "the other server", "namespace")
litellms = [("A", 1), *[("A", 0)] * 5, ("B", 1)]
langchains = [("A", 1), ("A", 0), *[("A", 1)] * 3, ("B", 1), ("B", 0)]
assert [seen["with_litellm", name] for name in names] == litellms, "the behaviour has changed"
assert [seen["with_langchain", name] for name in names] == langchains, "the behaviour has changed"
PY
