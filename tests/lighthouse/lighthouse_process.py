"""A real `lighthouse serve` that can be killed, stopped and restarted on its port."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parents[2]


class LighthouseProcess:
    def __init__(self, *options, bind="127.0.0.1:0", env=None):
        self.options, self.env = options, env or {}
        self.address = self.start(bind)

    def start(self, bind=None):
        command = [sys.executable, "-m", "lighthouse", "serve", "--bind", bind or self.address]
        command += ["--log-level", "WARNING", *self.options]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, cwd=ROOT, text=True, env={**os.environ, **self.env}
        )
        line = self.process.stdout.readline()
        assert line, f"lighthouse did not start: {self.process.wait()}"
        self.address = json.loads(line)["address"]
        return self.address

    def signal(self, number):
        self.process.send_signal(number)

    def get(self, path):
        with urllib.request.urlopen(f"http://{self.address}{path}", timeout=10) as answer:
            return answer.read().decode()

    def status(self):
        return json.loads(self.get("/status"))

    def stop(self):
        if self.process.poll() is None:
            self.signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()
        self.process.stdout.close()
