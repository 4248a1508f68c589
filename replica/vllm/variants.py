"""Variants of the vLLM engine: packages that replace more of it than its scheduler.

A variant registers itself when its package is imported, so the stock engine imports none of them.
The code that makes an engine imports the variant that its configuration asks for.
"""

from __future__ import annotations

from typing import Any, Protocol

from sluice.replica.scheduler.xargs import SchedulerSettings

STOCK_SCHEDULER = "sluice.replica.vllm.scheduler.make_scheduler"
"""vLLM's name of the scheduler factory, unless a variant has its own."""


class Variant(Protocol):
    """The changes of a variant."""

    name: str

    def wanted(self, settings: SchedulerSettings) -> bool:
        """Whether these settings ask for it."""

    def arguments(self, ranks: int) -> dict[str, Any]:
        """The arguments of vLLM's command line that it needs with ``ranks`` workers."""

    def check(self, vllm_config: Any) -> None:
        """Check that it can run under ``vllm_config``.

        Raises:
            sluice.replica.vllm.support.UnsupportedVllmError: it cannot run; the message says why.
        """


_registered: dict[str, Variant] = {}


def register(variant: Variant) -> None:
    """Make a variant known to this process."""
    _registered[variant.name] = variant


def variant_of(settings: SchedulerSettings) -> Variant | None:
    """The variant that ``settings`` ask for; ``None``: the stock engine.

    Raises:
        RuntimeError: they ask for preemption, and its package was not imported.
    """
    for variant in _registered.values():
        if variant.wanted(settings):
            return variant
    if settings.preemption.granularity != "off":
        raise RuntimeError(
            "preemption is configured, but sluice.replica.preemption.variant not imported"
        )
    return None
