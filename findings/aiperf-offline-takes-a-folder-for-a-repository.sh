#!/usr/bin/env bash
# aiperf 0.13.0 cannot read a tokenizer from a folder when HF_HUB_OFFLINE=1, the setting for machines that
# reach no hub and so have their tokenizer in a folder.
# Expected: --tokenizer ./tokenizer works with and without it, as transformers' own from_pretrained does.
# Seen: offline, the path is taken for a repository's name: HFValidationError, no request is sent.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q aiperf==0.13.0
cd "$work"
"$work/venv/bin/python" - 2>/dev/null <<'PY'
import os
from importlib.metadata import version

from tokenizers import Tokenizer, models, pre_tokenizers

words = Tokenizer(models.WordLevel({"<unk>": 0, "word": 1}, unk_token="<unk>"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
os.mkdir("tokenizer")
words.save("tokenizer/tokenizer.json")
open("tokenizer/tokenizer_config.json", "w").write('{"tokenizer_class": "PreTrainedTokenizerFast"}')
print("aiperf", version("aiperf"), "transformers", version("transformers"))
PY
cat >load.py <<'PY'
import sys

from aiperf.common.tokenizer import Tokenizer as AIPerfs
from transformers import AutoTokenizer

print("transformers:", AutoTokenizer.from_pretrained("./tokenizer").encode("word"))
try:
    print("aiperf:", AIPerfs.from_pretrained("./tokenizer").encode("word"))
except Exception as error:
    print("aiperf:", type(error).__name__, str(error)[:110])
    sys.exit(3)
PY
"$work/venv/bin/python" load.py 2>/dev/null
code=0
HF_HUB_OFFLINE=1 "$work/venv/bin/python" load.py 2>/dev/null || code=$?
[ "$code" = 3 ] || { echo "the behaviour has changed"; exit 1; }
