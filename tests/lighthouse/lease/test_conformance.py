"""What every lease promises, told once and held by each backend."""

import asyncio
import uuid
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from lighthouse.lease import Grant, Holder, LeaseLost, Timing, monotonic_s
from lighthouse.lease.etcd import EtcdLease
from lighthouse.lease.file import FileLease
from lighthouse.lease.kubernetes import KubernetesLease
from lighthouse.lease.kubernetes_api import ApiServer
from lighthouse.lease.memory import MemoryLease, MemoryStore
from tests.lighthouse.lease.etcd_cluster import etcd_cluster
from tests.lighthouse.lease.kubernetes_double import lease_api

TIMING = Timing(ttl_s=1.0)
BACKENDS = ("memory", "file", "etcd", "kubernetes")


@pytest.fixture(scope="session")
def etcd(tmp_path_factory):
    with etcd_cluster(tmp_path_factory.mktemp("etcd")) as cluster:
        yield cluster


@asynccontextmanager
async def candidates(backend, request, tmp_path):
    """Yields a function that makes one more candidate of the same new lease."""
    async with AsyncExitStack() as stack:
        if backend == "memory":
            store = MemoryStore()
            make = lambda: MemoryLease(store, timing=TIMING)  # noqa: E731
        elif backend == "file":
            make = lambda: FileLease(tmp_path / "lease", timing=TIMING)  # noqa: E731
        elif backend == "etcd":
            endpoints, prefix = request.getfixturevalue("etcd").endpoints, f"/{uuid.uuid4()}/"
            make = lambda: EtcdLease(endpoints, prefix=prefix, timing=TIMING)  # noqa: E731
        else:
            _, url = await stack.enter_async_context(lease_api())
            (tmp_path / "token").write_text("secret-1")
            server = ApiServer(url=url, token_path=tmp_path / "token", ca_path=None)
            make = lambda: KubernetesLease("ml", "lh", timing=TIMING, server=server)  # noqa: E731

        def candidate():
            lease = make()
            stack.push_async_callback(lease.close)
            return lease

        yield candidate


@pytest.fixture(params=BACKENDS)
def story(request, tmp_path):
    """Runs an async story with a maker of candidates."""
    if request.param == "etcd":
        request.getfixturevalue("etcd")

    def run(tell):
        async def main():
            async with candidates(request.param, request, tmp_path) as candidate:
                async with asyncio.timeout(60):
                    await tell(candidate)

        asyncio.run(main())

    return run


async def take(lease, address="x:1", **more):
    grant = await lease.acquire(address, **more)
    assert isinstance(grant, Grant), grant
    return grant


async def until_taken(lease, address="y:1"):
    """Try as a real candidate does: whenever the watch says that nobody leads."""
    async for holder in lease.watch():
        if holder is None:
            answer = await lease.acquire(address)
            if isinstance(answer, Grant):
                return answer


def test_the_second_candidate_learns_who_leads_and_where(story):
    async def tell(candidate):
        a, b = candidate(), candidate()
        grant = await take(a, "host-a:29510")
        held = Holder(term=grant.term, identity=a.identity, address="host-a:29510")
        assert await b.acquire("host-b:29510") == held

    story(tell)


def test_a_released_lease_passes_at_once_and_the_term_grows(story):
    async def tell(candidate):
        a, b = candidate(), candidate()
        first = await take(a)
        await a.release(first)
        assert (await take(b)).term == first.term + 1

    story(tell)


def test_an_abandoned_lease_passes_only_after_its_holder_had_to_stop(story):
    async def tell(candidate):
        a, b = candidate(), candidate()
        first = await take(a)
        second = await until_taken(b)
        assert not first.is_valid(monotonic_s())
        assert second.term == first.term + 1

    story(tell)


def test_a_renewed_lease_does_not_pass(story):
    async def tell(candidate):
        a, b = candidate(), candidate()
        grant = await take(a)
        end = monotonic_s() + 3 * TIMING.ttl_s
        while monotonic_s() < end:
            grant = await a.renew(grant)
            assert grant.is_valid(monotonic_s())
            assert isinstance(await b.acquire("y:1"), Holder)
            await asyncio.sleep(TIMING.renew_every_s)

    story(tell)


def test_a_tenure_ends_before_the_lease_does(story):
    async def tell(candidate):
        a = candidate()
        asked_at = monotonic_s()
        first = await take(a)
        renewed = await a.renew(first)
        assert first.valid_until < renewed.valid_until < monotonic_s() + TIMING.ttl_s
        assert asked_at < first.valid_until

    story(tell)


def test_a_deposed_leader_can_neither_write_nor_renew(story):
    async def tell(candidate):
        a, b = candidate(), candidate()
        old = await take(a)
        await a.write(old, "job", b"old")
        await a.release(old)
        new = await take(b)
        for attempt in (a.write(old, "job", b"late"), a.write(old, "more", b"x"), a.renew(old)):
            with pytest.raises(LeaseLost):
                await attempt
        assert await b.read() == {"job": b"old"}
        await b.write(new, "job", b"new")
        assert await a.read() == {"job": b"new"}

    story(tell)


def test_a_leader_that_overslept_can_write_nothing_once_another_leads(story):
    async def tell(candidate):
        a, b = candidate(), candidate()
        old = await take(a)
        new = await until_taken(b)
        with pytest.raises(LeaseLost):
            await a.write(old, "job", b"late")
        await a.release(old)  # must not end the other's tenure
        await b.write(new, "job", b"new")
        assert isinstance(await a.acquire("x:1"), Holder)

    story(tell)


def test_records_of_any_job_survive_changes_of_the_leader(story):
    async def tell(candidate):
        records = {"llama/70b #3": b"\x00\xff" * 500, "ü" * 60: b"", "..": b"dots", "a": b"1"}
        a, b = candidate(), candidate()
        grant = await take(a)
        for job, record in records.items():
            await a.write(grant, job, b"older")
            await a.write(grant, job, record)
        await a.write(grant, "a", None)
        await a.release(grant)
        await take(b)
        assert await b.read() == {j: r for j, r in records.items() if j != "a"}

    story(tell)


def test_a_restarted_process_waits_like_anybody_else(story):
    async def tell(candidate):
        await take(candidate())
        assert isinstance(await candidate().acquire("x:1"), Holder)

    story(tell)


def test_whoever_lost_the_reply_to_its_own_acquire_takes_a_higher_term(story):
    async def tell(candidate):
        a = candidate()
        first, second = await take(a), await take(a)
        assert second.term == first.term + 1
        with pytest.raises(LeaseLost):
            await a.write(first, "job", b"x")
        await a.write(await a.renew(second), "job", b"y")

    story(tell)


def test_a_term_can_be_asked_to_exceed_what_managers_have_seen(story):
    async def tell(candidate):
        a, b = candidate(), candidate()
        grant = await take(a, term_min=41)
        assert grant.term == 41
        await a.release(grant)
        assert (await take(b)).term == 42

    story(tell)


def test_of_ten_candidates_at_once_one_leads(story):
    async def tell(candidate):
        answers = await asyncio.gather(
            *(candidate().acquire(f"c{i}:1") for i in range(10)), return_exceptions=True
        )
        assert sum(isinstance(a, Grant) for a in answers) == 1, answers

    story(tell)


def test_the_watch_tells_of_each_change(story):
    async def tell(candidate):
        a, b = candidate(), candidate()
        watch = b.watch()
        assert await anext(watch) is None
        grant = await take(a, "host-a:1")
        assert (await anext(watch)).address == "host-a:1"
        await a.release(grant)
        assert await anext(watch) is None
        await watch.aclose()

    story(tell)
