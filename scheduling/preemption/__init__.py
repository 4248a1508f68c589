"""Which prefill runs, and which one gives way, where a running prefill can be suspended."""

from scheduling.preemption.aged_share import AgedShare
from scheduling.preemption.s_edf import Batch, InFlight, Options, Prefill, decide

__all__ = ["AgedShare", "Batch", "InFlight", "Options", "Prefill", "decide"]
