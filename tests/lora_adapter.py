"""A small LoRA adapter for the local model, in the files that PEFT writes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np


def write_adapter(directory: Path, model: Path, rank: int = 4, seed: int = 0) -> Path:
    """Write an adapter with random weights for the attention of the Llama in ``model``."""
    from safetensors.numpy import save_file  # that of PyTorch would import it

    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    width = config["hidden_size"]
    chance = np.random.default_rng(seed)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for name, size in (("q_proj", width), ("v_proj", width * groups // heads)):
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{place}.lora_A.weight"] = chance.standard_normal((rank, width), np.float32)
            weights[f"{place}.lora_B.weight"] = chance.standard_normal((size, rank), np.float32)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
    }
    directory.mkdir(parents=True)
    (directory / "adapter_config.json").write_text(json.dumps(settings))
    save_file(weights, directory / "adapter_model.safetensors")
    return directory
