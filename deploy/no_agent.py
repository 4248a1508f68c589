"""Stands in for the agent of Ray's dashboard, without which a node ends: it says that nothing
listens, and ends with the node."""

import os
import sys
import time

options = dict(word[2:].split("=", 1) for word in sys.argv[1:] if "=" in word)
node = os.getppid()
for service in ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port"):
    path = os.path.join(options["session-dir"], f"{service}_{options['node-id']}")  # noqa: PTH118
    with open(f"{path}.new", "w") as file:  # noqa: PTH123
        file.write("-1")
    os.rename(f"{path}.new", path)  # noqa: PTH104
while os.getppid() == node:
    time.sleep(1)
