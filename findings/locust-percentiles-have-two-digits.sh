#!/usr/bin/env bash
# locust 2.47.0 rounds each response time to two digits before it takes a percentile, so that a violated SLO is attained.
# A load test of an LLM reports its own figures by events.request.fire(name="TTFT", response_time=...), in ms.
# Expected: where all first tokens take 1,049 ms, the P95 is 1,049 ms, and a test of "P95 at most 1,000 ms" fails.
# Seen: it is 1,000, as are the P50 and the P100, in the table ("approximated", it says, not by how much) and by
#       get_response_time_percentile, by which locust's docs have a run fail. The maximum is exact: above the P100.
#       From 10 s on there are whole seconds: 10,499 ms are 10,000. Between 10 and 100 ms, where a TPOT is, milliseconds.
#       A limit of 2 digits is off by up to 5 %, either way; a limit in the middle of two steps, as 1,050 ms, is exact.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q locust==2.47.0
cd "$work"
cat > locustfile.py <<'PY'
import json

from locust import User, events, task

TIMES_MS = {"TTFT": 1049, "TTFT of a long prompt": 10499, "TPOT": 12.49}


class Client(User):
    @task
    def chat(self):
        for name, time_ms in TIMES_MS.items():
            self.environment.events.request.fire(
                request_type="chat", name=name, response_time=time_ms, response_length=1, exception=None, context={}
            )
        self.environment.runner.quit()


@events.quitting.add_listener
def check(environment, **_):
    seen = {}
    for name in TIMES_MS:
        entry = environment.stats.get(name, "chat")
        seen[name] = [entry.get_response_time_percentile(share) for share in (0.5, 0.95, 1.0)] + [entry.max_response_time]
        print(f"{name}: P50, P95, P100, maximum, ms:", *seen[name])
    environment.process_exit_code = 1 if seen["TTFT"][1] > 1000 else 0
    with open("seen.json", "w") as file:
        json.dump(seen, file)
PY
"$work/venv/bin/locust" --headless --users 1 --csv run --only-summary --loglevel ERROR
"$work/venv/bin/python" - <<'PY'
import json
from importlib.metadata import version

print("locust", version("locust"), "exits with 0: P95 of TTFT at most 1,000 ms")
with open("seen.json") as file:
    seen = json.load(file)
assert seen["TTFT"] == [1000, 1000, 1000, 1049], "the behaviour has changed"
assert seen["TTFT of a long prompt"] == [10000, 10000, 10000, 10499], "the behaviour has changed"
assert seen["TPOT"][:3] == [12, 12, 12], "the behaviour has changed"
PY
