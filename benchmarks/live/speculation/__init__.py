"""Speculation lengths on a real engine: ``sluice bench speculation``."""
