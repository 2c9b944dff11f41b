"""Figures as Markdown: seconds as measured, and ratios to the limits of the same minutes."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

COLUMNS = [
    ("call", lambda r: ms(r["call_s"])),
    ("staged", lambda r: f"{ms(r['staged_s'])} ({r['staged_s'] / r['limit_copy_s']:.2f})"),
    ("durable", lambda r: f"{ms(r['durable_s'])} ({r['durable_s'] / bound(r):.2f})"),
    ("first: call / durable", lambda r: f"{ms(r['first_call_s'])} / {ms(r['first_durable_s'])}"),
    ("load warm", lambda r: f"{ms(r['load_warm_s'])} ({gbs(r, 'load_warm_s')})"),
    ("load cold", lambda r: f"{ms(r['load_cold_s'])} ({cold(r):.2f})"),
    ("lost matmul / Python", lambda r: f"{ms(r.get('lost_matmul_s'))} / {lost_python(r)}"),
    ("memory", lambda r: f"{r['extra_bytes'] / r['bytes']:.2f}"),
    ("disk", lambda r: f"{r['disk_bytes'] / r['bytes']:.3f}"),
]
NOTE = """In brackets: staged as a multiple of a two-thread memcpy, durable as a multiple of that
memcpy plus an O_DIRECT write with fsync (4 threads), cold load as a share of a raw
read with 4 threads, each measured between the saves of the same run. Milliseconds; medians.
Memory and disk as multiples of the state; memory is the peak of the first save over what was there
before it. Durable includes an fsync that some peers leave out."""


def bound(row: Mapping[str, Any]) -> float:
    return float(row["limit_copy_s"] + row["limit_write_s"])


def cold(row: Mapping[str, Any]) -> float:
    return float(row["limit_read_cold_s"] / row["load_cold_s"])


def lost_python(row: Mapping[str, Any]) -> str:
    return ms(row.get("lost_python_s"))


def ms(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return f"{seconds * 1e3:.1f}" if abs(seconds) < 0.01 else f"{seconds * 1e3:,.0f}"


def gbs(row: Mapping[str, Any], key: str) -> str:
    return f"{row['bytes'] / row[key] / 1e9:.2f} GB/s"


def markdown(rows: Sequence[Mapping[str, Any]], failures: Iterable[Sequence[str]]) -> str:
    lines = [conditions(), ""]
    for size in dict.fromkeys(str(r["size"]) for r in rows):
        of_size = [r for r in rows if r["size"] == size]
        lines += [f"### {size}: {of_size[0]['bytes'] / 1e9:.2f} GB", "", limits_line(of_size), ""]
        lines += ["| | " + " | ".join(name for name, _ in COLUMNS) + " |"]
        lines += ["|---" * (len(COLUMNS) + 1) + "|"]
        lines += [table_line(row) for row in of_size]
        lines.append("")
    lines += [f"- {name}, {size}: {why}" for name, size, why in failures]
    return "\n".join([*lines, "", NOTE])


def ranks_table(rows: Sequence[Mapping[str, Any]], failures: Iterable[Sequence[str]]) -> str:
    """Two ranks; in brackets the same ratios to the limits as above."""
    lines = [conditions(), ""]
    if rows:
        lines += [f"2 ranks, {rows[0]['bytes'] / 1e9:.2f} GB together. {limits_line(rows)}", ""]
    lines += ["| | staged | durable |", "|---|---|---|"]
    for row in rows:
        staged, durable = (f(row) for name, f in COLUMNS if name in ("staged", "durable"))
        lines.append(f"| {row['name']} | {staged} | {durable} |")
    return "\n".join([*lines, "", *(f"- {name}, {size}: {why}" for name, size, why in failures)])


def table_line(row: Mapping[str, Any]) -> str:
    wrong = "" if row["loads_same_bits"] else " (loads other bits)"
    return f"| {row['name']}{wrong} | " + " | ".join(f(row) for _, f in COLUMNS) + " |"


def limits_line(rows: Sequence[Mapping[str, Any]]) -> str:
    def span(key: str) -> str:
        rates = sorted(r["bytes"] / r[key] / 1e9 for r in rows)
        return f"{rates[0]:.2f} to {rates[-1]:.2f} GB/s"

    return (
        f"Limits: memcpy, 2 threads {span('limit_copy_s')}; O_DIRECT and fsync "
        f"{span('limit_write_s')}; read cold {span('limit_read_cold_s')}, warm "
        f"{span('limit_read_warm_s')}."
    )


def conditions() -> str:
    import torch

    where = f"{os.cpu_count()} cores, Linux {platform.release()}"
    return f"{where}, Python {platform.python_version()}, torch {torch.__version__}."
