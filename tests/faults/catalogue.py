"""Every scenario, in the order of the table."""

from __future__ import annotations

from tests.faults import (
    clocks,
    combined,
    controller,
    disk,
    edge,
    engines,
    machine,
    nodes,
    poison,
    replicas,
    starts,
    transfers,
    updates,
)

SCENARIOS = (
    *replicas.SCENARIOS,
    *controller.SCENARIOS,  # before routers die: what those had counted ends with a controller
    *edge.SCENARIOS,
    *combined.SCENARIOS,
    *updates.SCENARIOS,
    *starts.SCENARIOS,
    *clocks.SCENARIOS,
    *disk.SCENARIOS,
    *machine.SCENARIOS,
    *poison.SCENARIOS,
    *nodes.SCENARIOS,
    *engines.SCENARIOS,
    *transfers.SCENARIOS,
)
