"""The page of metrics with vLLM's names, for queries, scalers and scorers that know these."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from sluice.controller.observability.metrics import text_of

NAMES: Final[tuple[tuple[str, str, tuple[str, str] | None], ...]] = (
    ("vllm:num_requests_running", "sluice_replica_running_requests", None),
    ("vllm:num_requests_waiting", "sluice_replica_waiting_requests", None),
    ("vllm:kv_cache_usage_perc", "sluice_replica_kv_usage_ratio", None),
    ("vllm:num_preemptions", "sluice_preemptions", None),
    ("vllm:prompt_tokens", "sluice_tokens", ("type", "prompt")),
    ("vllm:generation_tokens", "sluice_tokens", ("type", "generated")),
    ("vllm:prefix_cache_queries", "sluice_tokens", ("type", "prompt")),
    ("vllm:prefix_cache_hits", "sluice_tokens", ("type", "cached")),
    ("vllm:request_success", "sluice_requests", ("outcome", "ok")),
    ("vllm:time_to_first_token_seconds", "sluice_ttft_seconds", None),
    ("vllm:inter_token_latency_seconds", "sluice_inter_token_seconds", None),
    ("vllm:request_time_per_output_token_seconds", "sluice_tpot_seconds", None),
    ("vllm:e2e_request_latency_seconds", "sluice_e2e_seconds", None),
    ("vllm:request_queue_time_seconds", "sluice_queue_seconds", None),
)
"""vLLM's family, ours, and the label and value of the series of ours that it stands for."""


def with_vllm_names(page: bytes, model: str) -> bytes:
    """A page's metrics that vLLM has, too, with its names and its labels ``model_name`` and
    ``engine``; ``model``: that of lines without one. ``O(lines)``."""
    found = {each.name: each for each in text_string_to_metric_families(page.decode())}
    return text_of([*_renamed(found, model)])


def _renamed(found: dict[str, Metric], model: str) -> Iterator[Metric]:
    for name, ours, part in NAMES:
        if ours not in found:
            continue
        family = found[ours]
        metric = Metric(name, family.documentation, family.type)
        for sample in family.samples:
            labels = dict(sample.labels)
            if part is not None and labels.pop(part[0], None) != part[1]:
                continue
            labels |= {"model_name": labels.pop("model", model), "engine": "0"}
            metric.add_sample(name + sample.name.removeprefix(ours), labels, sample.value)
        if metric.samples:
            yield metric
