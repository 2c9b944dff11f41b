"""Restore from what the daemon of this host still holds in shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from ckpt.assemble import Part, Whole, shapes_of, tensors_of, written
from ckpt.client import Client
from ckpt.errors import ManifestMissing
from ckpt.fetch import Fetched
from ckpt.manifest import File, Manifest
from ckpt.plan import Layout, layout_from_json
from ckpt.reading import Extent
from ckpt.region import Region


class MemoryTier:
    """Asks once and keeps the memory mapped until `close`."""

    name = "memory"
    is_partial = True

    def __init__(self, client: Client) -> None:
        self._stack = ExitStack()
        message, fds = client.ask({"kind": "memory"})
        self._held: dict[int, list[tuple[dict[str, Any], Layout, Region]]] = {}
        for row, fd in zip(message["held"], fds, strict=True):
            region = self._stack.enter_context(Region(fd, row["size"]))
            layout = layout_from_json(row["layout"])
            self._held.setdefault(row["step"], []).append((row, layout, region))

    def steps(self) -> list[tuple[int, str]]:
        return [(step, rows[0][0]["attempt"]) for step, rows in sorted(self._held.items())]

    def manifest(self, step: int) -> Manifest:
        """As if the step had been written: every participant here wrote all that it holds. Ranks
        that need what lies on another host find it incomplete and look in the next tier."""
        rows = self._held[step]
        newest = max(row["attempt"] for row, _, _ in rows)
        parts: dict[int, Part] = {}
        regions: list[tuple[Region, int, int]] = []
        for row, layout, region in rows:
            if row["attempt"] == newest:
                files = {
                    n: File(str(len(regions)), f.size, b"") for n, f in enumerate(layout.files)
                }
                parts[row["index"]] = Part(
                    index=row["index"], layout=layout, files=files, plain=row["plain"]
                )
                regions += [
                    (region, offset, file.size)
                    for offset, file in zip(layout.pool_offsets, layout.files, strict=True)
                ]
        whole = assemble_held(parts)
        if whole is None:
            raise ManifestMissing(f"memory holds only a part of step {step}")
        self._images = regions
        return Manifest(
            step=step,
            attempt=newest,
            created_unix_s=0.0,
            participants=rows[0][0]["count"],
            files=whole.files,
            tensors=whole.tensors,
            values={str(i): p.plain for i, p in parts.items()},
            metrics=rows[0][0]["metrics"],
        )

    def fetch(self, manifest: Manifest, extents: Sequence[Extent]) -> Fetched:
        fetched = Fetched()
        for number, (region, offset, size) in enumerate(self._images):
            fetched.add(number, 0, size, region.address + offset)
        return fetched

    def close(self) -> None:
        self._stack.close()


def assemble_held(parts: dict[int, Part]) -> Whole | None:
    """All pieces of these parts as one step. Tensors may be incomplete; readers notice."""
    shapes = shapes_of({i: p.layout for i, p in parts.items()})
    if not isinstance(shapes, dict):
        return None
    order, pieces = written(parts)
    files = tuple(parts[i].files[n] for i, n in order)
    return Whole(
        files=files, tensors=tensors_of(shapes, pieces, [p.layout for p in parts.values()])
    )
