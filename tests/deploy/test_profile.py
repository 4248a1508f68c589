from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from sluice.deploy.cli import main
from sluice.deploy.commands.options import Exit
from sluice.replica.profiling import profile_path
from sluice.scheduling.latency.profile import LatencyProfile
from tests.documents import newcomer

BIN = Path(sys.executable).parent

TRUTH = {"step_s": 0.003, "token_s": 0.00005, "context_token_s": 2e-7, "quadratic_s": 3e-9}


def profile(config: object, directory: Path, *flags: str) -> Result:
    path = directory / "sluice.yaml"
    path.write_text(yaml.safe_dump({"engine": config}))
    return CliRunner().invoke(main, ["profile", "--config", str(path), *flags])


def test_the_truth_of_a_simulated_engine_is_recovered(tmp_path: Path) -> None:
    engine = {"kind": "simulated", "simulated": TRUTH}
    out, plot = tmp_path / "profile.json", tmp_path / "profile.png"
    flags = ("--rounds", "1", "--out", str(out), "--plot", str(plot), "--json")
    result = profile(engine, tmp_path, *flags)
    assert result.exit_code == Exit.OK, result.output
    report = json.loads(result.stdout)
    assert list(report["coefficients"].values()) == pytest.approx(list(TRUTH.values()), rel=1e-3)
    for errors in (report["in_sample"], report["out_of_sample"]):
        assert set(errors) == {"all", "prefill", "decode", "mixed"}
        assert all(entry["mape"] < 0.001 and entry["steps"] >= 8 for entry in errors.values())
    others = report["out_of_sample_mape_of_others"]
    assert others.keys() == {"prefill_decode", "roofline", "without_context", "start"}
    assert others["without_context"] > 0.01
    assert report["kept"] == str(out)
    assert plot.read_bytes().startswith(b"\x89PNG")
    # The file is one that an engine's configuration takes.
    kept = LatencyProfile.from_json(out.read_text())
    assert kept.model.coefficients == tuple(report["coefficients"].values())
    flags = ("--rounds", "1", "--family", "roofline")
    again = profile({**engine, "latency_profile": str(out)}, tmp_path, *flags)
    assert again.exit_code == Exit.OK, again.output
    assert "roofline" in again.stdout and "unseen, mixed" in again.stdout
    assert "Not kept" in again.stdout, "nobody would look for the profile of a simulated engine"


@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        (("--plot", "figure.gif"), Exit.USAGE, ".png"),
        (("--out", "/no/such/folder/profile.json"), Exit.FAILED, "/no/such/folder"),
        (("--rounds", "0"), Exit.USAGE, "1<=x<=100"),
        (("--policy", "best"), Exit.FAILED, "deadline_triage"),
    ],
)
def test_mistakes_are_told_before_anything_starts(
    flags: tuple[str, ...], code: Exit, says: str, tmp_path: Path
) -> None:
    result = profile({"kind": "simulated"}, tmp_path, *flags)
    assert result.exit_code == code
    assert says in result.stderr and "measuring" not in result.stderr


def test_one_of_several_models_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "sluice.yaml"
    slow = {"engine": {"kind": "simulated", "simulated": {**TRUTH, "step_s": 0.5}}}
    fast = {"engine": {"kind": "simulated", "simulated": TRUTH}}
    path.write_text(yaml.safe_dump({"models": {"fast": fast, "slow": slow}}))
    arguments = ["profile", "--config", str(path), "--rounds", "1", "--json"]
    chosen = CliRunner().invoke(main, [*arguments, "--served", "slow"])
    assert chosen.exit_code == Exit.OK, chosen.output
    assert json.loads(chosen.stdout)["coefficients"]["a"] == pytest.approx(0.5, rel=1e-3)
    for flags in ([], ["--served", "none"]):
        open_question = CliRunner().invoke(main, [*arguments, *flags])
        assert open_question.exit_code == Exit.USAGE
        assert "fast, slow" in open_question.stderr


@pytest.mark.release
@pytest.mark.vllm
def test_a_real_engine_is_measured_and_its_replicas_find_the_profile(tmp_path: Path) -> None:
    engine = {
        "cache_dir": str(tmp_path),
        "vllm_args": {"max-model-len": 512, "max-num-batched-tokens": 128, "max-num-seqs": 16},
    }
    path = tmp_path / "sluice.yaml"
    path.write_text(yaml.safe_dump({"engine": engine}))
    # As a program of its own: the engine's process imports the program that starts it.
    done = subprocess.run(
        [BIN / "sluice", "profile", "--config", str(path), "--rounds", "1", "--json"],
        env=newcomer(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == Exit.OK, done.stderr
    report = json.loads(done.stdout)
    assert report["out_of_sample"]["all"]["steps"] > 50
    assert all(value >= 0 for value in report["coefficients"].values())
    kept = LatencyProfile.from_json(Path(report["kept"]).read_text())
    # Under the name that a replica of this configuration looks for.
    assert Path(report["kept"]) == profile_path(tmp_path, kept.key)
    key = json.loads(kept.key)
    assert (key["batch_tokens"], key["dtype"]) == (128, "torch.float32")
    assert kept.model.coefficients == tuple(report["coefficients"].values())
