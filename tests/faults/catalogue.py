"""Every scenario, in the order of the table."""

from __future__ import annotations

from tests.faults import controller, edge, engines, nodes, replicas, updates

SCENARIOS = (
    *replicas.SCENARIOS,
    *controller.SCENARIOS,  # before routers die: what those had counted ends with a controller
    *edge.SCENARIOS,
    *updates.SCENARIOS,
    *nodes.SCENARIOS,
    *engines.SCENARIOS,
)
