"""Real processes for tests: a lighthouse, and Prometheus."""

import json
import subprocess
import sys
import urllib.parse
import urllib.request

from tests.deploy.tools import ROOT


def get(url):
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode()


class LighthouseProcess:
    """`lighthouse serve` on a free port of loopback."""

    def __init__(self, *options):
        command = [sys.executable, "-m", "lighthouse", "serve", "--bind", "127.0.0.1:0"]
        self.process = subprocess.Popen(
            [*command, "--log-level", "WARNING", *options],
            stdout=subprocess.PIPE,
            cwd=ROOT,
            text=True,
        )
        line = self.process.stdout.readline()
        assert line, f"the lighthouse did not start: {self.process.wait()}"
        self.address = json.loads(line)["address"]

    def get(self, path):
        return get(f"http://{self.address}{path}")

    def status(self):
        return json.loads(self.get("/status"))

    def stop(self):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
