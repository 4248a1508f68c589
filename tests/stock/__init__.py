"""Sluice beside vLLM's own server: the same requests to both, and a reason for each difference."""
