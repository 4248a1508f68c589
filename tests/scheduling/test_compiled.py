"""The rules of compiled loops that their source shows."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MOST_ARGUMENTS = 8


def test_a_compiled_function_takes_few_arguments() -> None:
    counts = {
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}": len(node.args.args)
        for package in ("scheduling", "simulation")
        for path in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
        and any(ast.unparse(each) == "compiled" for each in node.decorator_list)
    }
    assert len(counts) > 100
    assert [name for name, count in counts.items() if count > MOST_ARGUMENTS] == []
