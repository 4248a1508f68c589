from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from sluice.benchmarks.micro.walk import PACKAGES
from sluice.deploy.cli import main
from sluice.deploy.commands.offline import all_policies
from sluice.deploy.config import SluiceConfig
from sluice.deploy.reference import KINDS, pages
from sluice.deploy.reference import POLICIES as POLICY_PAGES
from sluice.replica.config import AutoscalingConfig
from sluice.scheduling.batching import POLICIES, BatchPolicy
from sluice.scheduling.latency.model import LinearLatency
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.request.queue import QueueView
from sluice.simulation.run import simulate
from sluice.simulation.workload import Arrival, Workload
from tests.documents import DOCUMENTS, README, ROOT, blocks, marked, rows, section, shell
from tests.scheduling.views import ROOMY, decode, prefill

DOCS = ROOT / "docs"
LISTED = {
    kind: {entry.name: entry for entry in all_policies() if entry.kind == kind} for kind in KINDS
}
NAMES = [str(path.relative_to(ROOT)) for path in DOCUMENTS]

SOURCES = [path for name in (*PACKAGES, "tests") for path in (ROOT / name).rglob("*.py")]

BY_HAND = {"make serve", "make test", "sluice serve"}
"""Commands that do not end, or are these tests: the README's tests start what they start."""


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_each_file_of_the_code_that_a_document_names_exists(name: str) -> None:
    """A bare name stands for one beside the last that has a folder, or anywhere."""
    absent, folder = [], ROOT
    for found in re.findall(r"`([\w./-]+\.py)`", (ROOT / name).read_text(encoding="utf-8")):
        path = ROOT / found
        if "/" in found:
            folder = path.parent
        elif not (folder / found).is_file():
            path = next((each for each in SOURCES if each.name == found), path)
        else:
            path = folder / found
        absent += [] if path.is_file() else [found]
    assert not absent, absent


