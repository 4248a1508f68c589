#!/usr/bin/env bash
# NVIDIA's configurator predicts a TTFT and a latency that leave out the wait for a prefill, where prefills are
# what limits the engine.
# `aiconfigurator cli estimate` (here by its Python API) of an 8B model on an H100: 128 requests in flight, prompts
# of 1,024 tokens, 32 output tokens.
# Expected (Little's law): requests in flight = requests a second x latency of a request.
# Seen: aiconfigurator 0.12.0, for vLLM: 32.1 requests/s, TTFT 106 ms, latency 1.07 s. That is 34 in flight: the
#       other 94 wait, 2.9 s each, in neither figure, so the true TTFT is 28 times the predicted one. Prompts of
#       4,096 tokens, 64 in flight, 16 output tokens: 229 ms and 1.80 s, where 9.5 requests/s leave 6.7 s.
#       Its estimates for SGLang and TensorRT-LLM are the same (TTFT 105 and 110 ms for 64 and for 128 in flight).
#       Where decodes limit the engine (256 output tokens), the three figures agree.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q aiconfigurator==0.12.0
cd "$work"
"$work/venv/bin/python" - <<'PY'
import logging
import warnings
from importlib.metadata import version

warnings.simplefilter("ignore")
from aiconfigurator.cli.api import cli_estimate

logging.disable(logging.CRITICAL)
print("aiconfigurator", version("aiconfigurator"))


def estimate(backend, prompt, output, in_flight):
    """The TTFT and the latency, seconds, and the requests that Little's law leaves in flight."""
    model = {"model_path": "meta-llama/Meta-Llama-3.1-8B", "tp_size": 1, "isl": prompt, "osl": output}
    made = cli_estimate(**model, system_name="h100_sxm", backend_name=backend, batch_size=in_flight)
    assert made.raw["concurrency"] == in_flight, made.raw
    rate, latency_s = float(made.raw["seq/s"]), float(made.raw["request_latency"]) / 1e3
    waits_s = in_flight / rate - latency_s
    print(f"{backend:7}{prompt:6}{output:4}{in_flight:4} in flight: TTFT {made.ttft / 1e3:.3f} s, latency "
          f"{latency_s:.2f} s, {rate:.1f}/s: {rate * latency_s:.0f} of them; left out {waits_s:.2f} s")
    return float(made.ttft) / 1e3, latency_s, rate * latency_s


for backend in ("vllm", "sglang", "trtllm"):
    *_, seen = estimate(backend, 1024, 256, 128)
    assert 126 < seen < 131, seen
    half = estimate(backend, 1024, 32, 64)
    full = estimate(backend, 1024, 32, 128)
    assert full[0] < 1.15 * half[0] and full[1] < 1.15 * half[1], (half, full)
    assert half[2] < 36 and full[2] < 36, (half, full)
    *_, seen = estimate(backend, 4096, 16, 64)
    assert seen < 20, seen
PY
