"""Published mixes: what is drawn has the published lengths, shares and objectives."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from click.testing import CliRunner

from sluice.deploy.cli import main
from sluice.simulation.mixes import MIXES, workload
from sluice.simulation.workload import Arrival, Workload

COUNT = 50_000


def drawn(name: str) -> Workload:
    return workload(name, COUNT, 1)


def lengths(arrivals: tuple[Arrival, ...]) -> tuple[list[int], list[int]]:
    return [a.prompt_tokens for a in arrivals], [a.output_tokens for a in arrivals]


@pytest.mark.parametrize(
    ("name", "prompt", "output", "ttft_s"),
    [
        ("fairbatching-burstgpt", (688, 1_599), (237, 470), 0.5),
        ("fairbatching-qwen", (892, 1_776), (377, 742), 0.5),
        ("fairbatching-azure", (1_604, 3_561), (114, 392), 2.0),
    ],
)
def test_means_and_p90_are_those_of_the_table(
    name: str, prompt: tuple[int, int], output: tuple[int, int], ttft_s: float
) -> None:
    arrivals = drawn(name).arrivals
    for own, (mean, p90) in zip(lengths(arrivals), (prompt, output), strict=True):
        assert np.mean(own) == pytest.approx(mean, rel=0.03)
        assert np.quantile(own, 0.9) == pytest.approx(p90, rel=0.03)
    assert {each.slo.columns[:2] for each in arrivals} == {(ttft_s, 0.05)}


def test_chats_are_log_normal_with_normal_outputs_within_their_bounds() -> None:
    prompts, outputs = lengths(drawn("inference-perf-chat").arrivals)
    # Clipped at 15,000, which takes a little of the mean and the deviation; not of the median.
    assert np.mean(prompts) == pytest.approx(4_000, rel=0.02)
    assert np.std(prompts) == pytest.approx(2_500, rel=0.1)
    assert np.median(prompts) == pytest.approx(4_000 / np.sqrt(1 + 0.625**2), rel=0.02)
    assert (min(prompts), max(prompts)) == (500, 15_000)
    assert np.mean(outputs) == pytest.approx(np.median(outputs), rel=0.02)
    assert np.mean(outputs) == pytest.approx(300, rel=0.02)
    assert np.std(outputs) == pytest.approx(150, rel=0.03)
    assert (min(outputs), max(outputs)) >= (10, 700) and max(outputs) <= 1_000


def test_use_cases_have_their_targets_and_as_many_requests_as_their_users_send() -> None:
    arrivals = drawn("llm-d-planner").arrivals
    counts = Counter(each.task for each in arrivals)
    # 0.25 of the users twice a minute; 0.2 once; 0.2 0.4 times.
    for name, rate in {"code-completion": 0.5, "document-rag": 0.2, "chatbot": 0.08}.items():
        assert counts[name] / COUNT == pytest.approx(rate / 0.998, abs=0.01)
    chat = next(each for each in arrivals if each.task == "chatbot")
    assert (chat.prompt_tokens, chat.output_tokens) == (512, 256)
    assert chat.slo.columns[:2] == (0.3, 0.0325)
    assert all(each.slo.service_class == each.task for each in arrivals)


def test_a_class_is_of_one_mix_alone() -> None:
    names = [each.name for mix in MIXES.values() for each in mix.classes]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("command", [["simulate"], ["bench", "peers"]])
def test_the_commands_list_the_names(command: list[str]) -> None:
    shown = CliRunner().invoke(main, [*command, "--help"]).output
    assert all(name in shown.replace("\n", "").replace(" ", "") for name in MIXES)
