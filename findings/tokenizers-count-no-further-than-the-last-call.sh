#!/usr/bin/env bash
# transformers 5.24.0 writes the length of its last call into tokenizer.json, and tokenizers 0.23.3 counts no further.
# Someone tokenizes training texts with truncation=True, max_length=512 and saves tokenizer and model; a gateway that
# counts prompts for limits, bills or prefix hashes reads tokenizer.json by tokenizers (Rust or Python), as routers do.
# Expected: truncation is an argument of that call; a prompt of 3,000 words counts 3,000 tokens, as by AutoTokenizer.
# Seen: save_pretrained() writes "truncation": {"max_length": 512, ...} and, after padding=True, "padding": {...}.
#       Tokenizer.from_file() then gives 512 tokens for each longer prompt, without a word, and encode_batch() pads short
#       prompts to the longest one: all in a batch count the same. AutoTokenizer of the same folder counts 3,000, as it
#       resets both at each call, so nobody who tests with it sees the limit. If the last call before the save was
#       plain, the file has neither. no_truncation() and no_padding() after the load help.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q transformers==5.24.0 tokenizers==0.23.3
cd "$work"
"$work/venv/bin/python" - <<'PY'
import json
from importlib.metadata import version
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

names = ("transformers", "tokenizers")
print(*(f"{name} {version(name)}" for name in names))
words = Tokenizer(models.WordLevel({"[UNK]": 0, "word": 1, "[PAD]": 2}, unk_token="[UNK]"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", pad_token="[PAD]")
long, short = "word " * 3000, "word " * 5
seen = {}
for name, options in {
    "truncated last": {"truncation": True, "max_length": 512, "padding": True},
    "plain last": {},
}.items():
    tokenizer([long, short], **options)
    tokenizer.save_pretrained(name)
    written = json.loads(Path(name, "tokenizer.json").read_text())
    raw = Tokenizer.from_file(f"{name}/tokenizer.json")
    seen[name] = {
        "written": [bool(written["truncation"]), bool(written["padding"])],
        "tokenizers": len(raw.encode(long).ids),
        "tokenizers, batch": [len(each.ids) for each in raw.encode_batch([long, short])],
        "AutoTokenizer": len(AutoTokenizer.from_pretrained(name)(long)["input_ids"]),
    }
    print(f"{name}: {seen[name]}")
good = {"written": [False, False], "tokenizers": 3000, "tokenizers, batch": [3000, 5], "AutoTokenizer": 3000}
bad = {"written": [True, True], "tokenizers": 512, "tokenizers, batch": [512, 512], "AutoTokenizer": 3000}
assert seen == {"truncated last": bad, "plain last": good}, "the behaviour has changed"
PY
