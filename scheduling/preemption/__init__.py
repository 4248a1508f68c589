"""Which prefill runs, and which one gives way, where a running prefill can be suspended."""

from scheduling.preemption.s_edf import Batch, InFlight, Options, Prefill, decide

__all__ = ["Batch", "InFlight", "Options", "Prefill", "decide"]
