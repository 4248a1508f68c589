"""Guarantees on real replicas: ``sluice bench promises --real``."""
