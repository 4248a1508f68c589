"""A small LoRA adapter for the local model, in the files that PEFT writes."""

from __future__ import annotations

import json
from pathlib import Path


def write_adapter(directory: Path, model: Path, rank: int = 4, seed: int = 0) -> Path:
    """Write an adapter with random weights for the attention of the Llama in ``model``."""
    # Here: importing them takes seconds, which collecting tests need not.
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model)
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    outputs = {
        "q_proj": config.hidden_size,
        "v_proj": config.hidden_size * groups // heads,
    }
    chance = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(config.num_hidden_layers):
        for name, size in outputs.items():
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            a = torch.randn(rank, config.hidden_size, generator=chance)
            b = torch.randn(size, rank, generator=chance)
            weights[f"{place}.lora_A.weight"] = a.to(torch.bfloat16)
            weights[f"{place}.lora_B.weight"] = b.to(torch.bfloat16)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(outputs),
        "bias": "none",
    }
    directory.mkdir(parents=True)
    (directory / "adapter_config.json").write_text(json.dumps(settings))
    save_file(weights, directory / "adapter_model.safetensors")
    return directory
