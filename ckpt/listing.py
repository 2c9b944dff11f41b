"""Find the committed steps in a store, and read their manifests."""

from __future__ import annotations

from ckpt.errors import Corrupt, ManifestMissing
from ckpt.manifest import MANIFEST_NAME, Manifest, manifest_key, step_of
from ckpt.stores import Store
from ckpt.stores.errors import ObjectMissing


def newest_first(store: Store) -> list[int]:
    """Steps that have a manifest, newest first. Nothing else counts as a checkpoint."""
    found = []
    for info in store.list("step-"):
        directory, _, name = info.key.partition("/")
        step = step_of(directory)
        if name == MANIFEST_NAME and step is not None:
            found.append(step)
    return sorted(found, reverse=True)


def read_manifest(store: Store, step: int) -> Manifest:
    """The manifest of `step`. Raises ObjectMissing when it was never committed."""
    key = manifest_key(step)
    manifest = Manifest.from_bytes(store.get(key), where=f"{store.url}/{key}")
    if manifest.step != step:
        raise Corrupt(f"{store.url}/{key} is the manifest of step {manifest.step}", key=key)
    return manifest


def find_manifest(store: Store, step: int | None) -> Manifest:
    """The manifest of `step`, or of the newest step. Raises ManifestMissing."""
    steps = newest_first(store) if step is None else [step]
    if not steps:
        raise ManifestMissing(f"{store.url} has no complete step", url=store.url)
    try:
        return read_manifest(store, steps[0])
    except ObjectMissing as error:
        raise ManifestMissing(
            f"step {steps[0]} at {store.url} has no manifest", step=steps[0], url=store.url
        ) from error
