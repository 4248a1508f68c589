"""Steps of engines as a table that a model of a device can be fitted to."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Final

from sluice.scheduling.latency.model import StepSample
from sluice.telemetry.records import whole_lines

STEP_LOG: Final = "SLUICE_STEP_LOG"
"""The variable with the path of the log that stock vLLM's scheduler writes."""

SCHEDULER: Final = "sluice.benchmarks.live.step_log.make_scheduler"
"""vLLM's own scheduler, which notes its steps: ``scheduler-cls``."""

_WORK: Final = "prefill_tokens", "prefills", "prefill_context", "decodes", "decode_context"
COLUMNS: Final = ("launch_s", "end_s", "cpu_s", *_WORK)
"""``launch_s``: when the batch had been scheduled, ``end_s``: when its result was seen, on the
host's monotonic clock; ``cpu_s``: processor time of the loop's thread at the launch. Contexts are
sums of the tokens computed before."""


def write_table(log: Path, to: Path) -> int:
    """Write the steps of a log, of stock vLLM or a batch log, as CSV; how many."""
    count = 0
    with log.open(encoding="utf-8") as lines, to.open("w", newline="", encoding="utf-8") as out:
        rows = csv.writer(out)
        rows.writerow(COLUMNS)
        for line in whole_lines(lines):
            step = json.loads(line)
            if "work" in step:
                work = StepSample(*step["work"])
            else:
                work = StepSample.of((tokens, computed) for _, tokens, computed in step["ran"])
            if work.new_tokens:
                times = (f"{step[name]:.6f}" for name in ("now_s", "end_s", "cpu_s"))
                rows.writerow([*times, *(int(getattr(work, name)) for name in _WORK)])
                count += 1
    return count
