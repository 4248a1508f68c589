"""How much of their rate limits API keys have used, over all routers.

A limit is a leaky bucket: use fills it, it drains at the limit's rate, and use that would make it
overflow is refused. Each router keeps its own buckets, so that no request waits for a message.
About once a second it reports what it has added and receives the fill level of the fleet's bucket.
In between, routers do not know each other's use: together they may admit more than fits. The excess
still counts: the fleet's bucket holds it, and drains it at the same rate.
"""

from __future__ import annotations

from collections.abc import Sequence

from sluice.controller.messages import QuotaUse
from sluice.scheduling.tenancy.leaky_bucket import Bucket

MAX_ACCOUNTS = 1 << 16
"""Most buckets. Empty ones are not kept."""


class Quotas:
    """The buckets of the fleet."""

    def __init__(self) -> None:
        self._buckets: dict[str, Bucket] = {}

    def share(self, uses: Sequence[QuotaUse], now_s: float) -> list[float]:
        """Add a router's uses. Returns the fill level of each of their buckets, in order.

        ``O(len(uses))``, occasionally ``O(buckets)``.

        Raises:
            ValueError: there are too many buckets.
        """
        if len(self._buckets) + len(uses) > MAX_ACCOUNTS:
            self._drop_empty(now_s)
            if len(self._buckets) + len(uses) > MAX_ACCOUNTS:
                raise ValueError(f"there are more than {MAX_ACCOUNTS} accounts")
        return [self._take(use, now_s) for use in uses]

    def _take(self, use: QuotaUse, now_s: float) -> float:
        bucket = self._buckets.get(use.account)
        if bucket is None:
            bucket = self._buckets[use.account] = Bucket(now_s)
            bucket.add(use.level)
        else:
            bucket.drain(now_s, use.per_s)
            bucket.add(use.used)
        return bucket.drain(now_s, use.per_s)

    def _drop_empty(self, now_s: float) -> None:
        for account, bucket in list(self._buckets.items()):
            if bucket.drain(now_s, bucket.per_s) <= 0:
                del self._buckets[account]
