"""Count what the daemon does, and answer it in the Prometheus text format."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

HELP = {
    "ft_ckpt_bytes_total": ("counter", "Bytes by phase (hash, write) and tier."),
    "ft_ckpt_seconds_total": ("counter", "Seconds spent by phase and tier, summed over threads."),
    "ft_ckpt_saves_total": ("counter", "Saves that became durable, by tier."),
    "ft_ckpt_failures_total": ("counter", "Saves that failed, by tier and reason."),
    "ft_ckpt_durable_step": ("gauge", "Newest durable step, by tier."),
    "ft_ckpt_durable_created_unix_seconds": (
        "gauge",
        "When the newest durable step was staged, by tier: now minus this is its age.",
    ),
    "ft_ckpt_durable_age_seconds": ("gauge", "Age of the newest durable step, by tier."),
    "ft_ckpt_durable_seconds": ("gauge", "From save to durable, of the newest step, by tier."),
    "ft_ckpt_step_bytes": ("gauge", "Stored bytes of the newest durable step, by tier."),
    "ft_ckpt_memory_bytes": ("gauge", "Staging memory that the daemon holds."),
    "ft_ckpt_lost_seconds_total": ("counter", "Training time that saves took, as trainers report."),
    "ft_ckpt_staging_seconds_total": ("counter", "Seconds spent copying, as trainers report."),
    "ft_ckpt_staging_bytes_total": ("counter", "Bytes copied, as trainers report."),
}
Labels = tuple[tuple[str, str], ...]


class Metrics:
    """Thread-safe counters and gauges with bounded labels."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[tuple[str, Labels], float] = {}
        self._first_s = time.time()

    def add(self, name: str, value: float, **labels: str) -> None:
        key = (name, tuple(sorted(labels.items())))
        with self._lock:
            self._values[key] = self._values.get(key, 0.0) + value

    def set(self, name: str, value: float, **labels: str) -> None:
        with self._lock:
            self._values[name, tuple(sorted(labels.items()))] = value

    def observe(self, phase: str, tier: str, nbytes: int, seconds: float) -> None:
        self.add("ft_ckpt_bytes_total", nbytes, phase=phase, tier=tier)
        self.add("ft_ckpt_seconds_total", seconds, phase=phase, tier=tier)

    def durable(
        self, tier: str, step: int, nbytes: int, seconds: float, created_unix_s: float
    ) -> None:
        self.add("ft_ckpt_saves_total", 1, tier=tier)
        self.set("ft_ckpt_durable_step", step, tier=tier)
        self.set("ft_ckpt_durable_created_unix_seconds", created_unix_s, tier=tier)
        self.set("ft_ckpt_durable_seconds", seconds, tier=tier)
        self.set("ft_ckpt_step_bytes", nbytes, tier=tier)

    def failed(self, tier: str, reason: str) -> None:
        self.add("ft_ckpt_failures_total", 1, tier=tier, reason=reason)

    def snapshot(self) -> dict[tuple[str, Labels], float]:
        with self._lock:
            values = dict(self._values)
        for (name, labels), value in list(values.items()):
            if name == "ft_ckpt_durable_created_unix_seconds":
                values["ft_ckpt_durable_age_seconds", labels] = time.time() - value
        return values

    def exposition(self) -> str:
        return "\n".join(_lines(self.snapshot())) + "\n"


def _lines(values: dict[tuple[str, Labels], float]) -> Iterable[str]:
    for name, (kind, text) in HELP.items():
        rows = [(labels, value) for (n, labels), value in sorted(values.items()) if n == name]
        if not rows:
            continue
        yield f"# HELP {name} {text}"
        yield f"# TYPE {name} {kind}"
        for labels, value in rows:
            inner = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels)
            yield f"{name}{{{inner}}} {value:.17g}" if inner else f"{name} {value:.17g}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def serve(metrics: Metrics, *, address: tuple[str, int]) -> ThreadingHTTPServer:
    """Answer `GET /metrics` on `address` until the server is shut down."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = self.path.partition("?")[0] == "/metrics"
            body = metrics.exposition().encode() if found else b"see /metrics\n"
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            return

    server = ThreadingHTTPServer(address, Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="ckpt-metrics", daemon=True).start()
    return server
