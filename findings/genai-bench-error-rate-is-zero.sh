#!/usr/bin/env bash
# genai-bench 0.0.5 writes an error rate of 0 however many requests fail, and too small a throughput with a warm-up.
# Expected: 4 errors of 10 requests are an error_rate of 0.4, and the warning that it prints from 0.5 on comes;
#           with --warmup-ratio and --cooldown-ratio the tokens of the requests that count are divided by their time.
# Seen: 1. error_rate is 0 beside num_error_requests 4 and num_requests 10, also where all but one fail (it is
#          computed before the number of requests is set), so the warning never comes.
#       2. the tokens of the requests that count are divided by the whole run: a fifth left out at each end takes
#          two fifths off a load that is the same all the time. requests_per_second counts all requests.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q genai-bench==0.0.5
cd "$work"
"$work/venv/bin/python" - 2>log <<'PY'
from importlib.metadata import version

from genai_bench.metrics.aggregated_metrics_collector import AggregatedMetricsCollector
from genai_bench.metrics.metrics import RequestLevelMetrics
from genai_bench.metrics.request_metrics_collector import RequestMetricsCollector
from genai_bench.protocol import UserChatResponse


def totals(errors, ratio=None):
    """Of ten requests one after the other, each of a second and of ten tokens."""
    collector = AggregatedMetricsCollector()
    collector.set_run_metadata(1, "D(100,10)")
    for start in range(10):
        request = RequestMetricsCollector()
        if start < errors:
            request.metrics = RequestLevelMetrics(error_code=503, error_message="busy")
        else:
            request.calculate_metrics(UserChatResponse(
                status_code=200, start_time=start, time_at_first_token=start + 0.1, end_time=start + 1,
                num_prefill_tokens=100, tokens_received=10, generated_text="words",
            ))
        collector.add_single_request_metrics(request.metrics)
    collector.aggregate_metrics_data(0, 10, ratio, ratio)
    return collector.aggregated_metrics


print("genai-bench", version("genai-bench"))
for errors in (0, 4, 9):
    seen = totals(errors)
    print(f"{errors} errors: num_error_requests {seen.num_error_requests}, num_requests {seen.num_requests}, "
          f"error_rate {seen.error_rate}")
    assert (seen.num_error_requests, seen.num_requests) == (errors, 10)
    assert seen.error_rate == 0, "the behaviour has changed"
whole, middle = totals(0), totals(0, 0.2)
for name, seen in (("all requests", whole), ("without a fifth at each end", middle)):
    print(f"{name}: {seen.mean_output_throughput_tokens_per_s} tokens/s, {seen.requests_per_second} requests/s")
assert (whole.mean_output_throughput_tokens_per_s, middle.mean_output_throughput_tokens_per_s) == (10, 6), (
    "the behaviour has changed"
)
assert whole.requests_per_second == middle.requests_per_second == 1
PY
! grep "greater than 0.5" log
