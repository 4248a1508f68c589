"""What each backend takes of JSON Schema, it enforces: followed without an engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .json_schemas import MALFORMED, SCHEMAS
from .test_vllm_schemas import obeys

pytestmark = [pytest.mark.vllm, pytest.mark.release]

TOKENS = 200
WALKS = 6


def trial_of(model: Path, backend: str) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs

    from sluice.replica.grammar.check import Trial

    arguments = AsyncEngineArgs(
        model=str(model),
        max_model_len=2048,
        kv_cache_memory_bytes=64 << 20,
        dtype="float32",
        structured_outputs_config={"backend": backend},  # type: ignore[arg-type]
    )
    return Trial(arguments.create_engine_config(), 5.0)


def constrained(trial: Any, schema: Any) -> Any:
    """The parameters of a request for a text that obeys a schema, with the chosen backend.

    Raises:
        ValueError: it is refused.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    from sluice.replica.grammar.backends import constrain

    params = SamplingParams(structured_outputs=StructuredOutputsParams(json=schema))
    constrain(params, trial._config, trial._tokenizer)
    return params.structured_outputs


def texts(trial: Any, params: Any) -> Iterator[str]:
    """Complete texts that the grammar allows, at random, and drawn towards their end."""
    from vllm.v1.structured_output.request import get_structured_output_key

    from sluice.replica.grammar.check import _allowed

    backend, tokenizer = trial._backend(params._backend), trial._tokenizer
    mask = backend.allocate_token_bitmask(1)
    closing = set(tokenizer.convert_tokens_to_ids(['"', "]", "}", "0", "1", "a"]))
    for walk in range(WALKS):
        rng = np.random.default_rng(walk)
        grammar = backend.compile_grammar(*get_structured_output_key(params))
        ids: list[int] = []
        while len(ids) < TOKENS and not grammar.is_terminated():
            grammar.fill_bitmask(mask, 0)
            allowed = np.flatnonzero(_allowed(mask, trial._vocabulary)).tolist()
            ends = [each for each in allowed if each in closing]
            if tokenizer.eos_token_id in allowed and rng.random() < 0.6:
                token = tokenizer.eos_token_id
            else:
                token = int(rng.choice(ends if ends and rng.random() < 0.7 else allowed))
            assert grammar.accept_tokens("", [token])
            if token == tokenizer.eos_token_id:
                yield tokenizer.decode(ids)
                break
            ids.append(token)
        else:
            if grammar.is_terminated():
                yield tokenizer.decode(ids)


@pytest.mark.parametrize("backend", ["auto", "guidance", "xgrammar", "outlines"])
def test_a_schema_is_enforced_or_refused(model: Path, backend: str) -> None:
    trial = trial_of(model, backend)
    taken = 0
    for schema in (schema for schemas in SCHEMAS.values() for schema in schemas):
        try:
            params = constrained(trial, schema)
        except ValueError:
            continue
        assert backend in ("auto", params._backend)
        wrong = [text for text in texts(trial, params) if not obeys(text, schema)]
        assert not wrong, (schema, wrong)
        taken += 1
    assert taken > 15
    for schema in MALFORMED:
        with pytest.raises(ValueError):
            constrained(trial, schema)
