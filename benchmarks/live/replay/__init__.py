"""A workload over real HTTP: ``sluice bench replay``, and the client of all live benchmarks."""
