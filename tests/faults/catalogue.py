"""Every scenario, in the order of the table."""

from __future__ import annotations

from tests.faults import controller, edge, engines, nodes, replicas, updates

SCENARIOS = (
    *replicas.SCENARIOS,
    *edge.SCENARIOS,
    *controller.SCENARIOS,
    *updates.SCENARIOS,
    *nodes.SCENARIOS,
    *engines.SCENARIOS,
)
