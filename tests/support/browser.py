"""A headless Chromium, controlled by the DevTools protocol over two pipes."""

import json
import os
import shutil
import subprocess

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
    "--disable-background-networking", "--no-first-run", "--remote-debugging-pipe",
)  # fmt: skip


class Browser:
    """A browser with one page. The events of the page are in `events`, as (method, parameters)."""

    def __init__(self, profile):
        """Start the browser; `profile` is a folder for its files."""
        reads, self.write = os.pipe()
        self.read, writes = os.pipe()
        script = f'exec "$@" 3<&{reads} 4>&{writes}'  # the browser reads from 3 and writes to 4
        command = ["bash", "-c", script, "bash", CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(
            command, pass_fds=(reads, writes), env={**os.environ, "HOME": str(profile)}, **quiet
        )
        os.close(reads)
        os.close(writes)
        self.calls, self.session, self.buffer, self.events = 0, None, b"", []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        os.close(self.read)
        os.close(self.write)

    def receive(self):
        """Return the next message of the browser."""
        while b"\0" not in self.buffer:
            data = os.read(self.read, 1 << 20)
            assert data, "the browser has exited"
            self.buffer += data
        message, _, self.buffer = self.buffer.partition(b"\0")
        found = json.loads(message)
        if "method" in found:
            self.events.append((found["method"], found["params"]))
        return found

    def call(self, method, **params):
        """Call a method of the protocol and return its result."""
        self.calls += 1
        message = {"id": self.calls, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.write, json.dumps(message).encode() + b"\0")
        while (found := self.receive()).get("id") != self.calls:
            pass
        assert "result" in found, found
        return found["result"]

    def open(self, path, width=1200):
        """Load a file in a window of a given size; forget earlier events."""
        self.events.clear()
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.call("Page.navigate", url=path.as_uri())
        while "Page.loadEventFired" not in dict(self.events):
            self.receive()

    def value(self, expression):
        """Return the value of a JavaScript expression."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def messages(self):
        """Return messages and errors of the console since the page was opened."""
        kinds = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [params for method, params in self.events if method in kinds]

    def requests(self):
        """Return the URLs requested since the page was opened, the page's own included, without its data URLs."""
        urls = [params["request"]["url"] for method, params in self.events if method == "Network.requestWillBeSent"]
        return [url for url in urls if not url.startswith("data:")]
