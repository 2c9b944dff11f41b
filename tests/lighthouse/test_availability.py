"""Real lighthouses are killed, stopped and told to go while groups train."""

import asyncio
import signal
from contextlib import AsyncExitStack

import pytest

from tests.lighthouse.groups import Group, Job


def story(tell):
    async def main():
        async with asyncio.timeout(90), AsyncExitStack() as stack:
            await tell(stack)

    asyncio.run(main())


async def training(stack, endpoints, names="abc", **more):
    """A job whose groups all train together."""
    job = Job(endpoints, **more)
    for name in names:
        await stack.enter_async_context(Group(job, name).alive())
    await job.until(lambda: job.all_in(*names))
    await job.steps(3)
    return job


def leader_and_followers(lighthouses):
    leaders = [p for p in lighthouses if p.status()["role"] == "leader"]
    assert len(leaders) == 1
    return leaders[0], [p for p in lighthouses if p is not leaders[0]]


async def attached_again(job):
    """Every group has said hello to somebody new."""
    before = {name: g.attached_to for name, g in job.groups.items()}
    await job.until(lambda: all(g.attached_to > before[n] for n, g in job.groups.items()))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
def test_losing_the_leader_loses_no_step_and_the_next_one_seats_a_newcomer(
    lease_text, lighthouses, number
):
    all_three = [lighthouses("--lease", lease_text, "--join-timeout", "0.5") for _ in range(3)]
    leader, _ = leader_and_followers(all_three)

    async def tell(stack):
        job = await training(stack, [p.address for p in all_three])
        term = job.groups["a"].core.quorum.quorum_id >> 32
        leader.signal(number)
        await job.steps(20)
        await stack.enter_async_context(Group(job, "d").alive())
        await job.until(lambda: job.all_in(*"abcd"))
        await job.steps(3)
        assert job.groups["a"].core.quorum.quorum_id >> 32 > term
        assert [g.failed_steps for g in job.groups.values()] == [0, 0, 0, 0]

    story(tell)


def test_a_group_that_asks_a_follower_is_sent_to_the_leader(lease_text, lighthouses):
    both = [lighthouses("--lease", lease_text) for _ in range(2)]
    _, (follower,) = leader_and_followers(both)

    async def tell(stack):
        await training(stack, [follower.address], names="a")

    story(tell)


def test_while_the_only_lighthouse_is_away_training_goes_on(lighthouses, tmp_path):
    lighthouse = lighthouses("--journal", str(tmp_path / "journal"))

    async def tell(stack):
        job = await training(stack, [lighthouse.address])
        quorum_id = job.groups["a"].core.quorum.quorum_id
        lighthouse.signal(signal.SIGKILL)
        lighthouse.stop()
        await job.steps(100)
        lighthouse.start()
        await attached_again(job)
        await job.steps(10)
        assert [g.failed_steps for g in job.groups.values()] == [0, 0, 0]
        assert job.groups["a"].core.quorum.quorum_id == quorum_id

    story(tell)


def test_a_death_while_the_lighthouse_is_away_is_mended_when_it_is_back(lighthouses):
    lighthouse = lighthouses()

    async def tell(stack):
        job = await training(stack, [lighthouse.address], names="ab")
        async with Group(job, "c").alive():
            await job.until(lambda: job.all_in(*"abc"))
            await job.steps(3)
            lighthouse.stop()
        stuck = {n: g.core.committed for n, g in job.groups.items()}
        lighthouse.start()
        await job.until(lambda: job.all_in(*"ab"))
        await job.steps(3)
        assert all(g.core.committed > stuck[n] for n, g in job.groups.items())

    story(tell)


def test_jobs_on_one_lighthouse_know_nothing_of_each_other(lighthouses):
    lighthouse = lighthouses()

    async def tell(stack):
        one = await training(stack, [lighthouse.address], names="ab", name="one")
        two = await training(stack, [lighthouse.address], names="ab", name="two")
        before = one.groups["a"].core.quorum.quorum_id
        async with Group(two, "c").alive():
            await two.until(lambda: two.all_in(*"abc"))
        await two.until(lambda: two.all_in(*"ab"))
        await one.steps(5)
        assert one.groups["a"].core.quorum.quorum_id == before
        assert sum(g.failed_steps for g in one.groups.values()) == 0

    story(tell)
