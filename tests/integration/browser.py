"""Chromium through the DevTools protocol, for tests of pages: go somewhere, wait for what a user must see, look.

A failure says what the page said. It needs Debian's chromium and the websockets package, which Prefect brings.
"""

import base64
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import psutil
import pytest
from websockets.sync.client import ClientConnection, connect

from tests.processes import debian_program

ANSWER_SECONDS = 60.0
"""Deadline of one command of the protocol."""
SEE_SECONDS = 120.0
"""Deadline of what a page is to show."""
WIDTH, HEIGHT = 1280, 900
_START_SECONDS = 180.0
_POLL_SECONDS = 0.2
_SETTLE_SECONDS = 0.7
"""Pages move things into place."""
_SAID_CHARS = 3000
_GONE = "Inspected target navigated or closed"
"""The protocol's words when the page that was asked has made way for the next one."""


class Page:
    """One tab."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._number = 0
        self.errors: list[str] = []
        """Exceptions of the pages' scripts."""
        for domain in ("Page", "Runtime"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command; fails with the answer when the browser refuses it."""
        self._number += 1
        self._connection.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        deadline = time.monotonic() + ANSWER_SECONDS
        while True:
            message = json.loads(self._connection.recv(timeout=max(0.1, deadline - time.monotonic())))
            if message.get("method") == "Runtime.exceptionThrown":
                self.errors.append(str(message["params"]["exceptionDetails"].get("exception", {}).get("description")))
            if message.get("id") == self._number:
                assert "error" not in message, f"{method}: {message['error']}"
                return dict(message["result"])

    def go(self, url: str, width: int = WIDTH, height: int = HEIGHT) -> None:
        """Open a URL in a window of this size; what it shows comes later."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Page.navigate", url="about:blank")  # a URL that differs after the # alone is no navigation
        if url.startswith("file:"):  # a page of the web may not open a file
            self.call("Page.navigate", url=url)
            return
        # Page.navigate would wait for the server's answer.
        self.call("Runtime.evaluate", expression=f"location.href = {json.dumps(url)}")

    def value(self, expression: str) -> Any:
        """What a JavaScript expression gives, as JSON; None when it throws, or the page makes way for another."""
        try:
            answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        except AssertionError as error:
            if _GONE in str(error):
                return None
            raise
        return answer["result"].get("value") if "exceptionDetails" not in answer else None

    @property
    def text(self) -> str:
        """What the page says, values of its fields included."""
        fields = "[...document.querySelectorAll('input, textarea')].map(one => one.value).join('\\n')"
        return str(self.value(f"document.body.innerText + '\\n' + {fields}") or "")

    def until(self, expectation: str, expression: str, seconds: float = SEE_SECONDS) -> Any:
        """The value of an expression once it is true; fails naming `what`, with the text of the page."""
        deadline = time.monotonic() + seconds
        while not (value := self.value(expression)):
            if time.monotonic() > deadline:
                self._fail(f"show {expectation}", seconds)
            time.sleep(_POLL_SECONDS)
        return value

    def sees(self, *texts: str, seconds: float = SEE_SECONDS) -> None:
        """Wait until the page says all of these, whatever their case."""
        deadline = time.monotonic() + seconds
        while missing := [text for text in texts if text.lower() not in self.text.lower()]:
            if time.monotonic() > deadline:
                self._fail(f"say {missing}", seconds)
            time.sleep(_POLL_SECONDS)

    def _fail(self, expectation: str, seconds: float) -> None:
        place = self.value("location.href")
        errors = "".join(f"\nscript error: {error}" for error in self.errors)
        pytest.fail(
            f"{place} did not {expectation} within {seconds:g} s. It said:\n{self.text[:_SAID_CHARS]}{errors}"
        )

    def fill(self, find: str, text: str) -> None:
        """Type into the field that a JavaScript expression finds, in place of what it holds.

        Again when the page, which may still be coming together, has put something else there.
        """
        deadline = time.monotonic() + SEE_SECONDS
        while True:
            self.until("a field to type into", f"(one => one && (one.focus(), one.select(), true))({find})")
            self.call("Input.insertText", text=text)
            time.sleep(_SETTLE_SECONDS)
            if self.value(f"({find})?.value") == text:
                return
            if time.monotonic() > deadline:
                self._fail(f"keep {text!r}", SEE_SECONDS)

    def click(self, text: str) -> None:
        """Click the innermost visible element whose whole text, or label, is this."""
        script = f"""(() => {{
            const says = one => [one.innerText?.trim(), one.getAttribute("aria-label")].includes({json.dumps(text)});
            const found = [...document.body.querySelectorAll("*")].find(one => one.getClientRects().length
                && says(one) && ![...one.children].some(says));
            found?.scrollIntoView({{block: "center"}});
            found?.click();
            return !!found;
        }})()"""
        self.until(f"something to click that says {text!r}", script)

    def picture(self, path: Path, *, selector: str = "", height: int = 0) -> None:
        """Write what the window shows as a PNG: all of it, or from the top of an element, or so many pixels high."""
        time.sleep(_SETTLE_SECONDS)
        size = self.value("({width: innerWidth, height: innerHeight})")
        clip = {"x": 0, "y": 0, **size, "scale": 1}
        if selector:
            box = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
            clip |= self.value(f"(box => ({{x: box.x, y: box.y, width: box.width, height: box.height}}))({box})")
        if height:
            clip["height"] = height
        data = self.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=bool(height))[
            "data"
        ]
        path.write_bytes(base64.b64decode(data))


@contextmanager
def browser() -> Iterator[Page]:
    """A browser with one empty page, without a window; gone at the end of the block."""
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as home:
        command = [
            debian_program("chromium"),
            "--headless=new",
            "--remote-debugging-port=0",
            f"--user-data-dir={home}",
        ]
        command += ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars"]
        command += ["--disable-background-networking", "--disable-component-update", "--disable-sync", "about:blank"]
        environment = {**os.environ, "HOME": home}
        with (Path(home) / "log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            port = _port(Path(home), process)
            with urlopen(Request(f"http://127.0.0.1:{port}/json/new", method="PUT"), timeout=60) as answer:
                address = json.load(answer)["webSocketDebuggerUrl"]
            with connect(address, max_size=None, compression=None, open_timeout=60) as connection:
                yield Page(connection)
        finally:
            for browser_process in [*psutil.Process(process.pid).children(recursive=True), process]:
                with suppress(psutil.NoSuchProcess):
                    browser_process.kill()
            process.wait(timeout=60)


def _port(home: Path, process: subprocess.Popen[bytes]) -> int:
    """The port that it listens on, which it writes into its home."""
    deadline = time.monotonic() + _START_SECONDS
    path = home / "DevToolsActivePort"
    while not path.exists() or "\n" not in path.read_text():
        if process.poll() is not None or time.monotonic() > deadline:
            pytest.fail(f"chromium did not start: {(home / 'log').read_text(errors='replace')[-2000:]}")
        time.sleep(0.1)
    return int(path.read_text().split("\n")[0])
