"""The locally made model: reproducible files, a tokenizer for any text, and varied output."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.replica.vllm.local_model import local_model

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return local_model(tmp_path_factory.mktemp("models"), layers=2, hidden=128)


@pytest.fixture(scope="module")
def tokenizer(model_dir):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_dir)


def test_two_makers_get_equal_files_and_a_second_call_makes_nothing(model_dir, tmp_path):
    other = local_model(tmp_path, layers=2, hidden=128)
    names = sorted(path.name for path in model_dir.iterdir())
    assert names == sorted(path.name for path in other.iterdir())
    for name in names:
        digests = {hashlib.sha256((d / name).read_bytes()).digest() for d in (model_dir, other)}
        assert len(digests) == 1, name
    made = (other / "model.safetensors").stat().st_mtime_ns
    assert local_model(tmp_path, layers=2, hidden=128) == other
    assert (other / "model.safetensors").stat().st_mtime_ns == made
    assert sorted(path.name for path in (tmp_path / "models").iterdir()) == [".lock", other.name]
    seeded = local_model(tmp_path, layers=2, hidden=128, seed=1) / "model.safetensors"
    assert seeded.read_bytes() != (other / "model.safetensors").read_bytes()


def _cut(path):
    os.truncate(path, path.stat().st_size // 2)


def _flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_a_damaged_one_is_made_anew(tmp_path, caplog):
    model = local_model(tmp_path, layers=1, hidden=64)
    sound = _contents(model)
    for name, damage in (
        ("model.safetensors", _cut),
        ("model.safetensors", _flip_a_bit),
        ("tokenizer.json", Path.unlink),
        ("digests.json", _cut),
    ):
        damage(model / name)
        caplog.clear()
        assert local_model(tmp_path, layers=1, hidden=64) == model
        assert f"{model} is damaged" in caplog.text
        assert _contents(model) == sound


def test_one_whose_maker_crashed_is_not_there(tmp_path, monkeypatch):
    def crash(_handle):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", crash)
        with pytest.raises(KeyboardInterrupt):
            local_model(tmp_path, layers=1, hidden=64)
    models = tmp_path / "models"
    assert [path.name for path in models.iterdir()] == [".lock"]
    # One that was killed leaves what it had.
    name = "sluice-llama-1x64-8192-seed0-v3"
    (models / f".{name}.part").mkdir()
    (models / f".{name}.part" / "model.safetensors").write_bytes(b"half")
    assert local_model(tmp_path, layers=1, hidden=64) == models / name
    assert sorted(path.name for path in models.iterdir()) == [".lock", name]


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_comes_back(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_chat_template_takes_text_and_parts(tokenizer):
    parts = [{"type": "text", "text": "Hello"}]
    for content in ("Hello", parts):
        messages = [{"role": "user", "content": content}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert text == "<|begin|>user: Hello\nassistant: "


def test_greedy_output_varies_and_is_readable(model_dir, tokenizer):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir)
    prompt = tokenizer("Please write a short story", return_tensors="pt")["input_ids"]
    output = model.generate(prompt, max_new_tokens=40, do_sample=False)[0, prompt.shape[1] :]
    assert len(output) == 40
    assert len(set(output.tolist())) > 8
    assert tokenizer.decode(output).isprintable()


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ({"hidden": 100}, "multiple of 64"),
        ({"layers": 0}, "at least 1 layer"),
        ({"experts": 1}, "at least 2"),
    ],
)
def test_impossible_sizes_are_refused(tmp_path, size, message):
    with pytest.raises(ValueError, match=message):
        local_model(tmp_path, **size)
