import gc
import socket
import threading

import pytest
import torch

from ftcore.base.errors import BadSetting
from ftcore.process_group import GlooGroup, GroupError, host_store, sockets
from ftcore.process_group.store import connect_store, join_address, split_address
from tests.process_group.world import HANG_S, World


@pytest.fixture
def innocent():
    """A TCP connection of this process that has nothing to do with any group."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = socket.create_connection(listener.getsockname())
        there, _ = listener.accept()
        with here, there:
            yield here, there


def test_abort_cuts_no_socket_but_the_group_s_own(innocent):
    host, (here, there) = host_store(), innocent
    first = World(GlooGroup, 2, address=host.address)
    second = World(GlooGroup, 2, address=host.address, prefix="other")
    for group in first.groups:
        group.abort("cut")
    here.sendall(b"still here")
    assert there.recv(10) == b"still here"
    host.store.set("key", "value")
    assert connect_store(host.address, timeout_s=HANG_S).get("key") == b"value"
    tensors = [torch.ones(2) for _ in range(2)]
    second.each(lambda g: g.allreduce([tensors[g.rank()]]).wait())
    assert tensors[0].tolist() == [2.0, 2.0]
    first.close()
    second.close()


def test_every_member_knows_a_connection_to_each_other_member():
    host = host_store()
    world = World(GlooGroup, 3, address=host.address)
    for group in world.groups:
        assert len(group._life.link._connections) >= 2
    world.close()


def test_a_descriptor_that_was_closed_and_given_out_again_is_not_cut(innocent):
    here, there = innocent
    stale = sockets.SocketId(fd=here.fileno(), inode=1)
    sockets.cut((stale,))
    here.sendall(b"alive")
    assert there.recv(5) == b"alive"


def test_a_listener_is_told_from_those_of_other_threads():
    """Other threads open listeners all the time; the one that `make` opened is found."""
    stop, opened = threading.Event(), []

    def noise():
        while not stop.is_set():
            opened.append(socket.create_server(("127.0.0.1", 0)))
            opened.pop().close()

    noisy = threading.Thread(target=noise)
    noisy.start()
    try:
        for _ in range(20):
            made, address = sockets.listener_made_by(lambda: socket.create_server(("127.0.0.1", 0)))
            assert made.getsockname()[:2] == address
            made.close()
    finally:
        stop.set()
        noisy.join()


def test_groups_that_are_closed_leave_no_socket_behind():
    host, counts = host_store(), []
    for turn in range(3):
        World(GlooGroup, 2, address=host.address, prefix=f"p{turn}").close()
        gc.collect()
        counts.append(len(list(sockets._all_sockets())))
    assert counts[-1] <= counts[0]


@pytest.mark.parametrize("address", ["10.0.0.3:29500", "[::1]:29500", "name:1"])
def test_addresses_survive_the_round_trip(address):
    assert join_address(*split_address(address)) == address


@pytest.mark.parametrize("address", ["", "nowhere", ":29500", "host:", "host:port"])
def test_what_is_no_address_is_refused(address):
    with pytest.raises(BadSetting, match="not host:port"):
        split_address(address)


def test_a_store_listens_on_the_given_interface_only():
    host, port = split_address(host_store().address)
    assert host == "127.0.0.1" and port > 0
    with pytest.raises(BadSetting, match=r"no store can listen on 192\.0\.2\.1"):
        host_store("192.0.2.1")


def test_an_interface_that_is_none_of_this_machine_is_a_group_error():
    group = GlooGroup(interface="192.0.2.1")
    with pytest.raises(GroupError):
        group.configure(
            store_address=host_store().address, prefix="q", rank=0, world_size=2, timeout_s=5
        )
