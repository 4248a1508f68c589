from __future__ import annotations

import re
from itertools import pairwise

from sluice.scheduling.fleet.state import PLAN_BUCKETS_S, STEP_RATIO_BUCKETS
from tests.documents import ROOT
from tests.metrics_catalogue import Family, catalogue


def documented() -> dict[str, Family]:
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| `((?:sluice|gen_ai)_\w+)` \| (\w+) \|([^|]*)\| [^|]+ \|$", text, re.MULTILINE
    )
    names = [name for name, _, _ in rows]
    assert len(set(names)) == len(names), "a metric has two rows"
    return {
        name: Family(kind, frozenset(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows
    }


def test_every_metric_is_documented_with_its_kind_and_labels_and_none_is_invented() -> None:
    rows, real = documented(), catalogue()
    assert set(rows) == set(real)
    assert {name: rows[name] for name in real if rows[name] != real[name]} == {}


def test_only_counters_end_in_total() -> None:
    for name, family in catalogue().items():
        assert name.endswith("_total") == (family.kind == "counter"), name


def test_the_buckets_of_times_span_what_is_measured() -> None:
    """From a fraction of what is usual to beyond what an alert or an objective may ask for."""
    from sluice.router.metrics.instruments import DECISION_BUCKETS_S, TPOT_BUCKETS_S, TTFT_BUCKETS_S

    # The default classes' objectives are bounds of buckets, so their attainment can be read off.
    assert {0.5, 2} <= set(TTFT_BUCKETS_S) and {0.05, 0.1} <= set(TPOT_BUCKETS_S)
    # The alert on slow decisions has its threshold at a bound; the default timeout is one, too.
    assert {0.1, 0.25} <= set(DECISION_BUCKETS_S)
    assert 1.0 in STEP_RATIO_BUCKETS
    for buckets in (TTFT_BUCKETS_S, TPOT_BUCKETS_S, DECISION_BUCKETS_S, PLAN_BUCKETS_S):
        assert list(buckets) == sorted(set(buckets))
        assert max(b / a for a, b in pairwise(buckets)) <= 5
