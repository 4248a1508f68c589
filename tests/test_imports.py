import ast
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

CONTROLLER_SURFACE = (
    "controller.client",
    "controller.config",
    "controller.observability.metrics",
)

STEP_CORE = ("simulation.rows",)
"""Continuous batching, which the simulated engine of a replica and the simulator share."""

ALLOWED: dict[str, tuple[str, ...]] = {
    "telemetry": ("telemetry",),
    "scheduling": ("scheduling",),
    "protocol": ("protocol", "scheduling"),
    "controller": ("controller", "protocol", "scheduling", "telemetry"),
    "replica": ("replica", "protocol", "scheduling", "telemetry", *STEP_CORE, *CONTROLLER_SURFACE),
    "replica.compile": ("replica", "scheduling", *STEP_CORE, "controller.transport.checks"),
    "router": ("router", "protocol", "scheduling", "telemetry", *CONTROLLER_SURFACE),
    "simulation": ("simulation", "scheduling"),
    "deploy": (
        "deploy",
        "protocol",
        "router",
        "controller",
        "replica",
        "scheduling",
        "telemetry",
    ),
    "deploy.shadow": (
        "deploy",
        "protocol",
        "controller",
        "replica",
        "simulation",
        "scheduling",
        "telemetry",
    ),
    "benchmarks": (
        "benchmarks",
        "deploy",
        "protocol",
        "router",
        "controller",
        "replica",
        "simulation",
        "scheduling",
        "telemetry",
    ),
}
"""What each package may import; a package within another has its own in place of the other's."""

SCHEDULING_LIBRARIES = sys.stdlib_module_names | {"numpy", "pydantic", "numba", "msgspec"}
"""The only other imports of ``scheduling``, which must run anywhere."""


def imported(module: str, source: str, is_package: bool) -> list[tuple[int, str]]:
    """Line and full name of everything that ``source`` imports; ``from a import b`` is ``a.b``."""
    names: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                drop = node.level - 1 if is_package else node.level
                parts = ["sluice", *module.split(".")]
                parts = parts[: len(parts) - drop]
                base = ".".join([*parts, base] if base else parts)
            names += [(node.lineno, f"{base}.{alias.name}") for alias in node.names]
    return names


def violations(module: str, source: str, is_package: bool = False) -> list[str]:
    """What in ``source``, the code of ``module``, imports against the rules."""
    package = max((base for base in ALLOWED if f"{module}.".startswith(f"{base}.")), key=len)
    found = []
    for line, name in imported(module, source, is_package):
        top = name.split(".")[0]
        ours = name.removeprefix("sluice.")
        if top in ALLOWED:
            found.append(f"{module}:{line}: {name} must be imported as sluice.{name}")
        elif top == "sluice":
            if not any(f"{ours}.".startswith(f"{base}.") for base in ALLOWED[package]):
                found.append(f"{module}:{line}: {package} must not import {ours}")
        elif top == "tests":
            found.append(f"{module}:{line}: {package} must not import tests")
        elif package == "scheduling" and top not in SCHEDULING_LIBRARIES:
            found.append(f"{module}:{line}: scheduling must not import {name}")
    return found


def files() -> list[Path]:
    return sorted(
        path for package in ALLOWED if "." not in package for path in (ROOT / package).rglob("*.py")
    )


def test_the_layers_import_downward_only() -> None:
    paths = files()
    assert {path.relative_to(ROOT).parts[0] for path in paths} >= {
        "scheduling",
        "controller",
        "replica",
        "router",
        "deploy",
    }
    found = []
    for path in paths:
        parts = path.relative_to(ROOT).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        module = ".".join(parts[:-1] if is_package else parts)
        found += violations(module, path.read_text(), is_package)
    assert not found, "\n".join(found)


def arrows() -> dict[str, set[str]]:
    """By module of ours, those that it imports anywhere, also for type checkers alone."""
    named = {}
    for path in files():
        parts = path.relative_to(ROOT).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        named[".".join(parts[:-1] if is_package else parts)] = path.read_text(), is_package
    found = {}
    for module, (source, is_package) in named.items():
        names = [name.removeprefix("sluice.") for _, name in imported(module, source, is_package)]
        found[module] = {
            name if name in named else name.rpartition(".")[0] for name in names
        } & named.keys() - {module}
    return found


def room_of(module: str) -> str:
    """The sub-package that a module is in; of one right below a package, itself."""
    return ".".join(module.split(".")[:2])


def test_no_import_goes_in_a_circle_between_modules_or_sub_packages() -> None:
    modules = arrows()
    rooms: dict[str, set[str]] = {}
    for module, names in modules.items():
        rooms.setdefault(room_of(module), set()).update(map(room_of, names))
    for room, names in rooms.items():
        names.discard(room)
    assert {"router.dispatch", "replica.vllm"} <= rooms.keys()
    for graph in (modules, rooms):
        TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("scheduling.x", "import sluice.protocol.messages"),
        ("scheduling.x", "from ray import serve"),
        ("scheduling.x", "def f():\n    import vllm"),
        ("router.x", "from scheduling.objective import SLO"),
        ("replica.x", "from sluice.controller import actor"),
        ("replica.x", "import sluice.controller"),
        ("router.sub.x", "from ...deploy import config"),
        ("deploy.x", "from sluice.benchmarks import planning"),
        ("deploy.x", "from tests.scheduling import views"),
    ],
)
def test_the_check_sees_a_violation(module: str, source: str) -> None:
    assert len(violations(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("scheduling.x", "import math\nimport numpy as np\nfrom pydantic import Field"),
        ("scheduling.batching.x", "from . import base\nfrom ..objective import SLO"),
        ("controller.x", "import ray\nfrom sluice.scheduling.routing import make_policy"),
        ("replica.x", "from sluice.controller.client import ControllerClient"),
        ("replica.x", "from sluice.controller import config"),
    ],
)
def test_the_check_lets_what_is_allowed_pass(module: str, source: str) -> None:
    assert violations(module, source) == []
