"""What is compiled, seen from processes that have loaded nothing yet."""

from __future__ import annotations

import os
import subprocess
import sys

from numba.core.registry import CPUDispatcher


def loaded() -> dict[str, int]:
    """Compiled loops of this project, by the number of argument types with machine code here."""
    return {
        f"{module}.{key}": len(value.signatures)
        for module, holder in list(sys.modules.items())
        if module.startswith("sluice.")
        for key, value in vars(holder).items()
        if isinstance(value, CPUDispatcher)
    }


def run(code: str) -> str:
    """Run ``code`` in a process of its own, to its end; what it wrote to its standard error."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stderr
