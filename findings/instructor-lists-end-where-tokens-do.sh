#!/usr/bin/env bash
# instructor 1.17.0 gives a list whose text max_tokens has cut as a shorter list, and a cut object as a whole one, if the
# answer is streamed.
# Asked for a list of payments, a model is cut in its second one, at "amount": 12 of 1250; finish_reason is "length".
# Expected, as of create() with response_model=Iterable[Payment] for the same answer: IncompleteOutputException.
# Seen: create_iterable() gives the first payment and ends; the second is missing without an error or a log line.
#       create_partial() ends with Payment(account="savings-2", amount=12), a valid object with a number that the model
#       has not written. Both in all modes tried (tools, JSON, JSON schema); neither shows a finish_reason.
#       The stream() of openai 3.3.0 itself, with a response_format, raises LengthFinishReasonError.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q instructor==1.17.0 openai==3.3.0
cd "$work"
"$work/venv/bin/python" - <<'PY'
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from typing import Iterable

import instructor
from openai import OpenAI
from pydantic import BaseModel

FIRST, CUT = '{"account": "savings-1", "amount": 7}', '{"account": "savings-2", "amount": 12'
BASE = {"id": "x", "created": 1, "model": "m", "usage": {"prompt_tokens": 1, "completion_tokens": 9, "total_tokens": 10}}


class Payment(BaseModel):
    account: str
    amount: int


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = f'{{"tasks": [{FIRST}, {CUT}' if "tasks" in json.dumps(asked) else CUT
        message = {"role": "assistant", "content": text}
        if asked.get("tools"):
            function = {"name": asked["tools"][0]["function"]["name"], "arguments": text}
            call = {"index": 0, "id": "c", "type": "function", "function": function}
            message = {"role": "assistant", "content": None, "tool_calls": [call]}
        self.send_response(200)
        if asked.get("stream"):
            choices = [{"index": 0, "delta": message, "finish_reason": None},
                       {"index": 0, "delta": {}, "finish_reason": "length"}]
            chunks = [{**BASE, "object": "chat.completion.chunk", "usage": None, "choices": [each]} for each in choices]
            body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
            self.send_header("Content-Type", "text/event-stream")
        else:
            choice = {"index": 0, "message": message, "finish_reason": "length"}
            body = json.dumps({**BASE, "object": "chat.completion", "choices": [choice]})
            self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(body.encode())


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
plain = OpenAI(base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key="none", max_retries=0)
ASKED = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


def seen(what, run):
    try:
        result = run()
    except Exception as error:
        result = type(error).__name__
    print(f"{what}: {result}")
    return result


for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON, instructor.Mode.JSON_SCHEMA):
    create = instructor.from_openai(plain, mode=mode).chat.completions
    many, one = {**ASKED, "max_retries": 0, "response_model": Iterable[Payment]}, {**ASKED, "response_model": Payment}
    assert seen(f"{mode}, a list", lambda: create.create(**many)) == "IncompleteOutputException", "changed"
    assert seen(f"{mode}, an object", lambda: create.create(**one)) == "IncompleteOutputException", "changed"
    listed = seen(f"{mode}, create_iterable", lambda: list(create.create_iterable(**one)))
    assert listed == [Payment(account="savings-1", amount=7)], "the behaviour has changed"
    last = seen(f"{mode}, create_partial", lambda: [each.model_dump() for each in create.create_partial(**one)][-1])
    assert last == {"account": "savings-2", "amount": 12}, "the behaviour has changed"


def with_openai():
    with plain.chat.completions.stream(**ASKED, response_format=Payment) as stream:
        return stream.get_final_completion().choices[0].message.parsed


print("instructor", version("instructor"), "openai", version("openai"))
assert seen("openai, stream", with_openai) == "LengthFinishReasonError", "the behaviour has changed"
PY
