#!/usr/bin/env bash
# The tool runner of anthropic 2.12.0 sends the whole conversation in its first request alone: to a server that
# leaves unknown fields aside, as vLLM 0.32 does, it then sends a tool's result without the question.
# Expected (docs of messages: "you specify the prior conversational turns with the messages parameter"; of the
# runner: "runs over a message thread by default, so each turn sends only new messages"): only where the server has
# said that it keeps the thread.
# Seen: the runner adds "thread": {"type": "create"}, whatever the base_url, takes any answer for consent, and goes on
#       with {"type": "continue", "previous_message_id": ID} and the new messages alone. There is no error, only a
#       model that has never seen the question. A refusal helps if its error has "details": {"error_code":
#       "thread_unsupported_request"}: then all messages come, and no "thread" any more. Any other 400 ends the
#       runner. tool_runner(thread=False) always sends all messages.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q anthropic==2.12.0
cd "$work"
"$work/venv/bin/python" - <<'PY'
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version

import anthropic

received = []


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.path.split("/")[1]
        received.append(body)
        status, answer = 200, {
            "id": f"msg_{len(received)}", "type": "message", "role": "assistant", "model": "m",
            "usage": {"input_tokens": 1, "output_tokens": 1}, "stop_sequence": None,
        }
        if "thread" in body and server != "ignores":
            error = {"type": "invalid_request_error", "message": "thread is not supported"}
            if server == "says-so":
                error["details"] = {"error_code": "thread_unsupported_request"}
            status, answer = 400, {"type": "error", "error": error}
        elif "tool_result" in json.dumps(body["messages"]):
            answer |= {"content": [{"type": "text", "text": "done"}], "stop_reason": "end_turn"}
        else:
            call = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {}}
            answer |= {"content": [call], "stop_reason": "tool_use"}
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@anthropic.beta_tool
def weather() -> str:
    """The weather here."""
    return "rain"


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()


def run(name, **fields):
    received.clear()
    url = f"http://127.0.0.1:{server.server_port}/{name}"
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    question = [{"role": "user", "content": "Do I need a coat?"}]
    runner = client.beta.messages.tool_runner(model="m", max_tokens=9, tools=[weather], messages=question, **fields)
    try:
        runner.until_done()
    except anthropic.BadRequestError as error:
        return f"BadRequestError: {error.body['error']['message']}"
    return [(body.get("thread", {}).get("type"), [each["role"] for each in body["messages"]]) for body in received]


WHOLE = [(None, ["user"]), (None, ["user", "assistant", "user"])]
print("anthropic", version("anthropic"))
seen = {name: run(name) for name in ("ignores", "refuses", "says-so")} | {"thread=False": run("ignores", thread=False)}
for name, each in seen.items():
    print(f"{name}: {each}")
assert seen == {
    "ignores": [("create", ["user"]), ("continue", ["user"])],
    "refuses": "BadRequestError: thread is not supported",
    "says-so": [("create", ["user"]), *WHOLE],
    "thread=False": WHOLE,
}, "the behaviour has changed"
PY
