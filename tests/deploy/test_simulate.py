from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from rich.progress import Progress

from sluice.benchmarks.planning.search import (
    CapacityReport,
    Question,
    Range,
    answered,
)
from sluice.benchmarks.planning.simulate import NO_ANSWER
from sluice.deploy.cli import main
from sluice.scheduling.latency.model import LinearLatency
from sluice.scheduling.latency.profile import LatencyProfile
from tests.benchmarks.test_planning import run as one_run

ONE_EACH = ["--latency", "a=0.05,b=5e-5", "--max-sequences", "1", "--routing", "round_robin"]
"""Replicas that take 0.1 s for each request of the trace, one at a time."""

IN_TIME = ["--slo", "ttft_ms=115"]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A request of 1,000 tokens every 0.03 s: three at a time are too few, four are enough."""
    path = tmp_path / "even.csv"
    rows = [f"2024-05-10 00:00:{0.03 * i:09.6f},1000,1" for i in range(100)]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    return path


def simulate(trace: Path, *arguments: str) -> Result:
    seeds = [] if "--seeds" in arguments else ["--seeds", "2"]
    common = ["--policy", "fcfs", "--jobs", "1", *seeds]
    return CliRunner().invoke(main, ["simulate", "--trace", str(trace), *common, *arguments])


def report(trace: Path, *arguments: str) -> CapacityReport:
    result = simulate(trace, *arguments, "--json")
    assert result.exit_code == 0, result.output
    return CapacityReport.model_validate_json(result.stdout)


def test_the_answer_comes_with_the_curve_and_its_setting(trace: Path) -> None:
    found = report(trace, *ONE_EACH, *IN_TIME)
    assert (found.status, found.replicas, found.seeds) == ("reached", 4, (1, 2))
    counts = [point.replicas for point in found.points]
    assert counts == sorted(counts)
    assert {3, 4, 5} <= set(counts)
    attainment = {point.replicas: point.attainment.mean for point in found.points}
    assert all((attainment[count] or 0) >= 0.95 for count in counts if count >= 4)
    assert all((attainment[count] or 0) < 0.95 for count in counts if count < 4)
    assert found.traffic["requests"] == 100
    assert found.traffic["scaling"] == "as recorded"
    assert found.fleet["latency_coefficients"] == [0.05, 5e-5, 0.0, 0.0]
    # One seed gives no range, and a request of one token has no TPOT.
    alone = report(trace, *ONE_EACH, *IN_TIME, "--seeds", "1").points[0]
    assert alone.attainment.half_width is None
    assert alone.tpot_p50_ms.mean is None


def test_a_published_mix_takes_the_place_of_a_trace_and_of_objectives(trace: Path) -> None:
    asked = ["--mix", "llm-d-planner", "--requests", "200", "--seeds", "1", "--replicas", "4"]
    asked += ["--latency", "a=0.009,b=8e-5", "--kv-blocks", "16384", "--jobs", "1", "--json"]
    result = CliRunner().invoke(main, ["simulate", *asked])
    found = CapacityReport.model_validate_json(result.stdout)
    assert "llm-d-planner" in found.traffic["description"]
    classes = {each["name"]: each for each in found.classes}
    assert classes["chatbot"]["ttft_ms"] == pytest.approx(300)
    assert classes["code-completion"]["share"] == pytest.approx(0.5 / 0.998)
    both = simulate(trace, "--mix", "llm-d-planner")
    assert both.exit_code == 2 and "give --trace or --mix" in both.output
    more = CliRunner().invoke(main, ["simulate", *asked, *IN_TIME])
    assert more.exit_code == 2 and "--mix has classes of its own" in more.output


def test_tables_say_what_was_asked_and_what_is_left_out(trace: Path) -> None:
    twice = ["--slo", "name=chat,ttft_ms=115,share=3", "--slo", "name=bulk,e2e_ms=60000"]
    result = simulate(trace, *ONE_EACH, *twice, "--rate-scale", "0.5")
    assert result.exit_code == 0, result.output
    for words in (
        "thinned to a share of 0.5",
        "chat 75% (TTFT 115 ms, priority 1); bulk 25% (E2E 60000 ms, priority 1)",
        "TPOT: mean",
        "what is not modelled",
        "Classes with",
        "The target of 95.00% needs",
    ):
        assert words in " ".join(result.stdout.split())


@pytest.mark.parametrize(
    ("slos", "judged"),
    [
        (["tpot_ms=900"], "mean"),
        (["tpot_ms=900,tpot_anchor=window"], "window"),
        (["tpot_ms=900", "name=b,tpot_ms=900,tpot_anchor=running_max"], "stated"),
    ],
)
def test_each_class_is_judged_by_its_anchor(trace: Path, slos: list[str], judged: str) -> None:
    found = report(trace, *ONE_EACH, *[part for slo in slos for part in ("--slo", slo)])
    assert found.tpot_metric == judged
    shown = simulate(trace, *ONE_EACH, *[part for slo in slos for part in ("--slo", slo)]).stdout
    assert ("TPOT by window" in " ".join(shown.split())) == (judged == "window")


def test_no_answer_is_said_and_exits_so(trace: Path) -> None:
    says = "is not reached with up to 3 replicas: at best"
    result = simulate(trace, *ONE_EACH, *IN_TIME, "--max-replicas", "3")
    assert result.exit_code == NO_ANSWER
    assert says in result.stdout
    as_json = simulate(trace, *ONE_EACH, *IN_TIME, "--max-replicas", "3", "--json")
    assert as_json.exit_code == NO_ANSWER
    assert says in as_json.stderr
    found = CapacityReport.model_validate_json(as_json.stdout)
    assert (found.status, found.replicas) == ("not_reachable", None)
    assert found.points[-1].replicas == 3


def test_requests_that_no_replica_holds_are_named(trace: Path) -> None:
    result = simulate(trace, *ONE_EACH, *IN_TIME, "--kv-blocks", "60", "--max-replicas", "1")
    assert result.exit_code == NO_ANSWER
    words = "100 requests failed there, those longer than a replica's KV of 960 tokens"
    assert words in " ".join(result.stdout.split())


def test_an_answer_that_the_seeds_do_not_settle_says_so(trace: Path) -> None:
    found = report(trace, *ONE_EACH, *IN_TIME)
    assert "below the target" not in found.answer()
    unsure = Range(mean=0.955, half_width=0.02)
    points = [point.model_copy(update={"attainment": unsure}) for point in found.points]
    assert "The range reaches below the target" in (
        found.model_copy(update={"points": tuple(points)}).answer()
    )


def test_without_time_there_is_no_answer(trace: Path) -> None:
    run = one_run(trace, 1)
    question = Question(run.traffic, run.fleet, 0.95, 8, None, True, (1, 2), 0.0, 1)
    found = answered(question, Progress(disable=True))
    assert (found.status, found.replicas, found.points) == ("out_of_time", None, ())
    pools = found.disaggregated
    assert pools is not None
    assert (pools.status, pools.prefillers, pools.points) == ("out_of_time", None, ())
    assert found.answer().count("time limit was reached") == 2


APART = [
    *("--latency", "a=0.01,b=1e-4", "--kv-blocks", "16384", "--routing", "least_tokens"),
    *("--slo", "ttft_ms=400,tpot_ms=20", "--disaggregated", "--seeds", "1"),
]
"""Prompts of 0.1 s at 33 a second, and decodes that a single replica has time for."""


@pytest.fixture
def phases(tmp_path: Path) -> Path:
    path = tmp_path / "phases.csv"
    rows = [f"2024-05-10 00:00:{0.03 * i:09.6f},1000,10" for i in range(150)]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    return path


def test_both_pools_are_sized_beside_the_replicas_that_do_both(phases: Path) -> None:
    found = report(phases, *APART)
    pools = found.disaggregated
    assert pools is not None and found.answers
    # 33 prompts a second of 0.1 s keep four busy; 333 tokens a second leave one at two thirds.
    assert pools.prefill_per_decode == pytest.approx(0.1 / (10 * 1e-4 * 2), rel=0.01)
    assert (pools.status, pools.prefillers, pools.decoders) == ("reached", 4, 1)
    tried = {(point.prefillers, point.decoders): point for point in pools.points}
    assert all(point.replicas == sum(pair) for pair, point in tried.items())
    assert (tried[3, 1].attainment.mean or 0) < 0.95 <= (tried[4, 1].attainment.mean or 0)
    assert found.replicas is not None
    assert f"needs {found.replicas} replicas" in found.answer()
    assert "4 prefill and 1 decode, 5 in all" in found.answer()


def test_a_slow_network_needs_more_than_no_pools_can_give(phases: Path) -> None:
    # Moving a prompt takes a second, more than its TTFT; replicas that do both do not mind.
    arguments = [*APART, "--transfer-rate", "1000", "--max-replicas", "8"]
    result = simulate(phases, *arguments)
    assert result.exit_code == NO_ANSWER
    words = " ".join(result.stdout.split())
    assert "Prefill and decode apart" in words
    assert "Disaggregated, it is not reached: at best 0.00" in words
    as_json = simulate(phases, *arguments, "--json")
    found = CapacityReport.model_validate_json(as_json.stdout)
    assert found.status == "reached"
    assert found.disaggregated is not None
    assert (found.disaggregated.status, found.disaggregated.decoders) == ("not_reachable", None)


def test_a_configuration_gives_classes_limits_policies_and_latency(
    trace: Path, tmp_path: Path
) -> None:
    engine = {
        "kind": "simulated",
        "policy": "sarathi",
        "policy_options": {"token_budget": 300},
        "simulated": {"step_s": 0.05, "token_s": 5e-5, "context_token_s": 0, "max_sequences": 7},
    }
    router = {
        "classes": {"fast": {"ttft_ms": 900}, "slow": {"e2e_ms": 20_000, "priority": 3}},
        "default_class": "slow",
    }
    data: dict[str, Any] = {"engine": engine, "router": router}
    data["controller"] = {"policy": "least_tokens"}
    path = tmp_path / "sluice.yaml"
    path.write_text(yaml.safe_dump(data))
    whole = ["simulate", "--trace", str(trace), "--config", str(path), "--jobs", "1", "--json"]
    result = CliRunner().invoke(main, [*whole, "--seeds", "1"])
    assert result.exit_code == 0, result.output
    found = CapacityReport.model_validate_json(result.stdout)
    assert (found.fleet["policy"], found.fleet["policy_options"]) == (
        "sarathi",
        {"token_budget": 300},
    )
    assert found.fleet["routing"] == "least_tokens"
    assert found.fleet["engine"]["max_sequences"] == 7
    assert found.fleet["latency_coefficients"] == [0.05, 5e-5, 0.0, 0.0]
    assert [(each["name"], each["e2e_ms"], each["priority"]) for each in found.classes] == [
        ("slow", 20_000, 3)
    ]
    both = ["--share", "fast=1", "--share", "slow=3"]
    shared = report(trace, "--config", str(path), *both)
    assert {each["name"]: each["share"] for each in shared.classes} == {"fast": 0.25, "slow": 0.75}
    assert (shared.fleet["policy"], shared.fleet["policy_options"]) == ("fcfs", {})


def test_a_profile_of_a_replica_gives_the_latency(trace: Path, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(LatencyProfile.of("here", LinearLatency(0.05, 5e-5)).to_json())
    limits = ["--max-sequences", "1", "--routing", "round_robin"]
    assert report(trace, "--profile", str(path), *limits, *IN_TIME).replicas == 4


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([*ONE_EACH, "--slo", "ttft=1"], "--slo: unknown name 'ttft'; known: name, ttft_ms"),
        ([*ONE_EACH, "--slo", "ttft_ms"], "'ttft_ms' is not of the form name=value"),
        ([*ONE_EACH, "--slo", "ttft_ms=1,ttft_ms=2"], "--slo: ttft_ms is given twice"),
        ([*ONE_EACH, "--slo", "ttft_ms=soon"], "ttft_ms: Input should be a valid number"),
        ([*ONE_EACH, "--slo", "ttft_ms=-5"], "greater than or equal to 0.001"),
        ([*ONE_EACH, "--slo", "ttft_ms=nan"], "ttft_ms: Input should be"),
        ([*ONE_EACH, "--slo", "ttft_ms=5,priority=11"], "less than or equal to 10"),
        ([*ONE_EACH, "--slo", "ttft_ms=5,share=0"], "share must be above 0"),
        ([*ONE_EACH, "--slo", "ttft_ms=5,share=nan"], "share must be a number from 0 to 1e+06"),
        ([*ONE_EACH, "--slo", "ttft_ms=5,name=a b"], "class names must match"),
        ([*ONE_EACH, "--slo", "name=a,ttft_ms=5", "--slo", "name=a"], "given twice: a"),
        ([*ONE_EACH, "--slo", "priority=2"], "no class states an objective"),
        ([*ONE_EACH, *["--slo", "ttft_ms=5"] * 17], "at most 16 classes, got 17"),
        ([*ONE_EACH, *IN_TIME, "--share", "standard=1"], "with --slo say share=... in it"),
        ([*ONE_EACH, "--share", "gold=1"], "known: interactive, standard, batch"),
        ([*ONE_EACH, "--share", "batch=1", "--share", "batch=2"], "given twice: batch"),
        ([*IN_TIME], "no latency is known: give --profile FILE"),
        ([*IN_TIME, "--latency", "a=0.1"], "must be given; wrong or missing: b"),
        ([*IN_TIME, "--latency", "a=0,b=0"], "at least one coefficient above 0"),
        ([*IN_TIME, "--latency", "a=-1,b=0"], "a must be a number from 0 to 1000, got '-1'"),
        ([*IN_TIME, "--latency", "a=1,b=1,k1=1"], "wrong or missing: k1"),
        ([*IN_TIME, "--latency", "family=cubic,a=1"], "unknown family 'cubic'; known: linear"),
        ([*ONE_EACH, *IN_TIME, "--max-batch-tokens", "8"], "must be at least one block"),
        ([*ONE_EACH, *IN_TIME, "--target", "1.5"], "1.5 is not in the range"),
        ([*ONE_EACH, *IN_TIME, "--target", "0"], "0 is not in the range"),
        ([*ONE_EACH, *IN_TIME, "--policy", "best"], "'best' is not one of"),
        ([*ONE_EACH, *IN_TIME, "--requests", "1000000"], "not in the range"),
        ([*ONE_EACH, *IN_TIME, "--rate-scale", "0.001"], "leaves no request of the trace"),
        ([*ONE_EACH, *IN_TIME, "--rate-scale", "nan"], "'--rate-scale': 'nan' is not a number"),
        ([*ONE_EACH, *IN_TIME, "--time-limit", "nan"], "'--time-limit': 'nan' is not a number"),
        ([*ONE_EACH, *IN_TIME, "--stretch", "inf"], "inf is not in the range"),
        ([*ONE_EACH, *IN_TIME, "--config", "missing.yaml"], "missing.yaml"),
        ([*APART, "--max-replicas", "1"], "--disaggregated needs --max-replicas of at least 2"),
        ([*APART, "--transfer-rate", "0"], "0 is not in the range"),
    ],
)
def test_wrong_options_are_refused_by_name(trace: Path, arguments: list[str], says: str) -> None:
    result = simulate(trace, *arguments)
    assert result.exit_code in (1, 2), result.output
    assert says in " ".join(result.stderr.split())


def test_other_files_are_refused(trace: Path, tmp_path: Path) -> None:
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    assert "has the columns" in simulate(path, *ONE_EACH, *IN_TIME).stderr
    path.write_text("{}")
    result = simulate(trace, *IN_TIME, "--profile", str(path))
    assert result.exit_code == 1
    assert "other.csv: not a latency profile" in result.stderr
    twice = simulate(trace, *ONE_EACH, *IN_TIME, "--profile", str(path))
    assert "give --profile or --latency, not both" in twice.stderr


def test_one_count_is_measured_on_windows_of_the_trace(trace: Path) -> None:
    sampled = ["--windows", "2", "1.2", "--margin-s", "0.2", *IN_TIME]
    four = report(trace, *ONE_EACH, *sampled, "--replicas", "4")
    assert (four.status, four.replicas, four.searched) == ("reached", 4, False)
    assert [point.replicas for point in four.points] == [4]
    assert four.points[0].requests.mean == pytest.approx(80, abs=3)
    assert "2 windows of 1.2 s with margins of 0.2 s" in four.traffic["description"]
    assert four.answer().endswith("with 4 replicas: the target of 95.00% is reached.")
    three = simulate(trace, *ONE_EACH, *sampled, "--replicas", "3")
    assert three.exit_code == NO_ANSWER
    assert "with 3 replicas: the target of 95.00% is not reached." in three.stdout
