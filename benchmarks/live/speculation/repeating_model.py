"""A model whose greedy text repeats, as a real model's text does on code, quotes and forms."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

from sluice.replica.vllm.local_model import local_model

_WORDS = 12


def repeating_model(directory: Path, layers: int, hidden: int, seed: int = 0) -> Path:
    """Its folder, in ``directory``.

    It is the local model with two changes: its attention has no effect, so that the next token
    follows from the last one alone, and :data:`_WORDS` tokens stand out from all others. So a
    greedy text cycles after a few tokens, while a sampled text uses all tokens and does not. The
    computation and duration of a step are those of the local model.
    """
    from safetensors.torch import load_file, save_file

    target = directory / "repeating"
    shutil.copytree(local_model(directory, layers=layers, hidden=hidden), target)
    (file,) = target.glob("*.safetensors")
    weights = load_file(file)
    for name, weight in weights.items():
        if ".o_proj." in name:
            weight.zero_()
    head = weights["lm_head.weight"]
    words = head.abs().sum(dim=1).nonzero().flatten().tolist()
    for token in set(words) - set(random.Random(seed).sample(words, _WORDS)):
        head[token].zero_()
    save_file(weights, file, metadata={"format": "pt"})
    return target
