"""Warming up calls every loop of placement, whatever the policies."""

import pytest

from sluice.scheduling import admission, routing
from sluice.scheduling.admission import moore_hodgson
from sluice.scheduling.fleet import report as fleet_report
from sluice.scheduling.fleet import rows as fleet_rows
from sluice.scheduling.placement.warm_up import warm_up_placement


@pytest.mark.parametrize("name", routing.POLICIES)
def test_every_routing_policy_warms_up(name: str) -> None:
    warm_up_placement(lambda: routing.make_policy(name), lambda: None)


def test_no_loop_of_the_default_is_left_to_compile() -> None:
    warm_up_placement(
        lambda: routing.make_policy("pab"), lambda: admission.make_policy("moore_hodgson")
    )
    # Those that Python calls; the loops inside them are in their machine code.
    called = (fleet_report.fold, fleet_report.add_reservation, fleet_rows.work_on)
    for loop in (*called, moore_hodgson.promises):
        assert loop.signatures, loop  # type: ignore[attr-defined]
