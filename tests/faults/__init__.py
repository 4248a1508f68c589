"""What becomes of requests when parts of a running system break.

A scenario (:mod:`tests.faults.scenario`) is a system, a load and one fault. ``python -m
tests.faults`` runs them at length and prints a row for each; the tests run the same ones, shorter.
"""
