"""`helm test`: the Service is healthy, and serves a completion with an objective.

`SLUICE_URL` is the Service's, `SLUICE_API_KEY` a client's key. With `SLUICE_REFUSES` clients need a
key and the test has none: it must be refused.
"""

import json
import os
import sys
import urllib.error
import urllib.request


def ask(path: str, body: object = None) -> tuple[int, str, str]:
    """Status, admission and text of the answer."""
    headers = {"content-type": "application/json"}
    if key := os.environ.get("SLUICE_API_KEY"):
        headers["authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(os.environ["SLUICE_URL"] + path, data, headers)
    try:
        answer = urllib.request.urlopen(request, timeout=60)
    except urllib.error.HTTPError as error:
        answer = error
    with answer:
        return answer.status, answer.headers["x-sluice-admission"] or "none", answer.read().decode()


def expect(kept: bool, what: str) -> None:
    """Print what was seen; end the test if it is wrong."""
    print("ok:" if kept else "FAILED:", what)
    if not kept:
        sys.exit(1)


status, _, text = ask("/health")
expect(status == 200, f"/health answers {status} {text[:200]}")
status, _, text = ask("/v1/models")
if os.environ.get("SLUICE_REFUSES"):
    expect(status == 401, f"without a key /v1/models answers {status}")
    sys.exit()
expect(status == 200, f"/v1/models answers {status} {text[:200]}")
body = {
    "model": json.loads(text)["data"][0]["id"],
    "prompt": "One, two, three",
    "max_tokens": 4,
    "slo": {"ttft_ms": 60_000},
}
status, admission, text = ask("/v1/completions", body)
expect(status == 200, f"/v1/completions answers {status} {text[:200]}")
expect(admission in ("guaranteed", "best-effort"), f"x-sluice-admission is {admission}")