def anchors(path: Path) -> set[str]:
    """The names by which headings can be linked to, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=NAMES)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", path.read_text(encoding="utf-8")):
        name, _, anchor = target.partition("#")
        to = path.parent / name if name else path
        assert to.exists(), f"{path.name} links to {target}"
        assert not anchor or anchor in anchors(to), f"{path.name} links to {target}"


def test_the_index_lists_every_page_once() -> None:
    text = (DOCS / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^- \[[^\]]+\]\(([\w-]+\.md)\)", text, re.MULTILINE)
    pages = {path.name for path in DOCS.glob("*.md")} - {"README.md"}
    assert sorted(listed) == sorted(pages)


def test_the_documented_default_classes_are_the_defaults() -> None:
    documented = rows(section(DOCS / "slo.md", "Service classes"))
    assert set(documented) == set(SluiceConfig().router.classes)
    for name, entry in SluiceConfig().router.classes.items():

        def shown(value_ms: float | None) -> str:
            return "none" if value_ms is None else f"{value_ms:,.0f} ms"

        tiers = ", ".join(f"`{tier}`" for tier in entry.service_tiers)
        expected = [shown(entry.ttft_ms), shown(entry.tpot_ms), str(entry.priority), tiers]
        assert documented[name] == expected


# Policies.


@pytest.mark.parametrize(
    ("heading", "kind"),
    [
        ("Every local policy", "batch"),
        ("Admission", "admission"),
        ("Routing policies", "routing"),
        ("Autoscaling", "autoscaling"),
    ],
)
def test_every_policy_has_its_row_and_none_is_invented(heading: str, kind: str) -> None:
    assert set(rows(section(DOCS / "policies.md", heading))) == set(LISTED[kind])


def test_every_policy_has_its_page_and_none_is_invented() -> None:
    for kind, about in KINDS.items():
        folder = POLICY_PAGES / about.folder
        assert {path.stem for path in folder.iterdir()} == set(LISTED[kind])
        for path in folder.iterdir():
            assert path.read_text("utf-8").startswith(f"# `{path.stem}`: ")


def test_the_documented_defaults_are_the_defaults() -> None:
    config = SluiceConfig()
    for heading, name in (
        ("Every local policy", config.engine.policy),
        ("Admission", config.controller.admission),
        ("Routing policies", config.controller.policy),
        ("Autoscaling", AutoscalingConfig(max_replicas=1).policy),
    ):
        table = rows(section(DOCS / "policies.md", heading))
        assert [each for each, cells in table.items() if "the default" in cells[0]] == [name]
    section(DOCS / "policies.md", f"The default: `{config.engine.policy}`")


def test_what_is_written_from_the_code_is_up_to_date() -> None:
    stale = [path for path, text in pages() if path.read_text("utf-8") != text]
    assert not stale, "run `make docs`"


def example() -> type[BatchPolicy]:
    """The policy of the document, as it stands there."""
    (source,) = marked(ROOT / "CONTRIBUTING.md", "run: policy")
    names: dict[str, object] = {}
    exec(source, names)
    policy = names["PriorityFirst"]
    assert isinstance(policy, type) and issubclass(policy, BatchPolicy)
    return policy


def test_the_example_policy_does_what_it_says() -> None:
    queue = QueueView(
        [
            decode("soon", SLO(ttft_s=1.0, tpot_s=0.05)),
            prefill("later", 100, SLO(ttft_s=2.0)),
            prefill("first", 300, SLO(ttft_s=9.0, priority=2)),
        ]
    )
    plan = example()().plan(queue, 0.5, LinearLatency(a=0.01, b=1e-4), ROOMY)
    assert [tuple(entry) for entry in plan.entries] == [("first", 300), ("soon", 1), ("later", 100)]


def test_the_example_policy_serves() -> None:
    rng = np.random.default_rng(3)
    arrivals = tuple(
        Arrival(
            0.02 * index, int(rng.integers(1, 3_000)), 20, SLO(ttft_s=1.0, priority=index % 3 + 1)
        )
        for index in range(60)
    )
    result = simulate(Workload("example", arrivals), example()(), LinearLatency(a=0.01, b=1e-4))
    assert not result.requests.failures and not np.isnan(result.requests.emitted_s).any()
    assert result.fallbacks == 0


# Commands.


def commands(path: Path) -> list[str]:
    """Every command of a document, in fences or between backticks."""
    texts = [block.text.replace("\\\n", " ") for block in blocks(path)]
    fenced = [line for text in texts for line in text.splitlines()]
    text = re.sub(r"^```.*?^```", "", path.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    inline = [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", text)]
    return [
        line.strip()
        for line in (*fenced, *inline)
        if re.match(r"\s*(sluice [a-z]|python -m |make [a-z])", line)
    ]


def options(command: click.Command) -> set[str]:
    parameters = command.get_params(click.Context(command))
    return {
        name for parameter in parameters for name in (*parameter.opts, *parameter.secondary_opts)
    }


def check_sluice(words: list[str]) -> None:
    command: click.Command = main
    while isinstance(command, click.Group) and words and words[0][0] not in "-<":
        found = command.get_command(click.Context(command), words[0])
        assert found is not None, f"there is no command {words[0]!r}"
        command, words = found, words[1:]
    # Placeholders stand for a command.
    if words and words[0].startswith("<"):
        return
    if command.context_settings.get("ignore_unknown_options"):  # vLLM's flags follow
        try:
            command.make_context(command.name, list(words))
        except click.NoSuchOption as error:
            raise AssertionError(str(error)) from error
        except click.UsageError:  # a file that is not here
            pass
        return
    flags = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
    assert flags <= options(command), flags - options(command)


def check_module(words: list[str]) -> None:
    path = ROOT.joinpath("src" if words[0].startswith("sluice.") else "", *words[0].split("."))
    path = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    source = path.read_text(encoding="utf-8")
    assert 'if __name__ == "__main__"' in source, f"{words[0]} cannot be run"
    if "benchmarks.options import" in source:
        source += (ROOT / "benchmarks" / "options.py").read_text(encoding="utf-8")
    for flag in (word for word in words[1:] if word.startswith("--")):
        assert f'"{flag}"' in source, f"{words[0]} has no {flag}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=NAMES)
def test_every_command_has_a_name_and_options_that_exist(path: Path) -> None:
    for line in commands(path):
        try:
            words = shlex.split(line.replace("[", " ").replace("]", " "))
            if words[0] == "make":
                targets = (ROOT / "Makefile").read_text(encoding="utf-8")
                assert re.search(rf"^{words[1]}:", targets, re.MULTILINE)
            elif words[0] == "sluice":
                check_sluice(words[1:])
            else:
                check_module(words[2:])
        except (AssertionError, OSError) as error:
            raise AssertionError(f"{path.name}: {line}: {error}") from error


@pytest.mark.parametrize(
    "line",
    ["sluice benhc list", "sluice bench list --fast", "sluice serve --police fcfs"],
)
def test_the_check_sees_a_wrong_command(line: str) -> None:
    with pytest.raises(AssertionError):
        check_sluice(line.split()[1:])


@pytest.mark.parametrize("path", DOCUMENTS, ids=NAMES)
def test_what_a_reader_shall_run_is_run(path: Path) -> None:
    for block in blocks(path):
        runs = re.match(r"(sluice|python|make|curl|\.|from|import) ?", block.text)
        by_hand = any(block.text.startswith(command) for command in BY_HAND)
        marked_to_run = block.marker.startswith("run: ") or block.marker == "check: command"
        assert not runs or by_hand or marked_to_run, block.text


def texts(marker: str, but: Path | None = None) -> list[str]:
    """What stands under ``marker`` in all documents, each text once."""
    paths = [path for path in DOCUMENTS if path != but]
    found = [block.text for path in paths for block in blocks(path) if block.marker == marker]
    return list(dict.fromkeys(found))


def but(rare: str, found: Iterable[str]) -> list[Any]:
    """What was found; what contains ``rare`` is run before a release only."""
    return [pytest.param(each, marks=pytest.mark.release if rare in each else ()) for each in found]


# The README's own test runs its commands.
COMMANDS = dict.fromkeys(line for text in texts("run: cli", README) for line in text.splitlines())


# Other tests run each experiment in their own process.
@pytest.mark.parametrize("command", but("--scale quick", COMMANDS))
def test_the_commands_of_the_documents_work(command: str) -> None:
    output = shell(command)
    assert output or command.startswith("python -c")


def test_the_examples_of_the_simulator_run() -> None:
    alone, cluster = marked(DOCS / "simulator.md", "run: python")
    shown = shell(f"python -c {shlex.quote(alone)}").splitlines()
    figures = dict(line.split(": ") for line in shown)
    assert set(figures) <= set(POLICIES)
    # The document says that the policies differ under this load.
    assert len(set(figures.values())) == len(figures) == 3
    assert "moved" in shell(f"python -c {shlex.quote(cluster)}")


@pytest.mark.parametrize(
    "example", but("--requests 1000", marked(DOCS / "simulate.md", "run: search"))
)
def test_the_examples_of_a_search_find_an_answer(example: str, tmp_path: Path) -> None:
    command = example.replace("\\\n", " ").replace("--out capacity", "").rstrip() + " --json"
    (name,) = re.findall(r"--trace (\S+)", command)
    # A day where windows of one are asked for, else less than a minute.
    times = [f"18:15:{second:02d}.5" for second in range(40)]
    if "--windows" in command:
        times = [f"{minute // 60:02d}:{minute % 60:02d}:00" for minute in range(24 * 60)]
    lines = [f"2023-11-16 {time},400,20" for time in times]
    (tmp_path / name).write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]))
    found = json.loads(shell(f"cd {tmp_path}\n{command}"))
    assert found["replicas"] == (32 if "--replicas 32" in command else 1)
    if "--disaggregated" in command:
        assert (found["disaggregated"]["prefillers"], found["disaggregated"]["decoders"]) == (1, 1)


@pytest.mark.parametrize("text", texts("check: config"))
def test_the_configurations_of_the_documents_are_accepted(text: str) -> None:
    SluiceConfig.model_validate(yaml.safe_load(text))


@pytest.mark.parametrize("text", texts("check: serve-config"))
def test_the_configurations_for_serve_are_accepted(text: str) -> None:
    schema = ServeDeploySchema.model_validate(yaml.safe_load(text))
    for application in schema.applications:
        assert application.import_path == "sluice.deploy.app:build"
        SluiceConfig.model_validate(application.args)
