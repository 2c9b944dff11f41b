"""The commands of `ckpt`: print what the tools find, with progress on long work."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

import click

from ckpt import tools
from ckpt.listing import find_manifest, newest_first
from ckpt.manifest import Manifest
from ckpt.progress import size_text
from ckpt.retention import Policy, StepFacts, plan_deletes
from ckpt.stores import Store
from ftcore.base.cli import print_json


@contextmanager
def bar(label: str, total: int, *, quiet: bool) -> Iterator[tools.Progress]:
    """A progress bar on stderr when somebody watches."""
    hidden = quiet or not sys.stderr.isatty()
    with click.progressbar(
        length=max(total, 1), label=label, file=sys.stderr, hidden=hidden, update_min_steps=1 << 24
    ) as progress:
        yield progress.update


def ls(store: Store, *, as_json: bool) -> None:
    lines = tools.list_steps(store)
    if as_json:
        print_json({"url": store.url, "steps": [asdict(line) for line in lines]})
        return
    for line in lines:
        if line.problem:
            click.echo(f"{line.step:>10}  DAMAGED  {line.problem}")
            continue
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(line.created_unix_s))
        metrics = " ".join(f"{k}={v:g}" for k, v in sorted(line.metrics.items()))
        click.echo(
            f"{line.step:>10}  {when}Z  {size_text(line.bytes):>8}  {line.tensors} tensors  "
            f"{line.files} files  {line.participants} ranks  {metrics}{' pinned' * line.pinned}"
        )
    if not lines:
        click.echo("no complete step")


def show(store: Store, step: int | None, *, as_json: bool) -> None:
    manifest = find_manifest(store, step)
    if as_json:
        print_json(_manifest_json(manifest))
        return
    click.echo(
        f"step {manifest.step}  attempt {manifest.attempt}  {len(manifest.files)} files  "
        f"{size_text(manifest.stored_bytes)}  {manifest.participants} ranks"
    )
    for name, tensor in manifest.tensors.items():
        shape = "x".join(map(str, tensor.shape)) or "scalar"
        pieces = f"  in {len(tensor.pieces)} pieces" if len(tensor.pieces) > 1 else ""
        click.echo(f"{name}  {tensor.dtype}  {shape}{pieces}")
    for index, text in manifest.values.items():
        click.echo(f"values of rank {index}: {text}")


def _manifest_json(manifest: Manifest) -> dict[str, object]:
    return {
        "step": manifest.step,
        "attempt": manifest.attempt,
        "epoch": manifest.epoch,
        "created_unix_s": manifest.created_unix_s,
        "participants": manifest.participants,
        "metrics": dict(manifest.metrics),
        "files": [{"key": f.key, "bytes": f.size} for f in manifest.files],
        "tensors": {
            name: {"dtype": t.dtype, "shape": t.shape, "pieces": [p._asdict() for p in t.pieces]}
            for name, t in manifest.tensors.items()
        },
        "values": dict(manifest.values),
    }


def verify(store: Store, step: int | None, *, deep: bool, all_steps: bool, as_json: bool) -> bool:
    steps = sorted(newest_first(store)) if all_steps else [find_manifest_step(store, step)]
    verdicts = []
    for number in steps:
        total = _stored_bytes(store, number) if deep else 0
        with bar(f"step {number}", total, quiet=as_json) as progress:
            verdicts.append(tools.verify(store, number, deep=deep, progress=progress))
    if as_json:
        print_json({"url": store.url, "steps": [asdict(v) for v in verdicts]})
    for verdict in () if as_json else verdicts:
        what = f"{size_text(verdict.bytes_checked)} compared" if deep else "sizes compared"
        click.echo(f"step {verdict.step}: {'good' if verdict.is_good else 'DAMAGED'}, {what}")
        for problem in verdict.problems:
            click.echo(f"  {problem}")
    return all(v.is_good for v in verdicts)


def find_manifest_step(store: Store, step: int | None) -> int:
    """The step to look at. A damaged manifest is found by `verify`, not here."""
    steps = newest_first(store)
    if steps and step is None:
        return steps[0]
    return step if step in steps else find_manifest(store, step).step


def _stored_bytes(store: Store, step: int) -> int:
    try:
        return find_manifest(store, step).stored_bytes
    except Exception:
        return 0


def diff(a: Store, step_a: int | None, b: Store, step_b: int | None, *, as_json: bool) -> bool:
    left, right = find_manifest(a, step_a), find_manifest(b, step_b)
    with bar("comparing", left.stored_bytes, quiet=as_json) as progress:
        found = tools.diff((a, left), (b, right), progress=progress)
    found.sort(key=lambda d: (d.kind != "values", -d.largest, d.name))
    if as_json:
        print_json({"differences": [asdict(d) for d in found]})
        return not found
    for difference in found:
        click.echo(f"{difference.name}: {difference.kind}  {difference.detail}".rstrip())
    click.echo(
        f"step {left.step} and step {right.step}: "
        + (f"{len(found)} tensors differ" if found else "all tensors are equal")
    )
    return not found


def copy(source: Store, target: Store, step: int | None, *, as_json: bool) -> None:
    manifest = find_manifest(source, step)
    started = time.monotonic()
    with bar("copying", manifest.stored_bytes, quiet=as_json) as progress:
        tools.copy_step(source, target, manifest.step, progress=progress)
    seconds = time.monotonic() - started
    if as_json:
        print_json({"step": manifest.step, "bytes": manifest.stored_bytes, "seconds": seconds})
        return
    rate = size_text(manifest.stored_bytes / max(seconds, 1e-9))
    size = size_text(manifest.stored_bytes)
    click.echo(f"copied step {manifest.step}: {size} at {rate}/s, checksums compared")


def prune(
    store: Store, policy: Policy, *, leftovers_older_s: float, yes: bool, as_json: bool
) -> None:
    now = time.time()
    facts = [
        StepFacts(
            step=line.step,
            created_unix_s=line.created_unix_s,
            metrics=line.metrics,
            pinned=line.pinned or bool(line.problem),
        )
        for line in tools.list_steps(store)
    ]
    steps = plan_deletes(facts, policy, now_unix_s=now)
    leftovers = tools.find_leftovers(store, older_than_s=leftovers_older_s, now_s=now)
    if as_json:
        print_json({"steps": steps, "leftovers": list(leftovers.keys), "done": yes})
    else:
        click.echo(f"steps to delete: {', '.join(map(str, steps)) or 'none'}")
        click.echo(f"leftovers to delete: {len(leftovers.keys)}, {size_text(leftovers.bytes)}")
    if yes:
        tools.remove_steps(store, steps)
        store.delete(leftovers.keys)
        store.abort_orphans("step-", older_than_s=leftovers_older_s)
    elif not as_json and (steps or leftovers.keys):
        click.echo("nothing was deleted; add --yes to do it")


def pin(store: Store, step: int, *, remove: bool) -> None:
    key = f"pins/{step:010d}"
    if remove:
        store.delete([key])
        click.echo(f"step {step} is no longer pinned")
        return
    find_manifest(store, step)
    store.put(key, b"pinned\n")
    click.echo(f"step {step} is pinned")


def bench(url: str, size_mb: int, *, as_json: bool) -> None:
    from ckpt.bench import measure, table
    from ckpt.stores import open_store

    with bar("measuring", 3, quiet=as_json) as progress:
        found = measure(
            lambda limits: open_store(url, limits=limits),
            size_bytes=size_mb << 20,
            progress=progress,
        )
    if as_json:
        print_json(found.to_json())
    else:
        click.echo(table(found))


def export(store: Store, to: str, form: str, step: int | None, only: str, *, as_json: bool) -> None:
    from ckpt.interop import export as write

    manifest = find_manifest(store, step)
    with bar("exporting", manifest.stored_bytes, quiet=as_json) as progress:
        write(store, to, form=form, step=manifest.step, only=only, progress=progress)  # type: ignore[arg-type]
    if as_json:
        print_json({"step": manifest.step, "to": to, "form": form})
    else:
        click.echo(f"step {manifest.step} is in {to}")
