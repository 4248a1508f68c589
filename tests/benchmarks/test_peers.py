"""Sluice beside its peers: the load, the systems, the judge, the report, and the whole command on
servers that answer at once."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from click.testing import CliRunner, Result

from sluice.benchmarks.experiments.kinds import KINDS, generated
from sluice.benchmarks.live import mix
from sluice.benchmarks.live import peers as peers_module
from sluice.benchmarks.live.client import End, LoadError, Outcome
from sluice.benchmarks.live.mix import (
    GENERATED,
    LONGEST,
    Pattern,
    body_of,
    classes_of,
    kind_of,
    published,
    recorded,
)
from sluice.benchmarks.live.peers import (
    CELL,
    DECISIONS,
    DEFAULT,
    SYSTEMS,
    Peer,
    Setting,
    sluice_config,
    tables,
)
from sluice.benchmarks.live.report import CORES, Run, Usage, Used, figures, summary
from sluice.benchmarks.live.systems import Bench, LeftOutError, Start, System
from sluice.deploy.cli import main
from sluice.deploy.config import SluiceConfig
from sluice.scheduling.request.objective import SLO
from sluice.simulation.traces import TraceError
from sluice.simulation.workload import Arrival, Workload

IDLE = {"chat": (0.1, 0.01), "code": (0.4, 0.01), "document": (0.8, 0.01)}
SLOS = {name: each.objective(name) for name, each in classes_of(IDLE).items()}


# The load.


@pytest.mark.parametrize(("name", "variation"), [("poisson", 1.0), ("bursty", 2.0)])
def test_generated_arrivals_have_their_rate_their_bursts_and_their_classes(
    name: str, variation: float
) -> None:
    load = GENERATED[name].workload(20.0, 400.0, 1, SLOS)
    assert len(load) / 400.0 == pytest.approx(20.0, rel=0.1)
    gaps_s = np.diff([each.arrival_s for each in load.arrivals])
    assert np.std(gaps_s) / np.mean(gaps_s) == pytest.approx(variation, rel=0.1)
    shares = Counter(each.slo.service_class for each in load.arrivals)
    for kind, entry in KINDS.items():
        assert shares[kind] / len(load) == pytest.approx(entry.share, abs=0.03)
    assert all(SLOS[each.slo.service_class] == each.slo for each in load.arrivals)
    assert GENERATED[name].workload(20.0, 400.0, 1, SLOS) == load


TRACE = Workload(
    "trace", tuple(Arrival(number / 4, 100 + number % 4_000, 10, SLO()) for number in range(8_000))
)


@pytest.mark.parametrize("rate", [1.0, 10.0])
def test_recorded_arrivals_are_thinned_or_compressed_to_the_rate(rate: float) -> None:
    load = Pattern("trace", trace=TRACE).workload(rate, 300.0, 1, SLOS)
    assert len(load) / 300.0 == pytest.approx(rate, rel=0.15)
    assert ("thinned" if rate < 4 else "stretched by 0.4") in load.scaling
    assert all(each.slo.service_class == kind_of(each.prompt_tokens) for each in load.arrivals)


def test_for_the_capacity_recorded_requests_repeat_in_their_order_from_any_place() -> None:
    drawn = list(islice(Pattern("trace", trace=TRACE).drawn(1), len(TRACE) + 1))
    assert drawn[0] == drawn[-1] and set(drawn) == set(TRACE.arrivals)


def test_a_recorded_request_is_of_the_first_kind_with_prompts_as_long() -> None:
    assert [kind_of(tokens) for tokens in (1, 640, 641, 2_048, 2_049, 8_000)] == [
        *("chat", "chat", "code", "code", "document", "document")
    ]


def test_a_run_without_requests_is_refused() -> None:
    with pytest.raises(LoadError, match=r"bursty: no request arrives in 2 s at 0\.001 requests/s"):
        GENERATED["bursty"].workload(0.001, 2.0, 1, SLOS)


def test_traces_of_a_folder_are_patterns_without_their_longest_requests(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"has no \.csv or \.jsonl file"):
        recorded(tmp_path, 8_192)
    rows = "".join(f"2023-11-16 18:00:{number:02}.0,{100 * number},7\n" for number in range(1, 50))
    (tmp_path / "azure.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    found = recorded(tmp_path, 4_000)["azure"].trace
    assert found is not None and len(found) == 39
    assert "Left out 10 over 4000 tokens" in found.description
    with pytest.raises(TraceError, match="no two requests of at most 50 tokens"):
        recorded(tmp_path, 50)


def test_objectives_are_multiples_of_the_idle_times() -> None:
    chat, code, document = classes_of(IDLE, scale=2.0).values()
    assert (chat.ttft_ms, chat.tpot_ms) == (1_000.0, 100.0)
    assert (code.ttft_ms, code.tpot_ms) == (4_000.0, 200.0)
    assert (document.ttft_ms, document.tpot_ms) == (16_000.0, 200.0)


def test_a_published_mix_is_a_pattern_with_its_classes_that_fit_the_context() -> None:
    pattern = published("llm-d-planner", 8_192)
    assert pattern.trace is not None and "over 8192 tokens" in pattern.trace.description
    assert "research" not in pattern.kinds and pattern.kinds["chatbot"].output_tokens == (256, 256)
    idle = dict.fromkeys(pattern.kinds, (0.1, 0.01))
    slos = {name: each.objective(name) for name, each in pattern.classes(idle, 1.0).items()}
    load = pattern.workload(5.0, 400.0, 1, slos)
    assert len(load) / 400.0 == pytest.approx(5.0, rel=0.1)
    # An idle engine meets all of them, so they are as published.
    assert {each.slo for each in load.arrivals} == {each.slo for each in pattern.trace.arrivals}


def test_on_a_slow_engine_published_objectives_keep_their_ratios() -> None:
    pattern = published("llm-d-planner", 8_192)
    idle = dict.fromkeys(pattern.kinds, (0.25, 0.01))
    found = pattern.classes(idle, 2.0)
    # 125 ms is the tightest TTFT, which takes the idle engine twice as long; TPOT it meets.
    assert found["code-completion"].ttft_ms == 2 * 5 * 250
    assert found["chatbot"].ttft_ms == pytest.approx(2 * 5 * 250 * 300 / 125)
    assert (found["chatbot"].tpot_ms, found["code-completion"].tpot_ms) == (65, 45)
    body = body_of("a", priorities=True)
    ranks = [
        body("m", 1, Arrival(0.0, 9, 9, SLO(service_class=name)))["priority"]
        for name in ("code-completion", "chatbot", "document-rag")
    ]
    assert ranks == sorted(ranks)


def test_prompts_have_their_lengths_and_share_their_blocks_within_a_run_alone() -> None:
    chat = Arrival(0.0, 160, 9, SLOS["chat"], "chat", (3,))
    one, other, again = (
        body_of(run, 128)("m", number, chat)["prompt"].split()
        for run, number in (("a", 1), ("a", 2), ("b", 1))
    )
    assert [len(words) for words in (one, other, again)] == [160] * 3
    assert one[:128] == other[:128] and one[128:] != other[128:]
    assert one[:16] != again[:16]
    # The last block of a recorded prompt is not full.
    assert len(body_of("a", 512)("m", 1, chat)["prompt"].split()) == 160
    assert "priority" not in body_of("a", 128)("m", 1, chat)
    assert body_of("a", 128, priorities=True)("m", 1, chat)["priority"] == 0
    late = chat._replace(slo=SLOS["document"])
    assert body_of("a", 128, priorities=True)("m", 1, late)["priority"] == 2


def test_the_longest_request_is_the_least_context() -> None:
    lengths = [each.prompt_tokens + each.output_tokens for each in islice(generated(1), 2_000)]
    assert 0.95 * LONGEST < max(lengths) <= LONGEST


# The systems.


SETTING = Setting("/a/model", {"max-model-len": 8192}, 2, 0, classes_of(IDLE))


def test_a_server_alone_has_a_reference_of_its_own() -> None:
    assert {name for name, peer in SYSTEMS.items() if peer.reference != DEFAULT[0]} == {
        *("stock", "stock-short-batches"),
    }
    assert {peer.reference for peer in SYSTEMS.values()} <= set(SYSTEMS)


@pytest.mark.parametrize("name", [name for name in SYSTEMS if name.startswith("sluice")])
@pytest.mark.parametrize("gpus", [0, 1])
def test_every_sluice_has_a_valid_configuration_with_the_objectives(name: str, gpus: int) -> None:
    start: Any = SYSTEMS[name].start
    config = SluiceConfig.model_validate(
        sluice_config(*start.args, SETTING._replace(gpus=gpus), 8_000)
    )
    assert config.router.classes["chat"].ttft_ms == 500.0
    assert config.engine.vllm_args == SETTING.args
    assert config.replica.num_gpus == (0.5 if gpus else None)
    alone = sluice_config(*start.args, SETTING._replace(classes={}), 8_000)
    SluiceConfig.model_validate(alone)  # the idle times can be measured on it, too


def test_engines_have_gpus_of_their_own_or_share_one() -> None:
    pairs = SETTING._replace(gpus=4, args={"tensor-parallel-size": 2})
    assert pairs.gpus_each == 2.0
    assert [pairs.devices(number) for number in (0, 1)] == ["0,1", "2,3"]
    shared = SETTING._replace(gpus=1)
    assert shared.gpus_each == 0.5
    assert [shared.devices(number) for number in (0, 1)] == ["0", "0"]


# The judge and the report.


def outcome(name: str, end: End, ttft_s: float, tpot_s: float, tokens: int, **more: Any) -> Outcome:
    seen = Outcome(SLOS[name], 100, tokens, 1.0, 0.002, end, "", 4.0, **more)
    if end is End.ANSWERED:
        seen.ttft_s, seen.tpot_s = ttft_s, tpot_s
    return seen


def seen() -> list[Outcome]:
    """Objectives: chat 0.5 s and 50 ms, document 8 s and 100 ms."""
    return [
        outcome("chat", End.ANSWERED, 0.5, 0.05, 20, admission="guaranteed"),
        outcome("chat", End.ANSWERED, 0.6, 0.01, 30, admission="guaranteed"),
        outcome("chat", End.ANSWERED, 0.1, 0.06, 40),
        outcome("chat", End.REFUSED, 0.0, 0.0, 50),
        outcome("document", End.ANSWERED, 7.0, 0.01, 60),
    ]


def run(system: str, number: int, outcomes: list[Outcome], load: float = 1.0) -> Run:
    labels = {"pattern": "bursty", "load": load, "system": system, "round": number}
    used = {CORES: Used(0.5, 900.0, 5.0), "Ray": Used(0.1, 100.0, 1.0)}
    return Run(labels, 10.0, outcomes, Usage(used, 0.5))


def test_every_system_is_judged_alike_and_a_refusal_has_missed_all_objectives() -> None:
    found = figures([run("sluice", 0, seen())])
    assert (found["sent"], found["refused"], found["attained"]) == (5, 1, 0.4)
    assert found["objectives"] == {"ttft": 0.6, "tpot": 0.6}
    assert found["classes"] == {"chat": 0.25, "document": 1.0}
    assert (found["guaranteed"], found["kept"]) == (2, 0.5)
    # In 10 s of arrivals.
    assert (found["goodput"], found["goodput_tokens"], found["tokens"]) == (0.2, 8.0, 15.0)
    assert found["ttft_ms"][0] == 550.0 and len(found["ttft_ms"]) == 3
    assert (found["cpu_s"], found["engine_cpu_s"], found["busy"]) == (6.0, 5.0, 0.5)
    assert found["late_ms"] == [2.0, 2.0, 2.0]


def test_a_run_without_answers_has_figures() -> None:
    found = figures([run("sluice", 0, [outcome("chat", End.REFUSED, 0.0, 0.0, 1)])])
    assert (found["attained"], found["goodput"], found["tokens"]) == (0.0, 0.0, 0.0)
    assert found["ttft_ms"] is None and found["kept"] is None


def test_rounds_are_summed_up_with_the_range_of_their_mean() -> None:
    good = [outcome("chat", End.ANSWERED, 0.1, 0.01, 20)]
    bad = [outcome("chat", End.ANSWERED, 0.1, 0.06, 20)]
    rows = summary(
        [run("a", 0, good), run("b", 0, good), run("b", 1, good), run("a", 1, bad)], *CELL
    )
    assert [(row["system"], row["rounds"], row["attained"]) for row in rows] == [
        ("a", 2, 0.5),
        ("b", 2, 1.0),
    ]
    # Student's t with one degree of freedom: 12.706 times the standard error, which is 0.5.
    assert rows[0]["range"]["attained"] == pytest.approx(6.353)
    assert rows[1]["range"]["attained"] == 0.0 and rows[1]["range"]["kept"] is None
    (alone,) = summary([run("a", 0, good)], *CELL)
    assert alone["range"]["attained"] is None
    assert [each.row_count for each in tables(rows)] == [2, 2, 2]
    assert json.loads(json.dumps(rows)) == rows


# The command.


def words_of(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    base = {"id": "x", "object": "text_completion"}
    for number in range(body["max_tokens"]):
        reason = "length" if number == body["max_tokens"] - 1 else None
        yield {**base, "choices": [{"index": 0, "text": " word", "finish_reason": reason}]}
    yield {**base, "choices": [], "usage": {"completion_tokens": body["max_tokens"]}}


@contextmanager
def at_once(asked: list[dict[str, Any]]) -> Iterator[str]:
    """URL of a server that answers completions at once, and notes them in ``asked``; and that has
    two metrics."""

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text="sluice_engine_steps_total 3\nsluice_requests_total 4\n")

    async def complete(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        asked.append(body)
        response = web.StreamResponse()
        await response.prepare(request)
        for event in words_of(body):
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    async def serve() -> None:
        app = web.Application()
        app.router.add_post("/v1/completions", complete)
        app.router.add_get("/metrics", metrics)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        where.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        ready.set()
        await stop.wait()
        await runner.cleanup()

    loop, where, ready, stop = asyncio.new_event_loop(), list[str](), threading.Event(), None
    stop = asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(60)
    try:
        yield where[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


def measure(*options: str) -> Result:
    return CliRunner().invoke(main, ["bench", "peers", *options])


@pytest.mark.vllm  # it is there that torch has been imported, whose version is reported
def test_the_command_measures_what_starts_in_alternating_order_and_names_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []

    def peer(name: str, url: str, priorities: bool = False) -> Peer:
        @contextmanager
        def start(_: Bench) -> Iterator[System]:
            started.append(name)
            if name == "absent":
                raise LeftOutError("it is not here")
            yield System((url,), {})

        return Peer(name, lambda setting: start, priorities)

    monkeypatch.setattr(peers_module, "WARM_UP_S", 0.2)
    monkeypatch.setattr(peers_module, "CAPACITY_S", 0.2)
    # Servers that answer at once have no times and no capacity of their own.
    monkeypatch.setattr(mix, "alone", lambda url, model, kinds: IDLE)
    drawn: list[Arrival] = []

    def capacity(_: Bench, __: System, arrivals: Iterator[Arrival], *___: Any) -> float:
        drawn.append(next(arrivals))
        return 8.0

    monkeypatch.setattr(peers_module, "capacity", capacity)
    asked: list[dict[str, Any]] = []
    with at_once(asked) as url:
        for name in ("stock-round-robin", "stock-priority", "serve-llm", "sluice"):
            shown = "absent" if name == "serve-llm" else name
            monkeypatch.setitem(SYSTEMS, name, peer(shown, url, name == "stock-priority"))
        result = measure(
            *(f"--system={name}" for name in ("serve-llm", "stock-priority", "sluice")),
            *("--load=2", "--load=4", "--seconds=0.5", "--rounds=2", "--pattern=poisson"),
            *("--model", str(tmp_path), "--slo-scale=100", "--in-flight=1"),
            "--json",
        )
    assert result.exit_code == 0, result.output
    assert started == ["stock-round-robin", *("absent", "stock-priority", "sluice"), *started[4:]]
    assert [each.slo for each in drawn] == [SLO()]  # of no class: none is configured yet
    assert started[4:] == ["sluice", "stock-priority"]
    found = json.loads(result.stdout)
    assert found["left_out"] == {"serve-llm": "it is not here"}
    assert (found["measured_on"], found["load_1"]) == ("stock-round-robin", {"poisson": 8.0})
    assert [(row["load"], row["system"], row["rounds"]) for row in found["summary"]] == [
        (load, name, 2) for load in (2.0, 4.0) for name in ("stock-priority", "sluice")
    ]
    for row in found["summary"]:
        assert row["answered"] == row["sent"] > 0
    kept = [(row["system"], row.get("engine")) for row in found["runs"] if row["round"] == 0]
    own = {"sluice_engine_steps_total": 3.0}
    assert kept == [*[("stock-priority", None)] * 2, *[("sluice", own)] * 2]
    sent = [row["sent"] for row in found["summary"]]
    assert sent[:2] == [sent[0]] * 2 and sent[2:] == [sent[2]] * 2  # the same for all systems
    assert {None, 0} < {body.get("priority") for body in asked} <= {None, 0, 1, 2}


@pytest.mark.vllm
def test_runs_that_were_recorded_are_not_repeated_and_their_reference_starts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    dies = True

    def peer(name: str) -> Peer:
        def of(setting: Setting) -> Start:
            @contextmanager
            def start(_: Bench) -> Iterator[System]:
                started.append(name)
                assert setting.record is not None
                (setting.record / "engine.jsonl").write_text("{}\n")
                (setting.record / DECISIONS / "d.jsonl").write_text("{}\n")
                yield System((url,), {})

            return start

        return Peer(name, of, reference="stock")

    def metrics(_: str) -> dict[str, float]:
        if dies:
            raise KeyboardInterrupt
        return {}

    monkeypatch.setattr(peers_module, "WARM_UP_S", 0.5)
    monkeypatch.setattr(peers_module, "metrics", metrics)
    idle = (0.1, 0.01)
    monkeypatch.setattr(mix, "alone", lambda *asked: dict.fromkeys(asked[2], idle))
    monkeypatch.setattr(peers_module, "capacity", lambda *_: 8.0)
    for name in ("stock", "sluice"):
        monkeypatch.setitem(SYSTEMS, name, peer(name))
    folder = tmp_path / "runs"
    options = ("--system=sluice", "--system=stock", "--load=2", "--load=4", "--seconds=1")
    options += ("--rounds=1", "--pattern=fairbatching-burstgpt", "--model", str(tmp_path), "--json")
    options += ("--record", str(folder))
    with at_once([]) as url:
        # It ends after Sluice's first run, before that is kept.
        assert measure(*options).exit_code != 0
        assert started == ["stock", "sluice"]  # stock is measured where the capacity was
        assert "has runs" in measure(*options).stderr
        with (folder / "runs.jsonl").open("a") as file:
            file.write('[{"pattern": ')  # it was killed while it wrote
        dies = False
        result = measure(*options, "--resume")
        assert result.exit_code == 0, result.output
        assert started == ["stock", "sluice", "sluice"]
        other = measure(*options, "--resume", "--seed=9")
        assert "was recorded with seed 1, not 9" in other.stderr
    found = json.loads(result.stdout)
    assert found["objectives_ms"] == {"burstgpt": {"ttft": 500, "tpot": 50}}
    pairs = [(row["load"], row["system"]) for row in found["summary"]]
    assert pairs == [(load, name) for load in (2.0, 4.0) for name in ("stock", "sluice")]
    assert all(row["answered"] == row["sent"] > 0 for row in found["summary"])
    assert [row["system"] for row in found["warm_ups"]] == ["stock", "sluice", "sluice"]
    assert {path.name for path in folder.iterdir()} == {
        *("runs.jsonl", "stock-1", "sluice-1", "sluice-2")
    }
    assert (folder / "stock-1" / "engine.jsonl.gz").exists()
    assert (folder / "stock-1" / DECISIONS / "d.jsonl.gz").exists()


def test_without_any_system_there_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def start(_: Bench) -> Iterator[System]:
        raise LeftOutError("cannot install it")
        yield

    for name in ("stock-round-robin", "sluice"):
        monkeypatch.setitem(SYSTEMS, name, Peer(name, lambda setting: start))
    result = measure("--system", "sluice", "--model", str(tmp_path))
    assert result.exit_code == 1
    assert "no system could be started" in result.stderr and "cannot install it" in result.stderr


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ("{", "is no JSON"),
        ("[1]", 'must be a JSON object, such as {"max-model-len": 8192}'),
        ('{"max-model-len": 2048}', f"must be at least {LONGEST} tokens"),
        ('{"max-model-len": "8k"}', f"must be at least {LONGEST} tokens"),
    ],
)
def test_engine_arguments_that_are_not_allowed_are_refused(args: str, says: str) -> None:
    result = measure("--engine-args", args)
    assert result.exit_code == 2
    assert says in result.output


# Real ones.


@pytest.mark.ray
@pytest.mark.own_ray
@pytest.mark.vllm
@pytest.mark.release
def test_real_engines_behind_a_router_and_sluice_answer_the_same_requests() -> None:
    options = ("--pattern=poisson", "--load=0.5", "--seconds=8", "--rounds=1", "--slo-scale=100")
    result = measure("--system=stock-priority", "--system=sluice", *options, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["left_out"] == {}
    stock, sluice = found["summary"]
    assert stock["answered"] == stock["sent"] == sluice["sent"] == sluice["answered"]
    assert stock["guaranteed"] == 0 < sluice["guaranteed"]
    assert 0 < stock["engine_cpu_s"] < stock["cpu_s"] and sluice["engine_cpu_s"] > 0
    assert set(DEFAULT) <= set(SYSTEMS)
