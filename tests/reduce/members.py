"""Members of one fake group as threads of this process."""

from concurrent.futures import ThreadPoolExecutor

from ftcore.process_group.fake import FakeGroup, FakeNetwork

HANG_S = 60.0
_POOL = ThreadPoolExecutor(max_workers=8)


def each(members, story):
    """Run `story(member)` for all members at once; returns their results in order."""
    return [f.result(HANG_S) for f in [_POOL.submit(story, m) for m in members]]


def fake_groups(size, *, network=None, prefix="q"):
    network = network or FakeNetwork()
    groups = [FakeGroup(network) for _ in range(size)]
    join(groups, prefix=prefix)
    return groups


def join(groups, *, prefix):
    def configure(group):
        group.configure(
            store_address="memory:1",
            prefix=prefix,
            rank=groups.index(group),
            world_size=len(groups),
            timeout_s=HANG_S,
        )

    each(groups, configure)
