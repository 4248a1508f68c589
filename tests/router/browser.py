"""A headless Chromium, driven over its DevTools connection: a few commands, for which Playwright
would bring Node.js along."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect

from tests.lacking import lacking

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
WAIT_S = 120.0


def find() -> str:
    """Chromium's path. Without one the test is skipped, but never in CI."""
    for name in NAMES:
        path = shutil.which(name)
        if path is not None:
            return path
    lacking(f"no browser is installed; any of these will do: {', '.join(NAMES)}")


class Tab:
    """One page. What it complains about and what it asks for is kept."""

    def __init__(self, wire: ClientConnection, session: str, numbers: Iterator[int]) -> None:
        self._wire = wire
        self._session = session
        self._numbers = numbers
        self.complaints: list[str] = []
        self.requested: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Have the browser do something; its answer."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params, "sessionId": self._session}
        self._wire.send(json.dumps(message))
        while True:
            heard = json.loads(self._wire.recv(timeout=WAIT_S))
            if heard.get("id") == number:
                assert "error" not in heard, heard["error"]
                return dict(heard["result"])
            self._note(heard.get("method"), heard.get("params", {}))

    def _note(self, method: str | None, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.complaints.append(json.dumps(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requested.append(params["request"]["url"])

    def size(self, width: int, height: int, phone: bool = False, dark: bool = False) -> None:
        """Look like a window of this size."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def go(self, url: str) -> None:
        """Open an address."""
        self.call("Page.navigate", url=url)

    def eval(self, code: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=code, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def text(self, selector: str) -> str:
        """What an element shows; nothing where there is none."""
        shown = self.eval(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")
        return str(shown).replace("\u00a0", " ")

    def until(self, code: str) -> None:
        """Wait until an expression holds in the page."""
        deadline = time.monotonic() + WAIT_S
        while not self.eval(f"document.readyState === 'complete' && Boolean({code})"):
            if time.monotonic() > deadline:
                seen = self.eval("document.body.innerText")
                pytest.fail(f"waited in vain: {code}\n{seen}\n{self.complaints}")
            time.sleep(0.05)

    def click(self, selector: str) -> None:
        """Click an element once it is there and takes clicks: a disabled button ignores them."""
        element = f"document.querySelector({json.dumps(selector)})"
        self.until(f"{element} && !{element}.disabled")
        self.eval(f"{element}.click()")

    def enter(self, selector: str, text: str) -> None:
        """Type into a field and send its form."""
        self.eval(
            f"(() => {{ const field = document.querySelector({json.dumps(selector)});"
            f"field.value = {json.dumps(text)}; field.form.requestSubmit(); }})()"
        )

    def picture(self, path: Path) -> None:
        """Save what the window shows, PNG."""
        shot = self.call("Page.captureScreenshot")
        path.write_bytes(base64.b64decode(shot["data"]))


class Browser:
    """A running browser. Each tab begins with an empty session."""

    def __init__(self, wire: ClientConnection) -> None:
        self._wire = wire
        self._numbers = itertools.count(1)

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        self._wire.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            heard = json.loads(self._wire.recv(timeout=WAIT_S))
            if heard.get("id") == number:
                return dict(heard["result"])

    @contextmanager
    def tab(self, width: int = 1280, height: int = 900, **look: bool) -> Iterator[Tab]:
        """A new tab."""
        context = self._call("Target.createBrowserContext")["browserContextId"]
        target = self._call("Target.createTarget", url="about:blank", browserContextId=context)
        session = self._call("Target.attachToTarget", targetId=target["targetId"], flatten=True)[
            "sessionId"
        ]
        tab = Tab(self._wire, session, self._numbers)
        tab.size(width, height, **look)
        try:
            yield tab
        finally:
            self._call("Target.disposeBrowserContext", browserContextId=context)


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser until the block ends."""
    with tempfile.TemporaryDirectory(
        prefix="sluice-browser-", ignore_cleanup_errors=True
    ) as folder:
        process = subprocess.Popen(
            [
                find(),
                "--headless",
                "--no-sandbox",  # which a container's root cannot have
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--no-first-run",
                "--disable-background-networking",
                "--remote-debugging-port=0",
                f"--user-data-dir={folder}",
                "about:blank",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            # Between tests nobody reads, so that answers to pings wait behind the browser's events.
            options: dict[str, Any] = {"max_size": 64 << 20, "proxy": None, "ping_interval": None}
            with connect(_address(Path(folder), process), **options) as wire:
                yield Browser(wire)
        finally:
            # With its helpers, which outlive it where it is only asked to end.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(WAIT_S)


def _address(folder: Path, process: subprocess.Popen[bytes]) -> str:
    """Where the browser listens, once it does: it writes that down."""
    told = folder / "DevToolsActivePort"
    deadline = time.monotonic() + WAIT_S
    while True:
        lines = told.read_text(encoding="utf-8").split() if told.exists() else []
        if len(lines) == 2:
            return f"ws://127.0.0.1:{lines[0]}{lines[1]}"
        assert process.poll() is None, "the browser ended at once"
        assert time.monotonic() < deadline, "the browser did not start"
        time.sleep(0.02)
