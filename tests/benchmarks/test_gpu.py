"""``sluice bench gpu``: without a GPU, parts that fail, its rows, and real parts on a CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from sluice.benchmarks.live import gpu
from sluice.benchmarks.live.gpu import PARTS, Part
from sluice.benchmarks.live.gpu_parts import Given
from sluice.benchmarks.live.peers import Records
from sluice.deploy.cli import main
from sluice.replica.vllm.local_model import TINY, shaped_model
from tests.benchmarks.test_peers import run, seen

pytestmark = pytest.mark.vllm


def measure(*options: str) -> Result:
    return CliRunner().invoke(main, ["bench", "gpu", *options])


def test_without_a_gpu_it_says_so_and_exits_with_3(tmp_path: Path) -> None:
    result = measure("--out", str(tmp_path / "out"))
    assert result.exit_code == 3
    assert "vLLM finds no GPU here" in result.stderr and "--device cpu" in result.stderr
    assert not (tmp_path / "out").exists()


def python(*lines: str) -> Any:
    return lambda given: [sys.executable, "-c", "\n".join(lines)]


def test_a_part_that_fails_or_takes_too_long_is_reported_and_the_others_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dies = python("print('[')", "raise ValueError('no room for KV')")
    hangs = python("import threading", "threading.Event().wait()")
    works = python("import json", "print(json.dumps({'requests': 2, 'ratio': [1.5, 0.25]}))")
    monkeypatch.setitem(PARTS, "profile", Part("one", 60.0, dies))
    monkeypatch.setitem(PARTS, "preemption", Part("two", 0.2, hangs))
    monkeypatch.setitem(PARTS, "steps", Part("three", 60.0, works))
    names = [f"--part={name}" for name in ("steps", "profile", "preemption")]
    result = measure("--device=cpu", "--model=/a/model", "--out", str(tmp_path), "--json", *names)
    assert result.exit_code == 1
    assert "parts that failed: profile, preemption" in result.stderr
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found == json.loads(result.stdout)
    by_part = {row.pop("part"): row for row in found["rows"]}
    assert by_part["profile"]["failed"] == "ValueError: no room for KV"
    assert by_part["preemption"]["failed"] == "not done after 0.2 s"
    assert by_part["steps"]["rows"] == [{"requests": 2, "ratio": [1.5, 0.25]}]
    assert set(by_part) == {"profile", "preemption", "steps"}
    assert '"max-model-len": 8192' in found["setting"]


def test_what_was_measured_is_written_at_once_and_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = f"open({str(tmp_path / 'count')!r}, 'a').write('.')"
    row = python(count, "print('{\"requests\": 2}')")
    cut = python("print('{\"n\": 1}\\n{', end='', flush=True)", "raise ValueError('no more')")
    monkeypatch.setitem(PARTS, "steps", Part("one", 60.0, row))
    monkeypatch.setitem(PARTS, "preemption", Part("two", 60.0, cut))
    options = ("--device=cpu", "--model=/a/model", "--out", str(tmp_path / "out"), "--json")
    options += ("--part=steps", "--part=preemption")
    assert measure(*options).exit_code == 1
    found = {
        row["part"]: row for row in json.loads((tmp_path / "out" / "gpu.json").read_text())["rows"]
    }
    assert found["steps"]["rows"] == [{"requests": 2}]
    assert found["preemption"]["failed"] == "ValueError: no more"
    assert found["preemption"]["rows"] == [{"n": 1}]
    monkeypatch.setitem(PARTS, "preemption", Part("two", 60.0, python("print('{\"n\": 2}')")))
    result = measure(*options, "--resume")
    assert result.exit_code == 0, result.stderr
    rows = {row["part"]: row["rows"] for row in json.loads(result.stdout)["rows"]}
    assert rows == {"steps": [{"requests": 2}], "preemption": [{"n": 2}]}
    assert (tmp_path / "count").read_text() == "."
    other = measure(*options, "--resume", "--seconds=7")
    assert "has results of other options" in other.stderr


def test_no_part_begins_when_the_budget_is_used_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "_MIN_PART_S", 61.0)
    monkeypatch.setitem(PARTS, "steps", Part("one", 60.0, python("raise SystemExit(5)")))
    options = ("--device=cpu", "--model=/a/model", "--out", str(tmp_path), "--part=steps")
    result = measure(*options, "--budget-seconds=60")
    assert result.exit_code == 1
    (row,) = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    assert row["failed"] == "not begun: the budget is used up"


def test_each_run_of_the_load_is_a_row(tmp_path: Path) -> None:
    records = Records.at(tmp_path / "load")
    records.keep({"capacities": {"bursty": 8.0}})
    for load in (0.5, 1.5):
        for name in ("stock", "sluice"):
            records.keep(run(name, 0, seen(), load))
    warm_up = run("sluice", 0, seen())
    records.keep(warm_up._replace(labels={**warm_up.labels, "warm_up": True}))
    given = Given("/a/model", {}, 1, 20.0, str(tmp_path))
    rows = PARTS["load"].rows(given, tmp_path / "load.json")
    assert [(row["requests/s"], row["load"], row["system"]) for row in rows] == [
        *((4.0, "0.5", "stock"), (4.0, "0.5", "sluice")),
        *((12.0, "1.5", "stock"), (12.0, "1.5", "sluice")),
        (8.0, "1, after the start", "sluice"),
    ]
    assert {row["attained"] for row in rows} == {0.4}


def test_each_token_of_a_model_without_weights_is_text(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    model = shaped_model(tmp_path, TINY)
    config, tokenizer = AutoConfig.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    assert {name: getattr(config, name) for name in TINY} == TINY
    assert tokenizer.decode([2048, TINY["vocab_size"] - 1]) == "<2048><4095>"
    assert len(tokenizer) == TINY["vocab_size"]
    assert max(tokenizer.encode("Please write a short story <4000>.")) < 2048
    assert not list(model.glob("*.safetensors"))


@pytest.mark.release
def test_steps_are_measured_on_vllms_cpu_build_and_what_it_lacks_is_reported(
    tmp_path: Path,
) -> None:
    result = measure("--device=cpu", "--part=steps", "--part=async", "--out", str(tmp_path))
    found = {row["part"]: row for row in json.loads((tmp_path / "gpu.json").read_text())["rows"]}
    assert result.exit_code == 1
    assert found["async"]["failed"].endswith("vLLM has turned asynchronous scheduling off")
    (row,) = found["steps"]["rows"]
    assert row["stock steps/s"] > 0 and row["sluice steps/s"] > 0
