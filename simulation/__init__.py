"""A virtual-time engine and cluster that run the same policies as production.

:mod:`simulation.run` runs a workload through one engine and :mod:`simulation.cluster` through
several behind a router; :mod:`simulation.summary` says what came of it.
"""
