"""Real vLLM has what Sluice uses of it; what it lacks, and configurations that cannot carry plans,
are named at start."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from copy import copy
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

from sluice.replica.vllm.contract import (
    WITH_DATA_PARALLEL,
    WITH_KEPT_KV,
    WITH_PIPELINE,
    age,
)
from tests.documents import ROOT

pytestmark = pytest.mark.vllm


def test_this_vllm_is_supported() -> None:
    from sluice.replica.grammar.bound import BoundedGrammar
    from sluice.replica.vllm.client import WatchedLLM
    from sluice.replica.vllm.scheduler import SloAsyncScheduler, SloScheduler
    from sluice.replica.vllm.support import check_overrides, check_vllm

    check_vllm(serving=True)
    check_overrides("Sluice", SloScheduler, SloAsyncScheduler, WatchedLLM, BoundedGrammar)


def test_this_vllm_has_what_features_use() -> None:
    import vllm

    from sluice.replica.preemption.executor import PreemptiveExecutor, PreemptiveGroupExecutor
    from sluice.replica.preemption.scheduler import PreemptiveScheduler
    from sluice.replica.preemption.support import PARTS
    from sluice.replica.vllm.contract import WITH_PREEMPTION, unfit, unmet
    from sluice.replica.vllm.kept_kv import KEPT_KV, WorthQueue
    from sluice.replica.vllm.kv_connector import TcpConnector
    from sluice.replica.vllm.support import SPECULATION, TRANSFER

    if age(vllm.__version__, WITH_PREEMPTION) == "older":
        pytest.skip("features need a newer vLLM")
    preemptive = PreemptiveScheduler, PreemptiveExecutor, PreemptiveGroupExecutor
    assert unmet((*PARTS, *SPECULATION, *TRANSFER)) == []
    assert unfit((*preemptive, TcpConnector)) == []
    if age(vllm.__version__, WITH_KEPT_KV) != "older":
        assert unmet(KEPT_KV) == [] and unfit([WorthQueue]) == []


def test_every_import_from_vllm_is_there() -> None:
    """Also those in functions, which otherwise fail at their first call."""
    for path in sorted((ROOT / "replica").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm"):
                module = import_module(str(node.module))
                for alias in node.names:
                    if not hasattr(module, alias.name):  # a module, or an error
                        import_module(f"{node.module}.{alias.name}")


def test_old_versions_are_refused_and_new_ones_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    from sluice.replica.vllm.support import UnsupportedVllmError, check_vllm

    # The serving layers of vLLM before 0.29 raise the root logger's level.
    caplog.set_level("WARNING", logger="sluice")
    with pytest.raises(UnsupportedVllmError, match=r"supported are 0\.26 and newer"):
        check_vllm(version="0.25.1")
    for _ in range(2):
        check_vllm(version="1.0.0")
        check_vllm(version="dev")
    # vLLM logs, too, where this is its first import.
    own = [record for record in caplog.records if record.name.startswith("sluice")]
    assert [record.getMessage().partition(",")[0] for record in own] == [
        "Sluice was not run in vLLM 1.0.0",
        "Sluice was not run in vLLM dev",
    ]


def test_an_unknown_version_that_lacks_something_is_refused_with_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    from sluice.replica.vllm.scheduler import SloScheduler
    from sluice.replica.vllm.support import UnsupportedVllmError, check_overrides, check_vllm

    monkeypatch.delattr(Scheduler, "_is_blocked_waiting_status")
    missing = r"vLLM 0\.99\.0, which lacks Scheduler\._is_blocked_waiting_status"
    with pytest.raises(UnsupportedVllmError, match=missing):
        check_vllm(version="0.99.0")

    def update_from_output(self, batch, result, epoch): ...

    update_from_output.__module__ = Scheduler.__module__
    monkeypatch.setattr(Scheduler, "update_from_output", update_from_output)
    with pytest.raises(
        UnsupportedVllmError, match=r"update_from_output\(self, batch, result, epoch"
    ):
        check_overrides("Sluice", SloScheduler)


PIPELINE = {"parallel_config.pipeline_parallel_size": 2}
RANKS = {"parallel_config.data_parallel_size": 2}
DRAFTS = {
    "speculative_config": SimpleNamespace(
        method="ngram",
        enable_adaptive_verification=False,
        uses_dynamic_speculative_decoding=lambda: True,
        use_multi_module_mtp=lambda: False,
    )
}
TRANSFERS = {"kv_transfer_config": SimpleNamespace()}


def configuration(changes: Mapping[str, Any]) -> SimpleNamespace:
    """What is read of vLLM's configuration, with values by their path."""
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(
            policy="fcfs",
            enable_chunked_prefill=True,
            long_prefill_token_threshold=0,
            async_scheduling=False,
        ),
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=1,
            data_parallel_size=1,
            data_parallel_size_local=2,
            distributed_executor_backend="mp",
        ),
        model_config=SimpleNamespace(is_encoder_decoder=False, is_moe=False),
        speculative_config=None,
        kv_transfer_config=None,
    )
    for path, value in changes.items():
        *owner, name = path.split(".")
        holder = getattr(config, owner[0]) if owner else config
        if owner == ["speculative_config"]:
            config.speculative_config = holder = copy(holder)
        setattr(holder, name, value)
    return config


