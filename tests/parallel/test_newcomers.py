"""What listens is closed to newcomers once all have come; who was there goes on, or goes, as it belongs."""

import contextlib
import socket
import sys

import pytest

from manyhands.parallel.group.listeners import block_listeners_on_exit, close_rendezvous
from manyhands.run.doctor import describe_public_addresses

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has filters on sockets")


def listener():
    return socket.create_server(("127.0.0.1", 0))


def lets_in(one):
    with contextlib.suppress(TimeoutError):
        socket.create_connection(one.getsockname(), timeout=0.3).close()
        return True
    return False


def test_what_a_group_of_gloo_listens_on_is_closed_and_nothing_else():
    with listener() as before, contextlib.ExitStack() as stack:
        with block_listeners_on_exit("gloo"):
            group = stack.enter_context(listener())
            member = stack.enter_context(socket.create_connection(group.getsockname()))
            other = stack.enter_context(group.accept()[0])
        assert not lets_in(group)
        assert lets_in(before)
        member.sendall(b"gradients")
        assert other.recv(9) == b"gradients"


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_what_connects_later_stays_open(backend):
    with contextlib.ExitStack() as stack:
        with block_listeners_on_exit(backend):
            group = stack.enter_context(listener())
        assert lets_in(group)


def connected(store, own):
    one = socket.create_connection(store.getsockname(), source_address=(own, 0))
    return one, store.accept()[0]


@pytest.mark.parametrize(("members", "leaves"), [([], True), ([["127.0.0.3"]], True), ([["198.51.100.1"]], False)])
def test_who_does_not_belong_goes_where_all_who_do_are_seen(members, leaves):
    """A member that is behind another address can't be told from a stranger: then nobody is put out."""
    with listener() as store, contextlib.ExitStack() as stack:
        own, member, stranger = [
            [stack.enter_context(end) for end in connected(store, address)]
            for address in ("127.0.0.1", "127.0.0.3", "127.0.0.2")
        ]
        close_rendezvous(store.getsockname()[1], [*members, *([["127.0.0.3"]] if leaves else [])])
        assert not lets_in(store)
        stranger[0].settimeout(0.3)
        if leaves:
            assert stranger[0].recv(1) == b""
        else:
            with pytest.raises(TimeoutError):
                stranger[0].recv(1)
        for one, other in (own, member):
            one.sendall(b"x")
            assert other.recv(1) == b"x"


def test_public_addresses_are_distinguished_from_private_ones():
    private = ["10.0.0.1", "192.168.1.4", "172.20.1.1", "100.64.3.2", "fd00::1", "127.0.0.1"]
    assert not describe_public_addresses({str(n): ("eth0", address) for n, address in enumerate(private)})
    for address in ("8.8.8.8", "2001:4860:4860::8888"):
        assert f"n2 at {address}" in describe_public_addresses({"n1": ("eth0", "10.0.0.1"), "n2": ("eth0", address)})
