"""Several members of one group as threads of one process, for tests."""

from concurrent.futures import ThreadPoolExecutor

HANG_S = 60.0


class World:
    """`each(story)` runs `story(group)` on every member at once and returns the results by rank."""

    def __init__(self, make, size, *, address, prefix="q1", timeout_s=20.0):
        self.groups = [make() for _ in range(size)]
        self.address = address
        self._pool = ThreadPoolExecutor(max_workers=max(2, size))
        self.configure(prefix, timeout_s=timeout_s)

    def configure(self, prefix, *, members=None, timeout_s=20.0):
        members = self.groups if members is None else members

        def join(group):
            group.configure(
                store_address=self.address,
                prefix=prefix,
                rank=members.index(group),
                world_size=len(members),
                timeout_s=timeout_s,
            )

        self.each(join, members=members)

    def each(self, story, *, members=None):
        running = [self._pool.submit(story, g) for g in (members or self.groups)]
        return [r.result(HANG_S) for r in running]

    def later(self, story, group):
        """Start a story on one member and return its future."""
        return self._pool.submit(story, group)

    def close(self):
        self.each(lambda group: group.close())
        self._pool.shutdown()
