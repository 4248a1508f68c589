"""A virtual-time engine and cluster that run the same policies as production.

:mod:`sluice.simulation.run` runs a workload through one engine and :mod:`sluice.simulation.cluster`
through several behind a router; :mod:`sluice.simulation.summary` says what came of it.
"""
