"""Routers of these tests look often for batches that no router runs."""

import pytest


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice.router.batches.run.POLL_S", 0.02)
