"""Real vLLM has what Sluice uses of it, and what it lacks is named at start."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path

import pytest

from sluice.replica.config import TransferConfig
from sluice.replica.scheduler.xargs import SchedulerSettings
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
    from sluice.replica.vllm.contract import WITH_PREEMPTION, age, unfit, unmet
    from sluice.replica.vllm.kv_connector import TcpConnector
    from sluice.replica.vllm.support import SPECULATION, TRANSFER

    if age(vllm.__version__, WITH_PREEMPTION) == "older":
        pytest.skip("features need a newer vLLM")
    preemptive = PreemptiveScheduler, PreemptiveExecutor, PreemptiveGroupExecutor
    assert unmet((*PARTS, *SPECULATION, *TRANSFER)) == []
    assert unfit((*preemptive, TcpConnector)) == []


def test_every_import_from_vllm_is_there() -> None:
    """Also those in functions, which otherwise fail at their first call."""
    for path in sorted((ROOT / "replica").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm"):
                module = import_module(str(node.module))
                for alias in node.names:
                    if not hasattr(module, alias.name):  # a module, or an error
                        import_module(f"{node.module}.{alias.name}")


def test_asynchronous_scheduling_is_vllms_choice(tmp_path: Path) -> None:
    from sluice.replica.vllm.setup import parse_arguments

    settings = SchedulerSettings(state_table=tmp_path / "table", policy="fcfs")
    assert parse_arguments({}, "model", "name", settings).async_scheduling is None
    off = {"async-scheduling": False}
    assert parse_arguments(off, "model", "name", settings).async_scheduling is False


def test_it_is_off_where_it_loses_tokens_of_transferred_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm

    from sluice.replica.vllm.setup import parse_arguments

    settings = SchedulerSettings(state_table=tmp_path / "table", policy="fcfs")
    tcp = TransferConfig(connector="tcp")
    for version, choice in (("0.31.0", False), ("0.32.0", None)):
        monkeypatch.setattr(vllm, "__version__", version)
        parsed = parse_arguments({}, "model", "name", settings, transfer=tcp)
        assert parsed.async_scheduling is choice
    monkeypatch.setattr(vllm, "__version__", "0.31.0")
    own = {"kv_transfer_config": {"kv_connector": "X", "kv_role": "kv_both"}}
    assert parse_arguments(own, "model", "name", settings).async_scheduling is False
    with pytest.raises(ValueError, match=r"before vLLM 0\.32 a KV connector needs async-sched"):
        parse_arguments({"async-scheduling": True}, "model", "name", settings, transfer=tcp)


def test_old_versions_are_refused_and_new_ones_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    from sluice.replica.vllm.support import UnsupportedVllmError, check_vllm

    # The serving layers of vLLM before 0.29 raise the root logger's level.
    caplog.set_level("WARNING", logger="sluice")
    with pytest.raises(UnsupportedVllmError, match=r"supported are 0\.26 and newer"):
        check_vllm(version="0.25.1")
    assert not caplog.records
    for _ in range(2):
        check_vllm(version="1.0.0")
        check_vllm(version="dev")
    told = [record.getMessage() for record in caplog.records]
    assert [text.partition(",")[0] for text in told] == [
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
