"""Speculative drafts of one simulated engine, their acceptance, and its learned probability."""

from __future__ import annotations

import numpy as np

from sluice.scheduling.latency.speculation import AcceptanceRates
from sluice.scheduling.request.kernels import ACCEPTANCE, DRAFTED, Floats, Ints
from sluice.simulation.config import Speculation
from sluice.simulation.requests import Requests


class Drafts:
    """Speculation in one engine: whether a drafted token is right is chance, by service class, and
    its probability is learned from what was checked, as a replica does it.

    Args:
        config: how it drafts.
        requests: of the run.
        rng: source of chance.

    Attributes:
        checked: drafted tokens that steps checked, since the start.
        accepted: of these, those that were right.
    """

    def __init__(self, config: Speculation, requests: Requests, rng: np.random.Generator) -> None:
        self.config = config
        self.checked = 0
        self.accepted = 0
        self._rng = rng
        self._rates = AcceptanceRates()
        classes = [arrival.slo.service_class for arrival in requests.arrivals]
        self._names, self._class_of = np.unique(
            np.array(classes, dtype=np.str_), return_inverse=True
        )
        alphas = [config.alphas.get(str(name), config.alpha) for name in self._names]
        self._wrong: Floats = 1.0 - np.array(alphas)

    def show(self, table: Floats, keys: Ints) -> None:
        """Write the learned acceptance of the live requests into their rows."""
        rates = np.array([self._rates.rate(str(name)) for name in self._names])
        table[:, ACCEPTANCE] = rates[self._class_of[keys]]

    def check(self, table: Floats, keys: Ints, ran: Ints, accepted: Ints) -> float:
        """A step runs ``ran``, rows and tokens: write how many of each one's drafts are right.

        Returns:
            The time that drafting took, seconds.
        """
        rows = ran[:, 0]
        offered = table[rows, DRAFTED] > 0
        checked = np.where(offered, ran[:, 1] - 1, 0)
        classes = self._class_of[keys[rows]]
        right = np.minimum(self._rng.geometric(self._wrong[classes]) - 1, checked)
        accepted[:] = right
        self.checked += int(checked.sum())
        self.accepted += int(right.sum())
        for place in np.flatnonzero(offered).tolist():
            name = str(self._names[classes[place]])
            self._rates.observe(name, int(checked[place]), int(right[place]))
        return self.config.draft_s * float(checked.max(initial=0))
