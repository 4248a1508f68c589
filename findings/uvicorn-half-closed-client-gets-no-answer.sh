#!/usr/bin/env bash
# A client that has sent its request and closes its sending side (TCP's half-close, as of `nc -N` and of proxies that pass
# it on) gets no answer from uvicorn 0.54.0, the server of vLLM and Ray Serve: its stream is cancelled.
# Expected (RFC 9112, 9.6: a server that closes reads on, and half-closes itself; RFC 9293: the other direction stays
#   open): the client gets what it has asked for, as it still reads.
# Seen, of a stream of three events and [DONE]: with httptools and with h11 the head and no event, without an error in a
#   log; hypercorn 0.18.0 sends all four.
set -euo pipefail
work=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null; rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q uvicorn==0.54.0 httptools==0.9.0 h11==0.16.0 hypercorn==0.18.0
cd "$work"
cat >app.py <<'PY'
import asyncio


async def app(scope, receive, send):
    if scope["type"] != "http":
        return
    headers = [(b"content-type", b"text/event-stream")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for number in range(3):
        await asyncio.sleep(0.2)
        await send({"type": "http.response.body", "body": b"data: %d\n\n" % number, "more_body": True})
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})
PY
free() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }
for server in httptools h11 hypercorn; do
  port=$(free)
  if [ "$server" = hypercorn ]; then
    "$work/venv/bin/hypercorn" app:app -b "127.0.0.1:$port" >"$server.log" 2>&1 &
  else
    "$work/venv/bin/uvicorn" app:app --port "$port" --http "$server" --lifespan off >"$server.log" 2>&1 &
  fi
  python3 - "$server" "$port" <<'PY'
import socket
import sys
import time

server, port = sys.argv[1], int(sys.argv[2])
for _ in range(600):
    try:
        socket.create_connection(("127.0.0.1", port)).close()
        break
    except OSError:
        time.sleep(0.1)
seen = []
for half_closes in (False, True):
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        client.sendall(b"POST / HTTP/1.1\r\nHost: here\r\nContent-Length: 0\r\n\r\n")
        if half_closes:
            client.shutdown(socket.SHUT_WR)
        answer = b""
        while b"[DONE]" not in answer and (part := client.recv(1 << 16)):
            answer += part
    seen.append((answer.split(b"\r\n")[0].split()[:2], answer.count(b"data:")))
    print(f"{server}, {'half-closed' if half_closes else 'open'}: {answer[:15]!r}, {seen[-1][1]} events")
ok = [b"HTTP/1.1", b"200"]
assert seen == [(ok, 4), (ok, 4 if server == "hypercorn" else 0)], "the behaviour has changed"
PY
done
