"""Closes plain TCP connections to hosts that have vanished."""

from __future__ import annotations

import socket

DEAD_AFTER_S = 30
"""Silence of the other host after which the system ends a connection, seconds: a host that vanished
closes no connection. A program that hangs is not detected: its host's kernel still answers."""


def notice_dead_host(connection: socket.socket | None) -> None:
    """Have the system end a connection whose other host has vanished."""
    if connection is None:
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # Not every system has all of these options; without them the system's own times apply.
    for name, value in (
        ("TCP_KEEPIDLE", DEAD_AFTER_S // 3),
        ("TCP_KEEPINTVL", DEAD_AFTER_S // 3),
        ("TCP_KEEPCNT", 2),
        ("TCP_USER_TIMEOUT", 1000 * DEAD_AFTER_S),
    ):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
