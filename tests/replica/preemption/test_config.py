"""What the configuration of preemption refuses."""

import pytest

from sluice.replica.config import EngineConfig

OPERATOR = {"granularity": "operator"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kind": "simulated", "preemption": OPERATOR}, "only vLLM's prefills"),
        ({"preemption": OPERATOR | {"chunk_tokens": 256}}, "greater than or equal to 512"),
        ({"preemption": {"granularity": "token"}}, "'off', 'layer' or 'operator'"),
        ({"preemption": OPERATOR | {"depth": 0}}, "greater than or equal to 1"),
    ],
)
def test_what_cannot_be_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig.model_validate(given)


def test_it_is_off_unless_asked_for():
    assert EngineConfig().preemption.granularity == "off"
    assert EngineConfig.model_validate({"preemption": OPERATOR}).preemption.depth == 4
