"""Restore from the memory of other hosts' daemons."""

from __future__ import annotations

import ctypes
import logging
import mmap
from collections.abc import Sequence

from ckpt.assemble import Part
from ckpt.daemon.memory import Held
from ckpt.daemon.ring import connected, held_from_json
from ckpt.errors import Corrupt, ManifestMissing
from ckpt.fetch import Fetched
from ckpt.hashing import damaged_chunks
from ckpt.manifest import File, Manifest
from ckpt.memory_tier import assemble_held
from ckpt.reading import Extent
from ftcore.base.log import event

log = logging.getLogger(__name__)


class PeerTier:
    """Asks every daemon once what it holds of this run. Unreachable ones are passed over."""

    name = "peers"
    is_partial = True

    def __init__(self, run: str, token: str, addresses: Sequence[str]) -> None:
        self._run, self._token = run, token
        self._held: dict[tuple[int, str], dict[int, tuple[str, Held]]] = {}
        self._from: list[tuple[str, Held, int]] = []
        for address in dict.fromkeys(addresses):
            try:
                self._ask(address)
            except OSError as error:
                event(log, "peer.unreachable", level=logging.WARNING, peer=address, error=error)

    def _ask(self, address: str) -> None:
        with connected(address) as channel:
            channel.send({"kind": "list", "run": self._run, "token": self._token})
            answer = channel.receive()
        for row in answer[0].get("held", []) if answer is not None else []:
            held = held_from_json(row)
            if held.digests:
                found = self._held.setdefault((held.step, held.attempt), {})
                found.setdefault(held.index, (address, held))

    def steps(self) -> list[tuple[int, str]]:
        return sorted(self._held)

    def manifest(self, step: int) -> Manifest:
        attempts = [a for s, a in self._held if s == step]
        if not attempts:
            raise ManifestMissing(f"no peer holds step {step}")
        rows = self._held[step, max(attempts)]
        parts: dict[int, Part] = {}
        self._from = []
        for index, (address, held) in sorted(rows.items()):
            files = {}
            for number, (file, digests) in enumerate(
                zip(held.layout.files, held.digests, strict=True)
            ):
                files[number] = File(f"{index}-{number}", file.size, digests)
                self._from.append((address, held, held.layout.pool_offsets[number]))
            parts[index] = Part(index=index, layout=held.layout, files=files, plain=held.plain)
        whole = assemble_held(parts)
        first = next(iter(rows.values()))[1]
        if whole is None:
            raise ManifestMissing(f"peers hold only a part of step {step}")
        return Manifest(
            step=step,
            attempt=max(attempts),
            created_unix_s=0.0,
            participants=first.count,
            files=whole.files,
            tensors=whole.tensors,
            values={str(i): p.plain for i, p in parts.items()},
            metrics=first.metrics,
        )

    def fetch(self, manifest: Manifest, extents: Sequence[Extent]) -> Fetched:
        fetched = Fetched()
        try:
            for extent in extents:
                mapped = mmap.mmap(-1, extent.end - extent.start)
                self._get(extent, memoryview(mapped))
                self._check(manifest, extent, memoryview(mapped))
                pinned = ctypes.c_char.from_buffer(mapped)
                held: list[object] = [pinned, mapped]
                fetched.callback(held.clear)
                fetched.add(extent.file, extent.start, extent.end, ctypes.addressof(pinned))
        except OSError as error:
            fetched.close()
            raise ManifestMissing(f"a peer was lost while it was read: {error}") from error
        except BaseException:
            fetched.close()
            raise
        return fetched

    def _get(self, extent: Extent, into: memoryview) -> None:
        address, held, offset = self._from[extent.file]
        with connected(address) as channel:
            channel.send(
                {
                    "kind": "get",
                    "run": self._run,
                    "token": self._token,
                    "index": held.index,
                    "step": held.step,
                    "attempt": held.attempt,
                    "start": offset + extent.start,
                    "end": offset + extent.end,
                }
            )
            answer = channel.receive()
            if answer is None or answer[0]["kind"] != "bytes":
                raise ConnectionError(f"{address} no longer holds step {held.step}")
            channel.receive_into(into)

    def _check(self, manifest: Manifest, extent: Extent, data: memoryview) -> None:
        chunk = manifest.chunk_bytes
        digests = manifest.files[extent.file].digests
        if damaged_chunks(data, digests, first=extent.start // chunk, chunk_bytes=chunk):
            raise Corrupt(f"{self._from[extent.file][0]} sent other bytes than were staged")
