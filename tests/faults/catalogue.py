"""Every scenario, in the order of the table."""

from __future__ import annotations

from tests.faults import edge, engines, nodes, replicas

SCENARIOS = (
    *replicas.SCENARIOS,
    *edge.SCENARIOS,
    *nodes.SCENARIOS,
    *engines.SCENARIOS,
)
