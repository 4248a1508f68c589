"""Stands in for Ray's driver while nothing is asked of it, in a hundredth of its memory: ``python
resting.py DESCRIPTOR COMMAND...`` waits until the descriptor can be read, and becomes the command.
"""

import os
import select
import sys

if __name__ == "__main__":
    if sys.platform == "linux":  # for `ps`
        with open("/proc/self/comm", "w") as name:  # noqa: PTH123
            name.write("sluice-driver")
    select.select([int(sys.argv[1])], [], [])
    os.execv(sys.argv[2], sys.argv[2:])
