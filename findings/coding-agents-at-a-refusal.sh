#!/usr/bin/env bash
# What ends a coding agent's loop at a refusal is not what a server would guess: the same 429 with "Retry-After" is
# waited for by one, and the end of the other, and without it the other way round.
# Expected (RFC 9110; a 429 without the header says nothing of how long): all of them try again, later if told so.
# Seen, of a 429 to the second turn of a loop:
#   "Retry-After: 1"   Claude Code 2.1.197 and Codex 0.171.0 wait for it, and go on
#   none               Codex ends at once (its 5xx are tried again); Claude Code goes on after half a second
#   "Retry-After: 61"  Claude Code ends at once, without a second try, as at any value over 60; Codex waits for it
# So an overloaded server had better say how long, and never more than a minute.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
npm install --silent --no-audit --no-fund @anthropic-ai/claude-code@2.1.197 @openai/codex@0.171.0
python3 - <<'PY'
import json
import os
import subprocess
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

times = []
retry_after = None


def message(body):
    tools = {tool["name"] for tool in body.get("tools", ())}
    called = "tool_result" in json.dumps(body["messages"]) or "Bash" not in tools
    usage = {"input_tokens": 1, "output_tokens": 1}
    start = {"id": "msg_1", "type": "message", "role": "assistant", "model": "m", "content": [], "usage": usage,
             "stop_reason": None, "stop_sequence": None}
    block, delta = {"type": "text", "text": ""}, {"type": "text_delta", "text": "done"}
    if not called:
        block = {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {}}
        arguments = json.dumps({"command": "true", "description": "nothing"})
        delta = {"type": "input_json_delta", "partial_json": arguments}
    yield {"type": "message_start", "message": start}
    yield {"type": "content_block_start", "index": 0, "content_block": block}
    yield {"type": "content_block_delta", "index": 0, "delta": delta}
    yield {"type": "content_block_stop", "index": 0}
    ending = {"stop_reason": "end_turn" if called else "tool_use", "stop_sequence": None}
    yield {"type": "message_delta", "delta": ending, "usage": usage}
    yield {"type": "message_stop"}


def response(body):
    called = "function_call_output" in json.dumps(body["input"])
    whole = {"id": "resp_1", "object": "response", "created_at": 1, "model": "m", "output": []}
    item = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "exec_command", "status": "completed",
            "arguments": json.dumps({"cmd": "true"})}
    if called:
        part = {"type": "output_text", "text": "done", "annotations": []}
        item = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [part]}
    yield {"type": "response.created", "response": {**whole, "status": "in_progress"}}
    yield {"type": "response.output_item.done", "output_index": 0, "item": item}
    usage = {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2}
    yield {"type": "response.completed", "response": {**whole, "status": "completed", "output": [item], "usage": usage}}


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        times.append(time.monotonic())
        if len(times) == 2:
            error = {"type": "rate_limit_error", "message": "try later"}
            content = json.dumps({"type": "error", "error": error}).encode()
            self.send_response(429)
            if retry_after is not None:
                self.send_header("Retry-After", retry_after)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for number, event in enumerate((response if "input" in body else message)(body)):
            data = json.dumps({**event, "sequence_number": number})
            self.wfile.write(f"event: {event['type']}\ndata: {data}\n\n".encode())


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}"
env = {
    "PATH": os.environ["PATH"], "HOME": os.getcwd(), "ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": "none",
    "ANTHROPIC_MODEL": "m", "ANTHROPIC_DEFAULT_HAIKU_MODEL": "m", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1", "KEY": "none",
}
provider = f'{{name="x", base_url="{url}/v1", env_key="KEY", wire_api="responses"}}'
COMMANDS = {
    "Claude Code": ["claude", "--allowedTools=Bash", "-p", "go"],
    "Codex": ["codex", "exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", "-c", "model=m",
              "-c", "model_provider=x", "-c", f"model_providers.x={provider}", "-c", "analytics.enabled=false", "go"],
}


def run(agent, told):
    """Whether the loop ended well, the requests, and how long after the refusal the next one came."""
    global retry_after
    retry_after = told
    times.clear()
    command = ["node_modules/.bin/" + COMMANDS[agent][0], *COMMANDS[agent][1:]]
    done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    waited = times[2] - times[1] if len(times) > 2 else None
    print(f"{agent}, Retry-After {told}: exit {done.returncode}, {len(times)} requests, waited {waited}")
    return done.returncode, len(times), waited


for agent, commands in COMMANDS.items():
    version = subprocess.run(["node_modules/.bin/" + commands[0], "--version"], env=env, capture_output=True, text=True)
    print(version.stdout.strip())
    code, requests, waited = run(agent, "1")
    assert (code, requests) == (0, 3) and waited >= 1, "the behaviour has changed"
code, requests, waited = run("Claude Code", None)
assert (code, requests) == (0, 3) and waited > 0.3, "the behaviour has changed"
assert run("Codex", None) == (1, 2, None), "the behaviour has changed"
assert run("Claude Code", "61") == (1, 2, None), "the behaviour has changed"
code, requests, waited = run("Codex", "61")
assert (code, requests) == (0, 3) and waited >= 61, "the behaviour has changed"
PY
