"""Preemption of prefills on real engines: ``sluice bench preemption`` and ``preemption_replay``."""
