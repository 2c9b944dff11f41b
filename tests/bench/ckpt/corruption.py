"""Damage a step in every way, thousands of times: `python -m tests.bench.ckpt.corruption`.

Each trial damages the newest of two steps at random. Restoring that step must raise and leave the
target as it was; restoring the newest must give the step before it, bit by bit. Prints a table.
"""

from __future__ import annotations

import collections
import logging
import os
import random
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click
import torch

from ckpt import Checkpointer
from ckpt.capture import Place, Planner
from ckpt.errors import CheckpointError
from ckpt.listing import read_manifest
from ckpt.loading import Request
from ckpt.manifest import Manifest
from ckpt.meet import Alone
from ckpt.restore import Restorer
from ckpt.stores import open_store
from ckpt.tiers import StoreTier


def make_state(seed: int) -> dict[str, object]:
    """Large and small tensors of several kinds, and plain values, all different by `seed`."""
    torch.manual_seed(seed)
    tensors: dict[str, object] = {f"large{i}": torch.randn(200, 300) for i in range(6)}
    tensors |= {f"small{i}": torch.randn(i + 1) for i in range(40)}
    kinds = {"half": torch.bfloat16, "bytes": torch.uint8, "ints": torch.int64}
    tensors |= {n: (torch.rand(70, 90) * 100).to(kind) for n, kind in kinds.items()}
    return {"model": tensors, "extra": {"seed": seed, "text": "x" * (50 + seed)}}


def bits(state: dict[str, object]) -> list[object]:
    model, extra = state["model"], state["extra"]
    assert isinstance(model, dict) and isinstance(extra, dict)
    return [t.view(-1).view(torch.uint8).tolist() for t in model.values()] + [dict(extra)]


@dataclass(frozen=True)
class Step:
    """A step on the disk, to be damaged."""

    directory: Path
    manifest: Manifest
    other: Path  # the step before it

    @property
    def manifest_file(self) -> Path:
        return self.directory / "manifest.ckpt"

    def file(self, rng: random.Random) -> Path:
        return self.directory / rng.choice(self.manifest.files).key


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def flip_in(path: Path, rng: random.Random, start: int, end: int) -> None:
    flip(path, rng.randrange(start * 8, end * 8))


