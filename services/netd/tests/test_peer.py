"""The check that a process is a domain's emulator, and the frames that it may send."""

import itertools
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virtbus.netd.core.peer import asks_for, in_domain_cgroup
from virtbus.netd.core.wrapper_frame import (
    MAX_FRAME_BYTES,
    PROTOCOL,
    FrameError,
    NicArgument,
    frame,
    frame_length,
    grant,
    read_request,
    refusal,
    vhosts_of,
    with_vhost,
)
from virtbus.netd.edge.guest_links import close_all
from virtbus.netd.edge.vhost import accelerated

A = "0192f0c1-2d3e-7abc-8def-00000000000a"


@pytest.mark.parametrize(
    ("line", "domain"),
    [
        ("9:pids:/machine/qemu-3-web.libvirt-qemu/emulator", "web"),
        ("0::/machine.slice/machine-qemu\\x2d3\\x2dweb.scope/libvirt/emulator", "web"),
        ("0::/machine.slice/machine-qemu\\x2d12\\x2dweb\\x2d1.scope", "web-1"),
        ("0::/machine/qemu-3-web.libvirt-qemu", "web_"),
        ("1:name=systemd:/\n0::/machine/qemu-3-" + "a" * 57 + ".libvirt-qemu", "a" * 60),
    ],
)
def test_libvirts_cgroup_of_the_domain_is_known(line: str, domain: str) -> None:
    assert in_domain_cgroup(line, domain)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "0::/",
        "0::/user.slice/web",
        "0::/machine/qemu-3-web2.libvirt-qemu",
        "0::/machine/qemu-3-we.libvirt-qemu",
        "0::/machine/lxc-3-web.libvirt-lxc",
        "0::/machine/xqemu-3-web.libvirt-qemu",
    ],
)
def test_another_cgroup_is_not_the_domains(line: str) -> None:
    assert not in_domain_cgroup(line, "web")


def test_an_empty_domain_name_matches_nothing() -> None:
    assert not in_domain_cgroup("0::/machine/qemu-3-web.libvirt-qemu", "")


def test_the_uuid_must_follow_its_flag() -> None:
    assert asks_for(b"qemu\0-name\0guest=a\0-uuid\0" + A.encode() + b"\0", A)
    assert not asks_for(b"qemu\0-x\0" + A.encode() + b"\0-uuid\0other\0", A)
    assert not asks_for(b"qemu\0-uuid\0", A)


@given(st.binary(max_size=200))
def test_no_bytes_break_the_reader_of_requests(data: bytes) -> None:
    for body in (data, PROTOCOL + b"\0" + data, PROTOCOL + b"\0" + A.encode() + b"\0" + data):
        try:
            request = read_request(body)
        except FrameError:
            continue
        assert request.uid == A


def test_a_request_is_read() -> None:
    request = read_request(PROTOCOL + b"\0" + A.encode() + b"\x0012\x0034\0")
    assert (request.uid, request.times_ns) == (A, (12, 34))


@pytest.mark.parametrize("length", [0, MAX_FRAME_BYTES + 1, 0xFFFFFFFF])
def test_a_length_that_lies_is_refused(length: int) -> None:
    with pytest.raises(FrameError):
        frame_length(length.to_bytes(4, "big"))


def test_a_refusal_is_one_line() -> None:
    assert refusal("denied", "not\nyou\r\n") == frame(b"R\0denied: not you\0")


def test_a_grant_names_descriptors_by_place() -> None:
    nics = [NicArgument({"driver": "virtio-net-pci"}, "02:00:00:00:00:01")]
    body = grant("/usr/bin/qemu", nics, None)[4:]
    assert body.split(b"\0") == [
        b"A",
        b"/usr/bin/qemu",
        b"1",
        b"-netdev",
        b"tap,id=net0,fd=@fd0@",
        b"-device",
        b'{"driver":"virtio-net-pci","netdev":"net0","mac":"02:00:00:00:00:01"}',
        b"",
    ]


def test_an_emulator_with_a_newline_is_refused() -> None:
    with pytest.raises(FrameError):
        grant("/usr/bin/qemu\n", [], None)


def test_an_interface_has_a_descriptor_for_each_queue() -> None:
    device: dict[str, str | int | bool] = {"mq": True, "vectors": 6}
    nics = [NicArgument({}, "02:00:00:00:00:01"), NicArgument(device, "m", queues=2)]
    words = grant("/usr/bin/qemu", [*nics, NicArgument({}, "m")], None)[4:].split(b"\0")
    assert words[2] == b"4"
    netdevs = [after for word, after in itertools.pairwise(words) if word == b"-netdev"]
    assert netdevs == [
        b"tap,id=net0,fd=@fd0@",
        b"tap,id=net1,fds=@fd1@:@fd2@",
        b"tap,id=net2,fd=@fd3@",
    ]
    assert b'"mq":true,"vectors":6' in words[words.index(netdevs[1]) + 2]


def test_interfaces_use_vhost_net_while_descriptors_are_left() -> None:
    virtio: dict[str, str | int | bool] = {"driver": "virtio-net-pci"}
    nics = [
        NicArgument(virtio, "a"),
        NicArgument({"driver": "e1000"}, "b"),
        NicArgument(virtio, "c", queues=2),
    ]
    faster = with_vhost(nics)
    assert vhosts_of(faster) == 3
    words = grant("/usr/bin/qemu", faster, None)[4:].split(b"\0")
    assert words[2] == b"7"
    assert [after for word, after in itertools.pairwise(words) if word == b"-netdev"] == [
        b"tap,id=net0,fd=@fd0@,vhost=on,vhostfd=@fd4@",
        b"tap,id=net1,fd=@fd1@",
        b"tap,id=net2,fds=@fd2@:@fd3@,vhost=on,vhostfds=@fd5@:@fd6@",
    ]
    most = with_vhost([NicArgument(virtio, "m", queues=16)] * 5)
    assert [nic.vhost for nic in most] == [True, True, True, False, False]


def test_a_host_without_vhost_net_gives_none(tmp_path: Path) -> None:
    nics = [NicArgument({"driver": "virtio-net-pci"}, "a", queues=2)]
    before = len(os.listdir("/proc/self/fd"))
    assert accelerated(nics, str(tmp_path / "none")) == (nics, [])
    faster, given = accelerated(nics, os.devnull)
    assert (faster[0].vhost, len(given)) == (True, 2)
    close_all(given)
    assert len(os.listdir("/proc/self/fd")) == before
