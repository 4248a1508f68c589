"""A virtual-time engine and cluster that run the same policies as production.

:mod:`sluice.simulation.run` runs a workload through one engine and :mod:`sluice.simulation.cluster`
through several behind a router; :func:`sluice.simulation.metrics.summarise` says what came of it.
"""
