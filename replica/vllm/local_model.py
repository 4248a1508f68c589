"""A small random-weight Llama with its own tokenizer, made on this machine without any download;
the engine runs it exactly as with trained weights."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_log = logging.getLogger(__name__)

_FORMAT = 3
"""Part of the directory name: increment it with every change below."""

_DIGESTS = "digests.json"  # SHA-256 of each of the other files, by name. It is written last

_VOCABULARY = 2048
_SPECIAL = ("<|end|>", "<|begin|>", "<|pad|>")

_CHAT_TEMPLATE = (
    "{{ '<|begin|>' }}"
    # The format of calls that vLLM's parser `hermes` reads.
    "{% if tools %}{{ 'tools: ' + tools | tojson + ' <tool_call>"
    '{"name": "", "arguments": {}}'
    "</tool_call>\\n' }}{% endif %}"
    "{% for message in messages %}"
    "{{ message['role'] + ': ' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] or [] %}{{ part['text'] }}{% endfor %}{% endif %}"
    "{{ '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)

LLAMA_8B: dict[str, int] = {
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128_256,
}
"""The shape of Llama 3 8B, by the fields of its configuration."""

TINY = {**LLAMA_8B, "hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 4}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 4_096}
"""A shape for CPUs."""

_TEXT = """
the of and to in a is that for it as was with be by on not he this are or his from at which but
have an had they you were their one all we can her has there been if more when will would who so
no she other its may these what them than some him time into only could new then do first any my
now such like our over man me even most made after also did many before must through years where
much your way well down should because each just those people how too little state good very make
world still own see men work long get here between both life being under never day same another
know while last might us great old year off come since against go came right used take three
A model reads a prompt in pieces, keeps the keys and values of every token that it has seen, and
then writes its answer one token at a time. The first token needs the whole prompt; each later one
needs a single step. When many people ask at once the machine must choose whose tokens to compute
next. A request that waits too long for its first word feels slow, and a stream that stops in the
middle of a sentence feels broken, so every token has a moment by which it should have arrived.
The scheduler looks at the queue before each step, counts how much time is left for every request,
and fills the batch with the work that is most urgent or most valuable. Long documents are cut into
chunks, short questions pass between them, and nothing is computed twice if it can be remembered.
In the morning the river was quiet, the boats lay along the wall, and a child counted the birds on
the roof of the market. Bread, fruit, fish and flowers were sold before the sun was high. Someone
asked where the road led, and an old woman answered that it went over the hill to the next town,
across two bridges, past a school, a mill and a garden with apple trees, and from there to the sea.
The library opened at nine. Students sat at long tables with books about history, language, music,
numbers, medicine, weather and law. They wrote letters, solved problems, drew maps, learned names
and dates, discussed questions with friends, and walked home in the evening when lamps were lit.
Please write a short story, explain this error, translate the following paragraph, summarise the
document, list three examples, compare both answers, and describe how the system works in detail.
one two three four five six seven eight nine ten hundred thousand million first second third half
Monday Tuesday Wednesday Thursday Friday Saturday Sunday January March summer winter spring autumn
red blue green yellow black white small large heavy light early late north south east west before
0 1 2 3 4 5 6 7 8 9 10 20 50 100 1000 2024 . , ; : ? ! ( ) [ ] { } " ' - + * / = < > @ # % & _
def return class import print function value result string number list table error request server
"""


def local_model(
    cache_dir: Path,
    layers: int = 4,
    hidden: int = 512,
    max_positions: int = 8192,
    seed: int = 0,
    experts: int = 0,
) -> Path:
    """Directory of the model of these parameters, in ``cache_dir/models``, made at the first call.

    Equal parameters make equal files; it is complete or absent even after a loss of power, and made
    again if files changed; concurrent processes wait. ``O(bytes)`` reads each time. ``hidden``: a
    multiple of 64; ``experts``: of which each token has two. Raises ValueError: a size is not
    possible. Raises OSError: the directory cannot be read, written or locked."""
    if layers < 1 or max_positions < 16:
        raise ValueError(
            "a local model needs at least 1 layer and 16 positions, "
            f"got {layers} and {max_positions}"
        )
    if experts < 0 or experts == 1:
        raise ValueError(f"experts must be 0 or at least 2, got {experts}")
    if hidden < 64 or hidden % 64:
        raise ValueError(f"hidden must be a positive multiple of 64, got {hidden}")
    kind = f"moe{experts}" if experts else "llama"
    name = f"sluice-{kind}-{layers}x{hidden}-{max_positions}-seed{seed}-v{_FORMAT}"
    target = cache_dir.expanduser() / "models" / name
    if _is_whole(target):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.parent / ".lock"):
        if not _is_whole(target):
            temporary = target.with_name(f".{name}.part")
            shutil.rmtree(temporary, ignore_errors=True)  # left by a killed process
            temporary.mkdir()
            try:
                vocabulary = _save_tokenizer(temporary, max_positions)
                config = _config(layers, hidden, max_positions, vocabulary, experts)
                _save_weights(temporary, config, seed)
                _seal(temporary)
                if target.exists():
                    _log.warning("the local model %s is damaged; making it again", target)
                    shutil.rmtree(target)
                temporary.rename(target)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
            _sync(target.parent)
    return target


def shaped_model(directory: Path, shape: dict[str, int]) -> Path:
    """A Llama of this shape without weights, for vLLM's ``load-format: dummy``. The tokenizer is
    ``local_model``'s with a text for each further token, so every output is text."""
    target = directory / "shaped-model"
    target.mkdir(parents=True, exist_ok=True)
    known = _save_tokenizer(target, max_positions := 8192)
    config = _config(1, 64, max_positions, known, 0)
    config.update({**shape, "architectures": ["LlamaForCausalLM"]})
    config.save_pretrained(target)
    file = target / "tokenizer.json"
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    more = range(known, shape["vocab_size"])
    tokenizer["model"]["vocab"] |= {f"<{token}>": token for token in more}
    file.write_text(json.dumps(tokenizer), encoding="utf-8")
    return target


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of ``path``, which the system frees if its holder dies."""
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _seal(directory: Path) -> None:
    """Sync the files to disk, so that they survive a loss of power, and write their digests."""
    paths = sorted(directory.iterdir())
    digests = directory / _DIGESTS
    digests.write_text(json.dumps({path.name: _digest(path) for path in paths}, indent=2) + "\n")
    for path in (*paths, digests, directory):
        _sync(path)


def _is_whole(directory: Path) -> bool:
    try:
        digests: dict[str, str] = json.loads((directory / _DIGESTS).read_bytes())
        return all(_digest(directory / name) == digest for name, digest in digests.items())
    except (FileNotFoundError, ValueError):
        return False


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _save_tokenizer(directory: Path, max_positions: int) -> int:
    """Byte-level BPE: any Unicode text encodes, and decodes to itself. Return its size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        min_frequency=1,
        special_tokens=list(_SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=_SPECIAL[0],
        bos_token=_SPECIAL[1],
        pad_token=_SPECIAL[2],
        model_max_length=max_positions,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = _CHAT_TEMPLATE
    fast.save_pretrained(directory)
    return len(fast)


def _config(layers: int, hidden: int, max_positions: int, vocabulary: int, experts: int) -> Any:
    from transformers import LlamaConfig, Qwen3MoeConfig

    heads = hidden // 64
    width = hidden * 8 // 3 // 64 * 64
    common: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2 if heads % 2 == 0 else 1,
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": False,
        "eos_token_id": 0,
        "bos_token_id": 1,
        "pad_token_id": 2,
        "dtype": "bfloat16",
    }
    if not experts:
        return LlamaConfig(**common)
    return Qwen3MoeConfig(
        **common,
        head_dim=64,
        num_experts=experts,
        num_experts_per_tok=2,
        moe_intermediate_size=max(64, width // 2),
        norm_topk_prob=True,
    )


def _save_weights(directory: Path, config: Any, seed: int) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    hidden, vocabulary = config.hidden_size, config.vocab_size
    tokenizer = AutoTokenizer.from_pretrained(directory)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            # Logits with a spread of about 3, so that a greedy choice is clear and a sampled one
            # is not uniform. Special tokens, control characters and lone bytes outside ASCII stay
            # at 0: they hardly ever come, so outputs have full length and are readable text.
            head = model.lm_head.weight
            head.normal_(0.0, 3.0 / hidden**0.5)
            for token in range(vocabulary):
                text = tokenizer.decode([token])
                if token < len(_SPECIAL) or not (text.isascii() and text.isprintable()):
                    head[token].zero_()
            model.model.embed_tokens.weight.normal_(0.0, 0.1)
    model.to(torch.bfloat16).save_pretrained(directory, safe_serialization=True)
