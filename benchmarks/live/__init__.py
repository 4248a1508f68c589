"""Benchmarks of running systems: real processes, real HTTP, real engines."""
