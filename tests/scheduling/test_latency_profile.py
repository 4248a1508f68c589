"""The stored form of a step-time model."""

import json

import pytest

from sluice.scheduling.latency.model import (
    LatencyModel,
    LinearLatency,
    PrefillDecodeLatency,
    RooflineLatency,
)
from sluice.scheduling.latency.profile import FitReport, LatencyProfile

LINEAR = LinearLatency(a=0.004, b=1.8e-4, c=8e-7, d=2e-8)
REPORT = FitReport(samples=90, dropped=10, mape=0.03, p90_error=0.05, r2=0.99)


@pytest.mark.parametrize("report", [None, REPORT])
@pytest.mark.parametrize(
    "model", [LINEAR, PrefillDecodeLatency(1, 2, 3, 4, 5, 6), RooflineLatency(1, 2, 3, 4, 5, 6, 7)]
)
def test_a_profile_survives_its_text(model: LatencyModel, report: FitReport | None) -> None:
    used = model.corrected(2.0).with_headroom(1.1)
    profile = LatencyProfile.of("llama/cpu", used, report)
    again = LatencyProfile.from_json(profile.to_json())
    assert again == profile
    assert again.model == model, "correction and head-room belong to a run, not to the profile"


def test_a_profile_from_before_there_were_families_is_linear() -> None:
    text = '{"key": "k", "a": 0.004, "b": 1.8e-4, "c": 8e-7, "d": 2e-8, "report": null}'
    assert LatencyProfile.from_json(text) == LatencyProfile.of("k", LINEAR)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"coefficients": [-1.0, 0, 0, 0]}, "finite and >= 0"),
        ({"coefficients": ["0.004", 0, 0, 0]}, "coefficients.0: Input should be a valid number"),
        ({"coefficients": [1.0]}, "has 4 coefficients (a, b, c, d), got 1"),
        ({"coefficients": [0, 0, 0, 0]}, "at least one coefficient"),
        ({"coefficients": 5}, "coefficients: Input should be a valid array"),
        ({"family": "cubic"}, "unknown family 'cubic'; known: linear, prefill_decode, roofline"),
        ({"key": 5}, "key: Input should be a valid string"),
        ({"e": 0.1}, "e: Unexpected keyword argument"),
        ({"report": {"samples": 1}}, "report.dropped: Field required"),
    ],
)
def test_a_broken_profile_is_refused_with_the_reason(
    change: dict[str, object], message: str
) -> None:
    fields = json.loads(LatencyProfile.of("k", LINEAR, REPORT).to_json())
    with pytest.raises(ValueError, match="not a latency profile") as raised:
        LatencyProfile.from_json(json.dumps(fields | change))
    assert message in str(raised.value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"key": "k"}',
        '{"key": NaN}',
        '{"key": "k", "a": 0.1}',
        '{"key": "k", "a": -1, "b": 0, "c": 0, "d": 0}',
        "[" * 10_000,
    ],
)
def test_what_is_no_profile_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a latency profile"):
        LatencyProfile.from_json(text)
