"""Drive the Chromium of `make chromium` by the DevTools protocol, for the tests of the viewer's page."""

import asyncio
import base64
import json
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.waiting import wait_until

SECONDS = 60.0
ROOT = Path(__file__).resolve().parents[2] / ".peers" / "chromium" / "root"
PROGRAM = ROOT / "usr" / "lib" / "chromium" / "chromium"
FONTS = """<?xml version="1.0"?><!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir>{root}/usr/share/fonts</dir><cachedir>{cache}</cachedir></fontconfig>"""


class Tab:
    """One page of the browser. `errors` collects uncaught exceptions and error messages of its console."""

    def __init__(self, browser: "Browser", session: str) -> None:
        self._browser = browser
        self._session = session
        self.errors: list[str] = []

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        return await self._browser.send(method, params, self._session)

    def on_event(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"])[:2000])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            self.errors.append(json.dumps(params["args"])[:2000])
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(json.dumps(params["entry"])[:2000])

    async def open(self, url: str) -> None:
        await self.send("Page.navigate", url=url)

    async def evaluate(self, script: str) -> Any:
        """Return the value of a JavaScript expression; a promise is awaited."""
        done = await self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    async def wait_for(self, script: str) -> None:
        """Evaluate an expression until it is true."""

        async def true() -> bool:
            with suppress(AssertionError):  # the page may not be there yet
                return bool(await self.evaluate(f"!!({script})"))
            return False

        try:
            await wait_until(true, SECONDS)
        except TimeoutError:
            raise AssertionError(f"not true after {SECONDS} s: {script}; page: {await self.text()}") from None

    async def text(self) -> str:
        return str(await self.evaluate("document.body?.innerText ?? ''"))

    async def wait_for_text(self, text: str) -> None:
        await self.wait_for(f"document.body.innerText.includes({json.dumps(text)})")

    async def click(self, selector: str) -> None:
        await self.wait_for(f"!!document.querySelector({json.dumps(selector)})")
        await self.evaluate(f"document.querySelector({json.dumps(selector)}).click()")

    async def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            text = key if len(key) == 1 else "\r" if key == "Enter" else None
            params = {"type": kind, "key": key, **({"text": text} if text and kind == "keyDown" else {})}
            await self.send("Input.dispatchKeyEvent", **params)

    async def type(self, text: str) -> None:
        await self.send("Input.insertText", text=text)

    async def screenshot(self, path: Path) -> None:
        shot = await self.send("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(shot["data"]))


class Browser:
    """A connection to a running Chromium."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._number = 0
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._tabs: dict[str, Tab] = {}
        self.reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self._socket:
            data = json.loads(message.data)
            if "id" in data:
                future = self._waiting.pop(data["id"])
                if not future.done():
                    future.set_result(data)
            elif (tab := self._tabs.get(data.get("sessionId", ""))) is not None:
                tab.on_event(data["method"], data["params"])

    async def send(self, method: str, params: dict[str, Any], session: str | None = None) -> dict[str, Any]:
        self._number += 1
        future = self._waiting[self._number] = asyncio.get_running_loop().create_future()
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        await self._socket.send_json({**message, "sessionId": session} if session else message)
        async with asyncio.timeout(SECONDS):
            answer = await future
        assert "error" not in answer, (method, answer)
        return dict(answer["result"])

    async def new_tab(self, width: int = 1280, height: int = 800, *, dark: bool = False) -> Tab:
        target = await self.send("Target.createTarget", {"url": "about:blank"})
        attached = await self.send("Target.attachToTarget", {"targetId": target["targetId"], "flatten": True})
        tab = self._tabs[attached["sessionId"]] = Tab(self, attached["sessionId"])
        for method in ("Page.enable", "Runtime.enable", "Log.enable"):
            await tab.send(method)
        await tab.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await tab.send("Emulation.setEmulatedMedia", features=[scheme])
        return tab


@asynccontextmanager
async def start_browser(folder: Path) -> AsyncIterator[Browser]:
    """Start Chromium with a profile in `folder`; end it and its child processes at the end of the block."""
    if not PROGRAM.is_file():
        pytest.skip("Chromium is not installed: make chromium")
    profile, libraries = folder / "profile", ROOT / "usr" / "lib" / "x86_64-linux-gnu"
    fonts = folder / "fonts.conf"
    fonts.write_text(FONTS.format(root=ROOT.resolve(), cache=folder / "fontcache"))
    process = await asyncio.create_subprocess_exec(
        PROGRAM,
        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "--remote-debugging-port=0"),
        *(f"--user-data-dir={profile}", "about:blank"),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
        env={
            **os.environ,
            "LD_LIBRARY_PATH": f"{libraries}:{libraries / 'pulseaudio'}",
            "FONTCONFIG_FILE": str(fonts),
            "HOME": str(folder),
        },
    )
    try:
        async with asyncio.timeout(SECONDS):
            port_file = profile / "DevToolsActivePort"
            await wait_until(
                lambda: (
                    process.returncode is not None or (port_file.exists() and port_file.read_text().count("\n"))
                )
            )
            assert process.returncode is None, "Chromium ended at its start"
        port, path = port_file.read_text().split()
        url = f"ws://127.0.0.1:{port}{path}"
        async with aiohttp.ClientSession() as http, http.ws_connect(url, max_msg_size=0) as socket:
            browser = Browser(socket)
            try:
                yield browser
            finally:
                browser.reading.cancel()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        shutil.rmtree(profile, ignore_errors=True)


async def take_screenshots(url: str, pages: dict[str, str], out: Path, *, dark: bool = False) -> None:
    """Write a screenshot of each page, given by the fragment of its URL. For people who look at them."""
    out.mkdir(parents=True, exist_ok=True)
    async with start_browser(out) as browser:
        tab = await browser.new_tab(1400, 900, dark=dark)
        for name, fragment in pages.items():
            await tab.open(f"{url}{fragment}")
            await tab.wait_for("document.querySelector('main') && !document.querySelector('[aria-busy]')")
            await tab.wait_for("document.getAnimations().every(one => one.playState !== 'running')")
            await tab.screenshot(out / f"{name}.png")
        print("\n".join(tab.errors) or "no errors", file=sys.stderr)
