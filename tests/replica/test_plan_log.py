"""Plans that an engine logged are planned again."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from sluice.deploy.cli import main
from sluice.replica.scheduler.plan_log import read_plans
from tests.replica.test_simulated_engine import collect, completion, running

TIGHT = {"max_batch_tokens": 64, "max_sequences": 8}


async def log_of(folder: Path, policy: str) -> Path:
    """The log of an engine that served more than fits into one batch."""
    async with running(batch_log=folder, policy=policy, simulated=TIGHT) as engine:
        sent = [
            completion(f"r{number}", prompt="word " * (5 + 7 * number), max_tokens=3 + number)
            for number in range(12)
        ]
        await asyncio.gather(*(collect(engine, each) for each in sent))
    return folder / "replica-1.jsonl"


@pytest.mark.parametrize("policy", ["deadline_triage", "s_edf", "slos_serve", "annealing"])
async def test_the_policy_of_a_log_plans_the_same_and_another_policy_is_compared(
    tmp_path: Path, policy: str
) -> None:
    log = await log_of(tmp_path, policy)
    said = CliRunner().invoke(main, ["bench", "replay", str(log), "--policy", "fcfs", "--json"])
    assert said.exit_code == 0, said.output
    own, other = json.loads(said.stdout)
    assert (own["policy"], own["same"], own["first_other"]) == ("as logged", 1.0, None)
    assert own["plans"] == len(list(read_plans(log))) > 10
    assert (other["policy"], other["plans"]) == ("fcfs", own["plans"])


def test_a_log_without_plans_says_so(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text('{"ran": []}\n')
    said = CliRunner().invoke(main, ["bench", "replay", str(path)])
    assert said.exit_code == 1 and "has no plans" in said.stderr


async def test_a_log_is_read_up_to_a_line_that_is_not_whole(tmp_path: Path) -> None:
    log = await log_of(tmp_path, "fcfs")
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines[:3]) + lines[3][:100])
    plans = list(read_plans(log))
    assert [each.policy is not None for each in plans] == [True, False, False]
    assert plans[0].queue.table.shape[0] == len(plans[0].record["queue"])


@pytest.mark.parametrize("line", ['{"rows": "AAAA"}', "no JSON", "7"])
def test_what_is_no_log_is_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "log"
    path.write_text(line + "\n")
    said = CliRunner().invoke(main, ["bench", "replay", str(path)])
    assert said.exit_code == 1
    assert f"{path}:1 is no record of a batch" in said.stderr
