"""Chromium without a screen, spoken to by its DevTools protocol."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect

from tests.waiting import deadline_s

LIMIT_S = deadline_s(120)
KEYS = {"Tab": 9, "Enter": 13, "ArrowRight": 39, "ArrowLeft": 37, "End": 35, "Home": 36, " ": 32}


class Tab:
    """A tab of the browser. `said` has what scripts wrote to the console and threw, `refused` what the policy
    of the page kept from running."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._number = 0
        self.said: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Accessibility"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=LIMIT_S))
            if message.get("id") == self._number:
                assert "error" not in message, message["error"]
                return message["result"]
            self._heard(message)

    def _heard(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.said.append(f"{details['text']} {details.get('exception', {}).get('description', '')}")
        elif message.get("method") == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.said.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif message.get("method") == "Runtime.consoleAPICalled":
            self.said.append(str(params["args"]))

    def eval(self, expression: str) -> Any:
        result = self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True, userGesture=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, expression: str, what: str = "") -> None:
        """Until an expression is true."""
        deadline = time.monotonic() + LIMIT_S
        while not self.eval(f"Boolean({expression})"):
            assert time.monotonic() < deadline, (
                f"{what or expression}; said: {self.said}; {self.eval('document.body.innerText')[:600]}"
            )
            time.sleep(0.02)

    def open(self, url: str) -> None:
        self.send("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def press(self, key: str) -> None:
        text = {"Enter": "\r", " ": " "}.get(key)
        for kind in ("keyDown", "keyUp"):
            more: dict[str, Any] = {"text": text} if text and kind == "keyDown" else {}
            more |= {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key]}
            self.send("Input.dispatchKeyEvent", type=kind, **more)

    def size(self, width: int, height: int, theme: str = "light") -> None:
        shape = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", **shape)
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])

    def picture(self, path: Path, *, whole: bool = False) -> None:
        options = {"captureBeyondViewport": whole, "format": "png"}
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", **options)["data"]))

    def controls(self) -> list[tuple[str, str]]:
        """The role and the name of each control in the accessibility tree."""
        roles = {"button", "link", "textbox", "searchbox", "combobox", "checkbox", "meter", "region", "image"}
        return [
            (node["role"]["value"], node.get("name", {}).get("value", "").strip())
            for node in self.send("Accessibility.getFullAXTree")["nodes"]
            if not node.get("ignored") and node["role"]["value"] in roles
        ]


@contextmanager
def chromium() -> Iterator[Tab]:
    """A tab of a browser of its own. A test that wants one is skipped where there is no Chromium."""
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("needs chromium (`make packages`)")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [program, "--headless=new", "--remote-debugging-port=0", f"--user-data-dir={profile}"]
        command += ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        command += ["--disable-background-networking", "--disable-component-update", "--window-size=1280,900"]
        browser = subprocess.Popen(
            [*command, "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            port = _port(Path(profile) / "DevToolsActivePort", browser)
            yield from _tab(port)
        finally:
            browser.terminate()
            browser.wait(LIMIT_S)


def _port(path: Path, browser: subprocess.Popen[bytes]) -> int:
    deadline = time.monotonic() + LIMIT_S
    while True:
        assert browser.poll() is None, "chromium ended"
        assert time.monotonic() < deadline, "chromium does not listen"
        lines = path.read_text().splitlines() if path.exists() else []
        if len(lines) > 1:
            return int(lines[0])
        time.sleep(0.02)


def _tab(port: int) -> Iterator[Tab]:
    import urllib.request

    with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=LIMIT_S) as answer:
        (target,) = [each for each in json.load(answer) if each["type"] == "page"]
    with connect(target["webSocketDebuggerUrl"], max_size=None, proxy=None) as socket:
        yield Tab(socket)
