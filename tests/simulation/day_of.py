"""A day of traffic from a recorded hour: ``python -m tests.simulation.day_of TRACE DAY.csv``.

The day repeats the trace, each time thinned to the rate of the time of day: a cosine from a fifth
of the mean rate at midnight to nine fifths of it at noon. What else differs between the hours of a
recorded day, such as lengths, does not differ here.
"""

from __future__ import annotations

import csv
import sys
from datetime import datetime, timedelta
from math import cos, tau
from pathlib import Path
from random import Random

from sluice.simulation.traces import MAX_REQUESTS, load

DAY_S = 86_400.0
SWING = 0.8


def main(trace: Path, day: Path) -> None:
    """Write the day, of nearly as many requests as are read of a trace."""
    hour = load(trace, limit=MAX_REQUESTS)
    rng, midnight = Random(1), datetime(2024, 5, 10)
    share = 0.98 * MAX_REQUESTS / (len(hour) * DAY_S / hour.duration_s)
    with day.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("TIMESTAMP", "ContextTokens", "GeneratedTokens"))
        begins_s = 0.0
        while begins_s < DAY_S:
            for arrival in hour.arrivals:
                at_s = begins_s + arrival.arrival_s
                wanted = share * (1 - SWING * cos(tau * at_s / DAY_S))
                if at_s < DAY_S and rng.random() < wanted:
                    when = midnight + timedelta(seconds=at_s)
                    rows.writerow((when.isoformat(), arrival.prompt_tokens, arrival.output_tokens))
            begins_s += hour.duration_s


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