@pytest.mark.parametrize(
    ("feature", "changes", "rule"),
    [
        ({}, {"scheduler_config.policy": "priority"}, "must be fcfs"),
        ({}, {"scheduler_config.enable_chunked_prefill": False}, "chunked prefill must be on"),
        ({}, {"scheduler_config.long_prefill_token_threshold": 100}, "must be 0"),
        ({}, {"scheduler_config.prefill_schedule_interval": 2}, "must be 1"),
        ({}, {"parallel_config.prefill_context_parallel_size": 2}, "must be 1"),
        ({}, {"parallel_config.distributed_executor_backend": "ray"}, "mp runs all workers on"),
        (PIPELINE, DRAFTS, "pipeline parallelism .* speculative decoding must be off"),
        (PIPELINE, TRANSFERS, "pipeline parallelism .* KV transfer must be off"),
        (PIPELINE, {"model_config.is_encoder_decoder": True}, "pipeline .* encoder-decoder"),
        (RANKS, DRAFTS, "data parallelism .* speculative decoding must be off"),
        (RANKS, TRANSFERS, "data parallelism .* KV transfer must be off"),
        (RANKS, {"model_config.is_moe": True}, "on CPUs the model may not have experts"),
        (RANKS, {"parallel_config.data_parallel_size_local": 1}, "all ranks must be on the"),
        (DRAFTS, {"scheduler_config.async_scheduling": True}, "async-scheduling must be off"),
        (
            DRAFTS,
            {"speculative_config.uses_dynamic_speculative_decoding": lambda: False},
            "by `speculative-config`",
        ),
        (
            DRAFTS,
            {"speculative_config.use_multi_module_mtp": lambda: True},
            "several MTP layers",
        ),
        (DRAFTS, {"speculative_config.method": "extract_hidden_states"}, "drafts nothing"),
        (DRAFTS, {"speculative_config.enable_adaptive_verification": True}, "must be off"),
    ],
)
def test_configurations_that_cannot_carry_plans_are_refused(
    feature: dict[str, Any], changes: dict[str, Any], rule: str
) -> None:
    import vllm

    from sluice.replica.vllm.support import UnsupportedVllmError, check_config

    newest_start = max(WITH_PIPELINE, WITH_DATA_PARALLEL)
    if feature in (PIPELINE, RANKS) and age(vllm.__version__, newest_start) == "older":
        pytest.skip("it needs a newer vLLM")
    check_config(configuration(feature))
    with pytest.raises(UnsupportedVllmError, match=rule):
        check_config(configuration({**feature, **changes}))


def test_a_drafting_model_is_refused_where_vllm_cannot_run_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import vllm

    from sluice.replica.vllm.support import UnsupportedVllmError, check_config

    drafting_model = configuration({**DRAFTS, "speculative_config.method": "draft_model"})
    for version in ("0.29.0", "0.31.0"):
        monkeypatch.setattr(vllm, "__version__", version)
        check_config(drafting_model)
    monkeypatch.setattr(vllm, "__version__", "0.30.0")
    check_config(configuration(DRAFTS))
    with pytest.raises(UnsupportedVllmError, match=r"on CPUs vLLM 0\.30 drafts by ngram only"):
        check_config(drafting_model)
