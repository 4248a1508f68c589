"""Preemption as a variant of the vLLM engine; importing this module registers it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sluice.replica.scheduler.xargs import SchedulerSettings
from sluice.replica.vllm.setup import register

if TYPE_CHECKING:
    from sluice.replica.preemption.scheduler import PreemptiveScheduler

FACTORY = "sluice.replica.preemption.variant.make_scheduler"
"""vLLM's name of :func:`make_scheduler`."""


class PreemptionVariant:
    """See :class:`~sluice.replica.vllm.setup.Variant`."""

    name = "preemption"

    def wanted(self, settings: SchedulerSettings) -> bool:
        """Whether a granularity is configured."""
        return settings.preemption.granularity != "off"

    def arguments(self, ranks: int) -> dict[str, Any]:
        """The arguments that preemption of a running prefill requires."""
        from sluice.replica.preemption.support import executor

        return {
            "distributed-executor-backend": executor(ranks),
            "async-scheduling": False,
            "scheduler-cls": FACTORY,
        }

    def check(self, vllm_config: Any) -> None:
        """Raises UnsupportedVllmError: running prefills cannot be preempted; it says why."""
        # Imported here, as it imports vLLM, which then reads its settings from the environment.
        from sluice.replica.preemption.support import check_preemption

        check_preemption(vllm_config)


register(PreemptionVariant())


def make_scheduler(vllm_config: Any, **kwargs: Any) -> PreemptiveScheduler:
    """The scheduler, in an engine core that runs rounds from now on. Raises UnsupportedVllmError.
    Raises ValueError: ``additional_config["sluice"]`` is missing or wrong."""
    from sluice.replica.preemption.support import check_preemption
    from sluice.replica.vllm.scheduler import prepare

    prepare(vllm_config)
    check_preemption(vllm_config)
    # These rely on names of vLLM that were checked above.
    from sluice.replica.preemption import engine_loop
    from sluice.replica.preemption.scheduler import PreemptiveScheduler

    engine_loop.install()
    return PreemptiveScheduler(vllm_config=vllm_config, **kwargs)
