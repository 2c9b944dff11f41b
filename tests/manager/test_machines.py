"""Groups whose ranks are on two machines: the manager holds a stream to the ranks it cannot see."""

import pytest

from tests.manager.machines import HANG_S, Machines, may_make_namespaces
from tests.manager.test_ranks import unfailed

pytestmark = pytest.mark.skipif(
    not may_make_namespaces(), reason="network namespaces (iproute2, root) cannot be made here"
)


@pytest.fixture
def machines():
    with Machines() as machines:
        machines.serve_lighthouse()
        yield machines


def test_a_rank_on_another_machine_is_killed_and_its_group_heals_to_equal_bits(machines, tmp_path):
    r0, r1 = machines.start_group("r0", (0, 1)), machines.start_group("r1", (0, 1))
    r0[0].wait("STEP", "2")
    r1[1].kill()
    assert r1[0].process.wait(HANG_S) != 0  # its manager told it, and the group is to be restarted
    r0[0].wait("STEP", "1")
    again = machines.start_group("r1", (0, 1))
    shas = {rank.sha() for rank in (*r0, *again)}
    assert shas == unfailed(tmp_path)


def test_a_machine_that_falls_off_the_network_is_given_up(machines):
    r0, r1 = machines.start_group("r0", (0, 0)), machines.start_group("r1", (0, 1))
    r0[0].wait("STEP", "2")
    machines.pull_cable()
    r0[0].wait("STEP", "1")
    for rank in r1:  # also the one that is cut off knows that it must not go on
        assert rank.process.wait(HANG_S) != 0
    assert len({rank.sha() for rank in r0}) == 1
