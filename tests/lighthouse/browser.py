"""A real headless Chromium, driven over its own debugging protocol."""

import asyncio
import base64
import itertools
import json
import os
import re
import shutil
from contextlib import asynccontextmanager

import aiohttp
import pytest

FLAGS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--disable-quic"]
FLAGS += ["--remote-debugging-port=0", "about:blank"]


def require_chromium():
    if shutil.which("chromium") is None:
        assert not os.environ.get("CI"), "chromium is missing: apt-get install chromium"
        pytest.skip("chromium is not installed (Debian: chromium)")


class Page:
    def __init__(self, socket):
        self._socket, self._ids = socket, itertools.count(1)
        self.problems = []

    async def call(self, method, **arguments):
        wanted = next(self._ids)
        await self._socket.send_json({"id": wanted, "method": method, "params": arguments})
        while True:
            message = json.loads((await self._socket.receive()).data)
            if message.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.problems.append(message["params"])
            if message.get("id") == wanted:
                assert "error" not in message, message
                return message["result"]

    async def run(self, script):
        """The value of a JavaScript expression in the page."""
        answer = await self.call("Runtime.evaluate", expression=script, awaitPromise=True)
        return answer["result"].get("value")

    async def text(self):
        return await self.run("document.body.innerText")

    async def until_text(self, wanted):
        while not re.search(wanted, await self.text() or ""):
            await asyncio.sleep(0.05)

    async def look_like(self, *, width=1100, height=800, is_phone=False, scheme="light"):
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if is_phone else 1,
            mobile=is_phone,
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def screenshot(self, path):
        answer = await self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(answer["data"]))


@asynccontextmanager
async def browser_page(directory):
    """One page of a new browser, with its problems (script errors, refused loads) collected."""
    require_chromium()
    process = await asyncio.create_subprocess_exec(
        "chromium",
        f"--user-data-dir={directory}",
        *FLAGS,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        line = b""
        while b"DevTools listening on" not in line:
            line = await process.stderr.readline()
            assert line, "chromium ended"
        drain = asyncio.create_task(process.stderr.read())
        port = re.search(rb"127.0.0.1:(\d+)", line)[1].decode()
        async with aiohttp.ClientSession() as http:
            async with http.get(f"http://127.0.0.1:{port}/json/list") as answer:
                targets = await answer.json()
            url = next(t["webSocketDebuggerUrl"] for t in targets if t["type"] == "page")
            async with http.ws_connect(url, max_msg_size=0) as socket:
                page = Page(socket)
                for domain in ("Runtime", "Log", "Page"):
                    await page.call(f"{domain}.enable")
                yield page
        drain.cancel()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
