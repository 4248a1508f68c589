"""A model whose answers follow all of the prompt. With the weights of an ordinary local model the
last tokens decide nearly alone, so that wrong KV would hardly show."""

from __future__ import annotations

import shutil
from pathlib import Path

from sluice.replica.vllm.local_model import local_model

_FACTORS = {"q_proj": 8.0, "k_proj": 8.0, "v_proj": 6.0, "o_proj": 6.0}


def attentive_model(directory: Path) -> Path:
    """Its folder, in ``directory``: two layers, with the weights of their attention scaled up."""
    from safetensors.torch import load_file, save_file

    plain = local_model(directory, layers=2, hidden=128)
    target = directory / "attentive"
    shutil.copytree(plain, target)
    (file,) = target.glob("*.safetensors")
    weights = load_file(file)
    for name, weight in weights.items():
        for part, factor in _FACTORS.items():
            if f".{part}." in name:
                weights[name] = weight * factor
    save_file(weights, file, metadata={"format": "pt"})
    return target