def data_start(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def flip_payload(step: Step, rng: random.Random) -> None:
    tensor = rng.choice([t for t in step.manifest.tensors.values() if t.pieces])
    piece = rng.choice(tensor.pieces)
    path = step.directory / step.manifest.files[piece.file].key
    flip_in(path, rng, piece.offset, piece.offset + piece.nbytes)


def flip_header_length(step: Step, rng: random.Random) -> None:
    flip_in(step.file(rng), rng, 0, 8)


def flip_header(step: Step, rng: random.Random) -> None:
    path = step.file(rng)
    flip_in(path, rng, 8, data_start(path))


def flip_padding(step: Step, rng: random.Random) -> None:
    """Bytes of a file that belong to no tensor."""
    path = step.file(rng)
    number = [f.key for f in step.manifest.files].index(path.name)
    used = bytearray(path.stat().st_size)
    used[: data_start(path)] = b"\1" * data_start(path)
    for tensor in step.manifest.tensors.values():
        for p in (p for p in tensor.pieces if p.file == number):
            used[p.offset : p.offset + p.nbytes] = b"\1" * p.nbytes
    free = [i for i, is_used in enumerate(used) if not is_used] or [len(used) - 1]
    flip(path, rng.choice(free) * 8 + rng.randrange(8))


def flip_manifest_frame(step: Step, rng: random.Random) -> None:
    flip_in(step.manifest_file, rng, 0, 24)


def flip_manifest_body(step: Step, rng: random.Random) -> None:
    flip_in(step.manifest_file, rng, 24, step.manifest_file.stat().st_size)


def truncate_file(step: Step, rng: random.Random) -> None:
    path = step.file(rng)
    os.truncate(path, rng.randrange(path.stat().st_size))


def truncate_manifest(step: Step, rng: random.Random) -> None:
    os.truncate(step.manifest_file, rng.randrange(step.manifest_file.stat().st_size))


def extend_file(step: Step, rng: random.Random) -> None:
    with open(step.file(rng), "ab") as file:
        file.write(rng.randbytes(rng.randrange(1, 5000)))


def zero_page(step: Step, rng: random.Random) -> None:
    path = step.file(rng)
    data = bytearray(path.read_bytes())
    pages = [o for o in range(0, len(data), 4096) if any(data[o : o + 4096])]
    start = rng.choice(pages)
    data[start : start + 4096] = bytes(len(data[start : start + 4096]))
    path.write_bytes(data)


def lost_tail(step: Step, rng: random.Random) -> None:
    """The end of a file was never written: zeros of the right length, as after a power cut."""
    path = step.file(rng)
    data = path.read_bytes()
    keep = rng.randrange(len(data) // 4096) * 4096
    path.write_bytes(data[:keep] + bytes(len(data) - keep))


def swap_files(step: Step, rng: random.Random) -> None:
    """Two files of the step exchanged their contents."""
    files = [step.directory / f.key for f in step.manifest.files]
    one, two = rng.sample(files, 2)
    a, b = one.read_bytes(), two.read_bytes()
    one.write_bytes(b)
    two.write_bytes(a)


def mixed_steps(step: Step, rng: random.Random) -> None:
    """A file holds what the same file of the step before held (a crash between two overwrites)."""
    files = sorted(step.directory.glob("*.safetensors"))
    before = sorted(step.other.glob("*.safetensors"))
    number = rng.randrange(len(files))
    files[number].write_bytes(before[number].read_bytes())


def manifest_of_other_step(step: Step, rng: random.Random) -> None:
    step.manifest_file.write_bytes((step.other / "manifest.ckpt").read_bytes())


def missing_file(step: Step, rng: random.Random) -> None:
    step.file(rng).unlink()


DAMAGES: dict[str, Callable[[Step, random.Random], None]] = {
    "bit of a tensor": flip_payload,
    "bit of a header's length": flip_header_length,
    "bit of a header": flip_header,
    "bit of padding": flip_padding,
    "bit of the manifest's frame": flip_manifest_frame,
    "bit of the manifest's body": flip_manifest_body,
    "file cut off": truncate_file,
    "manifest cut off": truncate_manifest,
    "file too long": extend_file,
    "4 KB page of zeros": zero_page,
    "end of a file lost": lost_tail,
    "two files swapped": swap_files,
    "file of the step before": mixed_steps,
    "manifest of the step before": manifest_of_other_step,
    "file missing": missing_file,
}


class Campaign:
    """Two committed steps and as many damaged copies as asked for."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.work = directory / "whole", directory / "damaged"
        os.environ.setdefault("CKPT_RUNTIME_DIR", str(directory / "runtime"))
        self.states = {step: make_state(step) for step in (1, 2)}
        # A small budget gives a step several files, so that files can be swapped.
        options = {"staging_bytes_max": 1 << 20, "inline": True}
        with Checkpointer(str(self.directory), **options) as checkpoints:
            for step, state in self.states.items():
                checkpoints.save(state, step=step).wait_durable()
        self.manifest = read_manifest(open_store(str(self.directory)), 2)
        self.expected = {step: bits(state) for step, state in self.states.items()}
        self.target = make_state(99)
        self.before = bits(self.target)

    def trial(self, name: str, rng: random.Random) -> str:
        """In a word what became of one damaged step."""
        shutil.rmtree(self.work, ignore_errors=True)
        shutil.copytree(self.directory, self.work)
        one, two = (self.work / f"step-{n:010d}" for n in (1, 2))
        DAMAGES[name](Step(two, self.manifest, one), rng)
        if not self._is_refused():
            return "loaded"
        return "detected" if self._falls_back() else "no fall-back"

    def _restore(self, step: int | None) -> int | None:
        place = Place()
        with open_store(str(self.work)) as store:
            tiers, planner = [StoreTier(store)], Planner()
            restorer = Restorer(self.target, tiers, place=place, meeting=Alone(), planner=planner)
            restored = restorer.run(Request(step=step, allow_fallback=step is None))
        return None if restored is None else restored.step

    def _is_refused(self) -> bool:
        self._reset()
        try:
            found = self._restore(2)
        except CheckpointError:
            found = None
        return found is None and bits(self.target) == self.before

    def _falls_back(self) -> bool:
        return self._restore(None) == 1 and bits(self.target) == self.expected[1]

    def _reset(self) -> None:
        fresh = make_state(99)
        model, extra = self.target["model"], self.target["extra"]
        assert isinstance(model, dict) and isinstance(extra, dict)
        for name, tensor in fresh["model"].items():  # type: ignore[attr-defined]
            model[name].copy_(tensor)
        extra.update(fresh["extra"])  # type: ignore[call-overload]


def run(trials: int, *, seed: int) -> dict[str, collections.Counter[str]]:
    """What became of each kind of damage."""
    found: dict[str, collections.Counter[str]] = {n: collections.Counter() for n in DAMAGES}
    with tempfile.TemporaryDirectory(prefix="ckpt-corruption-") as directory:
        campaign = Campaign(Path(directory))
        for number in range(trials):
            name = list(DAMAGES)[number % len(DAMAGES)]
            found[name][campaign.trial(name, random.Random(f"{seed}/{number}"))] += 1
    return found


@click.command()
@click.option("--trials", default=2000, show_default=True)
@click.option("--seed", default=0, show_default=True)
def main(trials: int, seed: int) -> None:
    """Print what became of each kind of damage."""
    logging.disable()  # a line for each damaged step
    found = run(trials, seed=seed)
    click.echo("| damage | trials | detected, target untouched, step before restored |")
    click.echo("|---|---|---|")
    for name, outcomes in found.items():
        click.echo(f"| {name} | {outcomes.total()} | {outcomes['detected']} |")
    bad = {n: dict(o) for n, o in found.items() if o.total() != o["detected"]}
    click.echo(f"\nNot detected: {bad or 'none'}")
    raise SystemExit(bool(bad))


if __name__ == "__main__":
    main()
