"""A small Whisper with random weights and a tokenizer of bytes, made without any download."""

from __future__ import annotations

from pathlib import Path

CLIP_S = 2
"""It takes so many seconds of audio at once, in place of 30."""

_WIDTH = 64
_FRAMES_PER_S = 50


def speech_model(directory: Path, seed: int = 0) -> Path:
    """The model, in ``directory``."""
    import torch
    from tokenizers import AddedToken, pre_tokenizers
    from transformers import (
        WhisperConfig,
        WhisperFeatureExtractor,
        WhisperForConditionalGeneration,
        WhisperProcessor,
        WhisperTokenizer,
    )
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tasks = ("translate", "transcribe", "startoflm", "startofprev", "nospeech", "notimestamps")
    names = [f"<|{name}|>" for name in ("startoftranscript", *LANGUAGES, *tasks)]
    vocabulary = {text: number for number, text in enumerate((*letters, "<|endoftext|>", *names))}
    tokenizer = WhisperTokenizer(vocab=vocabulary, merges=[], extra_special_tokens=names)
    times = [f"<|{frame / _FRAMES_PER_S:.2f}|>" for frame in range(CLIP_S * _FRAMES_PER_S + 1)]
    tokenizer.add_tokens([AddedToken(each, special=False, normalized=False) for each in times])
    WhisperProcessor(WhisperFeatureExtractor(chunk_length=CLIP_S), tokenizer).save_pretrained(
        directory
    )
    end = vocabulary["<|endoftext|>"]
    config = WhisperConfig(
        vocab_size=len(tokenizer),
        d_model=_WIDTH,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=2 * _WIDTH,
        decoder_ffn_dim=2 * _WIDTH,
        max_source_positions=CLIP_S * _FRAMES_PER_S,
        max_target_positions=256,
        decoder_start_token_id=vocabulary["<|startoftranscript|>"],
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        begin_suppress_tokens=None,
        # So large that what it writes depends on what it hears.
        init_std=0.5,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = WhisperForConditionalGeneration(config)
        with torch.no_grad():
            # Its outputs are printable and have full length: only such bytes have a weight.
            weights = model.model.decoder.embed_tokens.weight
            weights.normal_(0.0, 0.1)
            kept = [len(text) == 1 and text.isascii() and text.isprintable() for text in vocabulary]
            weights[: len(kept)][~torch.tensor(kept)] *= 0.01
            weights[len(kept) :] *= 0.01
    model.save_pretrained(directory)
    return directory


def heard(model: Path, audio: bytes, tokens: int) -> str:
    """What transformers has the model write, greedily, for the samples of a WAV in English."""
    import numpy as np
    import torch
    from transformers import WhisperForConditionalGeneration, WhisperProcessor

    processor = WhisperProcessor.from_pretrained(model)
    samples = np.frombuffer(audio[44:], np.int16).astype(np.float32) / (1 << 15)
    features = processor.feature_extractor(samples, sampling_rate=16_000, return_tensors="pt")
    prompt = "<|startoftranscript|><|en|><|transcribe|><|notimestamps|>"
    ids = torch.tensor([processor.tokenizer.encode(prompt, add_special_tokens=False)])
    whisper = WhisperForConditionalGeneration.from_pretrained(model)
    with torch.no_grad():
        encoded = whisper.model.encoder(features.input_features)
        for _ in range(tokens):
            logits = whisper(encoder_outputs=encoded, decoder_input_ids=ids).logits
            ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
    return str(processor.tokenizer.decode(ids[0, -tokens:]))
