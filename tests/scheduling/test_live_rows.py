"""The rows of live requests: the queue's, which policies read, and the reported ones."""

import numpy as np
import pytest

from sluice.scheduling.fleet.state import ROW, RUNNING, rows_of
from sluice.scheduling.request.kernels import FIELDS, LIVE
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.request.queue import QueueView, RequestView

VIEW = RequestView(
    "a", SLO(ttft_s=1.5, tpot_s=0.25, e2e_s=9.0, priority=3), 2.0, 70, 71, 1, 5, 4.0, 6, True, 7.0,
    50.0, True, 2, 0.5, 8, 1.25, True, 7, 11.0,
)  # fmt: skip


def test_the_columns_of_a_queue_have_the_names_of_the_views_fields() -> None:
    table = QueueView([VIEW]).table
    assert table.shape == (1, FIELDS) == (1, len(LIVE.names or ()))
    (row,) = table.view(LIVE)[0]
    for name in LIVE.names or ():
        assert row[name] == getattr(VIEW if hasattr(VIEW, name) else VIEW.slo, name), name


def test_a_reported_row_has_the_fields_of_a_queue_in_their_order() -> None:
    reported = [name.replace("phase", "running") for name in ROW.names or ()]
    shared = [name for name in LIVE.names or () if name in reported]
    assert reported == ["key", *shared, "later_stages", "later_tokens"]
    (row,) = rows_of(QueueView([VIEW]).table)
    assert row["phase"] == RUNNING
    for name in set(shared) - {"running"}:
        assert row[name] == getattr(VIEW if hasattr(VIEW, name) else VIEW.slo, name), name


@pytest.mark.parametrize(("later", "tpot_s"), [((0.1, 2, 30), 0.1), ((np.inf, 0, 0), 0.25)])
def test_a_reported_row_has_its_later_stages(later: tuple[float, ...], tpot_s: float) -> None:
    (row,) = rows_of(QueueView([VIEW]).table, np.array([later]))
    assert row["tpot_s"] == np.float32(tpot_s)
    assert (row["later_stages"], row["later_tokens"]) == later[1:]


def test_an_unknown_length_is_reported_as_zero() -> None:
    (row,) = rows_of(QueueView([VIEW._replace(expected_tokens=float("nan"))]).table)
    assert row["expected_tokens"] == 0
