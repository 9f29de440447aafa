"""The two sockets and the wrapper: permissions for descriptors, and QEMU's inherited ones."""

import asyncio
import contextlib
import itertools
import os
import socket
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from services.netd.tests.pretended_host import Node, eventually

from virtbus.netd.core.wrapper_frame import PROTOCOL
from virtbus.netd.edge.fd_passing import (
    MAX_CONNECTIONS,
    READ_TIMEOUT_S,
    SHARE_OF_USER,
    Handover,
    HandoverServer,
)
from virtbus.netd.edge.wrapper_install import install
from virtbus.schemas.node_rpc import Arm, Armed, ArmNic
from virtbus.schemas.wire import encode, read

pytestmark = pytest.mark.integration

A = "0192f0c1-2d3e-7abc-8def-00000000000a"
B = "0192f0c1-2d3e-7abc-8def-00000000000b"
DOMAIN = "virtbus-0192f0c1"
CGROUPS = Path("/sys/fs/cgroup/unified")


class Desk:
    """A hand-over server, its reports, and the wrapper installed for it."""

    def __init__(self, node: Node, server: HandoverServer, done: list[Handover]) -> None:
        self.node = node
        self.server = server
        self.done = done
        self.emulator = node.host.tmp / "qemu"
        self.emulator.write_text(
            '#!/bin/sh\nfor a in "$@"; do echo "arg $a"; done\nexec ls -l /proc/self/fd\n'
        )
        self.emulator.chmod(0o755)

    async def arm(self, uid: str = A, **change: object) -> Armed:
        state = self.node.attachments.state_of(uid)
        macs = [interface.mac for interface in state.interfaces] if state else []
        nics = tuple(
            ArmNic(device={"driver": "virtio-net-pci", "id": f"n{i}"}, mac=mac)
            for i, mac in enumerate(macs)
        )
        arm = Arm(uid=uid, epoch=1, domain_name=DOMAIN, nics=nics).model_copy(update=change)
        reader, writer = await asyncio.open_unix_connection(self.server.admin_path)
        body = encode(arm)
        writer.write(len(body).to_bytes(4, "big") + body)
        answer = await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))
        writer.close()
        return read(Armed, answer)

    def wrapper(self, language: str) -> Path:
        return install(
            self.node.host.tmp / language,
            self.server.wrapper_path,
            emulator=self.emulator,
            compiler="gcc" if language == "c" else None,
        )

    async def start(
        self, language: str, *arguments: str, uid: str = A, domain: str = DOMAIN
    ) -> tuple[int, list[str], str]:
        """Run the wrapper as libvirt does, in the domain's cgroup; return its code and output."""
        with machine_cgroup(domain) as procs:
            process = await asyncio.create_subprocess_exec(
                "/bin/sh",
                "-c",
                f'echo $$ > {procs}; exec "$0" "$@"',
                str(self.wrapper(language)),
                *("-name", f"guest={domain},debug-threads=on", "-uuid", uid, *arguments),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            output, errors = await process.communicate()
        return process.returncode or 0, output.decode().splitlines(), errors.decode()


@contextlib.contextmanager
def machine_cgroup(domain: str) -> Iterator[Path]:
    if not (CGROUPS / "cgroup.procs").exists():
        pytest.skip("needs cgroup v2")
    top = CGROUPS / f"vbtest-{uuid.uuid4().hex[:8]}"
    machine = top / f"qemu-7-{domain}.libvirt-qemu"
    machine.mkdir(parents=True)
    try:
        yield machine / "cgroup.procs"
    finally:
        machine.rmdir()
        top.rmdir()


@pytest.fixture
async def desk(node: Node) -> AsyncIterator[Desk]:
    done: list[Handover] = []
    run_dir = node.host.tmp / "run"
    server = HandoverServer(
        run_dir / "netd", node.attachments, str(node.host.tmp / "qemu"), done.append
    )
    async with asyncio.TaskGroup() as group:
        task = group.create_task(server.run())
        await eventually(server.wrapper_path.exists)
        yield Desk(node, server, done)
        task.cancel()


@pytest.mark.parametrize("language", ["c", "python"])
async def test_qemu_is_started_with_its_taps_and_inherits_nothing_else(
    desk: Desk, language: str
) -> None:
    await desk.node.attach(A, networks=("default", "default"))
    assert (await desk.arm()).error is None
    code, said, errors = await desk.start(language, "-S")
    assert (code, errors) == (0, "")
    state = desk.node.attachments.state_of(A)
    assert state is not None
    opened = dict(line.split()[-3::2] for line in said if " -> " in line)
    taps = [number for number, what in opened.items() if what == "/dev/net/tun"]
    assert len(taps) == 2
    args = [line[4:] for line in said if line.startswith("arg ")]
    expected = []
    for index, (fd, interface) in enumerate(zip(taps, state.interfaces, strict=True)):
        expected += ["-netdev", f"tap,id=net{index},fd={fd}"]
        device = f'{{"driver":"virtio-net-pci","id":"n{index}","netdev":"net{index}",'
        expected += ["-device", f'{device}"mac":"{interface.mac}"}}']
    assert args[-len(expected) :] == expected
    assert args[:5] == ["-name", f"guest={DOMAIN},debug-threads=on", "-uuid", A, "-S"]
    others = [number for number, what in opened.items() if not what.endswith("/fd")]
    assert sorted(others) == ["0", "1", "2", *taps]
    (times,) = desk.done
    assert times.entered_ns <= times.connected_ns <= times.asked_ns <= times.granted_ns


@pytest.mark.parametrize("language", ["c", "python"])
async def test_the_guest_sees_the_uuid_of_its_firmware(desk: Desk, language: str) -> None:
    spec = {"firmware": {"uuid": B}}
    await desk.node.attach(A, domain=spec)
    await desk.arm()
    _code, said, _errors = await desk.start(language)
    assert said[: len(said)].count("arg -uuid") == 2
    args = [line[4:] for line in said if line.startswith("arg ")]
    assert args[-2:] == ["-uuid", B]


@pytest.mark.parametrize("language", ["c", "python"])
async def test_a_probe_reaches_the_emulator_untouched(desk: Desk, language: str) -> None:
    wrapper = desk.wrapper(language)
    process = await asyncio.create_subprocess_exec(
        str(wrapper), "-S", "-machine", "none", stdout=asyncio.subprocess.PIPE
    )
    output, _errors = await process.communicate()
    args = [line for line in output.decode().splitlines() if line.startswith("arg ")]
    assert args == ["arg -S", "arg -machine", "arg none"]


@pytest.mark.parametrize("language", ["c", "python"])
async def test_refusals_are_one_line_that_libvirt_can_show(desk: Desk, language: str) -> None:
    await desk.node.attach(A)
    code, said, errors = await desk.start(language)
    assert (code, said) == (1, [])
    assert errors == (
        "virtbus: not_armed: no start of this VM is under way; start it with `virtbus vm start`\n"
    )


@pytest.mark.parametrize("language", ["c", "python"])
async def test_without_netd_the_wrapper_reports_it(desk: Desk, language: str) -> None:
    wrapper = install(
        desk.node.host.tmp / "alone",
        desk.node.host.tmp / "nobody.sock",
        emulator=desk.emulator,
        compiler="gcc" if language == "c" else None,
    )
    process = await asyncio.create_subprocess_exec(
        *(str(wrapper), "-name", "guest=x", "-uuid", A), stderr=asyncio.subprocess.PIPE
    )
    _output, errors = await process.communicate()
    assert process.returncode == 1
    assert errors.startswith(b"virtbus: netd_unreachable: ")
    assert errors.count(b"\n") == 1


@pytest.mark.parametrize("language", ["c", "python"])
@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (b"A\0/bin/true\x002\0-netdev\0fd=@fd1@\0", b"netd_answer: 0 descriptors came, 2 were"),
        (b"A\0", b"netd_answer"),
        (b"", b"netd_gone"),
    ],
)
async def test_a_wrapper_with_an_invalid_answer_never_starts_qemu(
    desk: Desk, language: str, answer: bytes, code: bytes
) -> None:
    path = desk.node.host.tmp / "fake.sock"

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))
        writer.write(len(answer).to_bytes(4, "big") + answer if answer else b"")
        writer.close()

    wrapper = install(
        desk.node.host.tmp / "fake",
        path,
        emulator=desk.emulator,
        compiler="gcc" if language == "c" else None,
    )
    async with await asyncio.start_unix_server(serve, path):
        process = await asyncio.create_subprocess_exec(
            *(str(wrapper), "-name", "guest=x", "-uuid", A),
            stderr=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        output, errors = await process.communicate()
    assert (process.returncode, output) == (1, b"")
    assert code in errors


async def test_a_second_fetch_is_refused(desk: Desk) -> None:
    await desk.node.attach(A)
    await desk.arm()
    assert (await desk.start("c"))[0] == 0
    code, _said, errors = await desk.start("c")
    assert code == 1
    assert "not_armed" in errors


async def test_a_stopped_guest_can_be_armed_and_started_again(desk: Desk) -> None:
    await desk.node.attach(A)
    for _start in range(3):
        await desk.arm()
        assert (await desk.start("c"))[0] == 0


async def test_a_tap_that_a_process_still_holds_is_refused(desk: Desk) -> None:
    await desk.node.attach(A)
    await desk.arm()
    async with desk.node.guest(A):
        code, _said, errors = await desk.start("c")
    assert code == 1
    assert "tap_busy" in errors


async def test_another_vms_process_is_denied_and_the_arm_stays(desk: Desk) -> None:
    await desk.node.attach(A)
    await desk.arm()
    code, _said, errors = await desk.start("c", domain="virtbus-other")
    assert code == 1
    assert "denied" in errors
    assert (await desk.start("c"))[0] == 0


async def test_a_process_outside_the_domains_cgroup_is_denied(desk: Desk) -> None:
    await desk.node.attach(A)
    await desk.arm()
    reader, writer = await asyncio.open_unix_connection(desk.server.wrapper_path)
    body = b"\0".join([PROTOCOL, A.encode(), b"1", b"2", b""])
    writer.write(len(body).to_bytes(4, "big") + body)
    assert b"denied: process" in await reader.read()
    writer.close()


async def test_a_grant_for_an_impossible_start_is_refused(desk: Desk) -> None:
    await desk.node.attach(A)
    unknown, older = await desk.arm(B), await desk.arm(A, epoch=9)
    assert unknown.error is not None
    assert unknown.error.reason == "not_attached"
    assert older.error is not None
    assert older.error.reason == "stale_epoch"


async def test_a_domain_with_other_macs_is_refused(desk: Desk) -> None:
    await desk.node.attach(A)
    await desk.arm(nics=(ArmNic(device={"driver": "virtio-net-pci"}, mac="02:00:00:00:00:01"),))
    _code, _said, errors = await desk.start("c")
    assert "mac_mismatch" in errors


@pytest.mark.parametrize(
    "sent",
    [
        b"\0\0\0\0",
        b"\xff\xff\xff\xff",
        (64 * 1024 + 1).to_bytes(4, "big"),
        (5).to_bytes(4, "big") + b"hello",
        (60).to_bytes(4, "big") + (PROTOCOL + b"\0" + A.upper().encode() + b"\0").ljust(60, b"\0"),
        (20).to_bytes(4, "big") + PROTOCOL + b"\0..",
    ],
)
async def test_bad_frames_are_closed_and_others_served(desk: Desk, sent: bytes) -> None:
    reader, writer = await asyncio.open_unix_connection(desk.server.wrapper_path)
    writer.write(sent)
    with contextlib.suppress(ConnectionResetError):
        assert await reader.read() == b""
    writer.close()
    await desk.node.attach(A)
    await desk.arm()
    assert (await desk.start("c"))[0] == 0


async def test_half_a_frame_is_dropped(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("virtbus.netd.edge.fd_passing.READ_TIMEOUT_S", 0.05)
    reader, writer = await asyncio.open_unix_connection(desk.server.wrapper_path)
    writer.write(b"\0\0\0\x50half")
    assert await reader.read() == b""
    writer.close()


async def test_a_thousand_connections_leave_no_descriptors_and_others_are_served(
    desk: Desk,
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _batch in range(10):
        sockets = []
        for _number in range(100):
            sock = socket.socket(socket.AF_UNIX)
            sock.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                sock.connect(str(desk.server.wrapper_path))
            sockets.append(sock)
        await asyncio.sleep(0)
        for sock in sockets:
            sock.close()
    await eventually(lambda: len(os.listdir("/proc/self/fd")) <= before)
    await desk.node.attach(A)
    await desk.arm()
    assert (await desk.start("c"))[0] == 0


async def test_one_machine_or_user_holds_its_share_and_others_are_served(desk: Desk) -> None:
    """A compromised emulator requests descriptors and then stays silent."""
    await desk.node.attach(A)
    await desk.arm()
    async with contextlib.AsyncExitStack() as stack:
        for _number in range(MAX_CONNECTIONS):
            sock = stack.enter_context(socket.socket(socket.AF_UNIX))
            sock.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                sock.connect(str(desk.server.wrapper_path))
            await asyncio.sleep(0.001)
        began_s = time.monotonic()
        code, _said, errors = await desk.start("c")
        assert (code, errors) == (0, "")
        assert time.monotonic() - began_s < READ_TIMEOUT_S
        reader, writer = await asyncio.open_unix_connection(desk.server.wrapper_path)
        assert await reader.read() == b"", "over the share, it is closed unread"
        writer.close()


FLOOD = """
import os, socket, sys, threading, time
folder, name = os.path.split(sys.argv[1])
os.chdir(folder)  # pytest closes its own folder to other users at each start
os.setgid(65534); os.setuid(65534)
end = time.monotonic() + float(sys.argv[2])
def connect():
    while time.monotonic() < end:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.setblocking(sys.argv[3] == "waits")
            try: sock.connect(name)
            except BlockingIOError: pass
threads = [threading.Thread(target=connect) for _ in range(20)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""


@pytest.mark.parametrize("way", ["waits", "spins"])
async def test_a_flood_of_another_user_keeps_no_guest_from_starting(desk: Desk, way: str) -> None:
    """Forty threads connect as fast as they can, with a backlog that is always full."""
    path = desk.server.wrapper_path
    path.parent.chmod(path.parent.stat().st_mode | 0o011)
    await desk.node.attach(A)
    desk.wrapper("c")
    flood = (sys.executable, "-c", FLOOD, str(path), "6", way)
    crowd = [await asyncio.create_subprocess_exec(*flood) for _process in range(2)]
    await asyncio.sleep(1)
    began_s = time.monotonic()
    await desk.arm()
    code, _said, errors = await desk.start("c")
    took_s = time.monotonic() - began_s
    assert [process.returncode for process in crowd] == [None, None], "they were still at it"
    assert (code, errors) == (0, "")
    assert took_s < 4, "half of the wrapper's patience"
    assert [await process.wait() for process in crowd] == [0, 0]


async def test_a_user_with_cgroups_of_many_names_leaves_places_for_others(desk: Desk) -> None:
    number = itertools.count()
    desk.server._read_peer = lambda _pid: (b"", f"0::/qemu-1-{next(number)}.libvirt-qemu")
    async with contextlib.AsyncExitStack() as stack:
        crowd = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(MAX_CONNECTIONS)]
        for sock in crowd:
            sock.setblocking(False)
            sock.connect(str(desk.server.wrapper_path))
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.1)
        assert sum(map(_is_closed, crowd)) == MAX_CONNECTIONS - SHARE_OF_USER


def _is_closed(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except BlockingIOError:
        return False


async def test_a_cgroup_that_is_no_text_ends_nothing_but_its_connection(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    await desk.node.attach(A)
    await desk.arm()
    with machine_cgroup(DOMAIN) as procs:
        odd = os.fsencode(procs.parent) + b"/odd-\xff"
        os.mkdir(odd)
        try:
            process = await asyncio.create_subprocess_exec(
                *("/bin/sh", "-c", b'echo $$ > "$0"/cgroup.procs; exec "$@"', odd),
                *(str(desk.wrapper("c")), "-name", "guest=x", "-uuid", A),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            _output, errors = await process.communicate()
        finally:
            os.rmdir(odd)
    assert (process.returncode, errors) == (0, b""), "it is below its machine's cgroup"
    assert "connection_failed" not in caplog.text


async def test_a_peers_failure_costs_only_its_own_connection(desk: Desk) -> None:
    def broken(_pid: int) -> tuple[bytes, str]:
        message = "something that nobody thought of"
        raise LookupError(message)

    await desk.node.attach(A)
    await desk.arm()
    real, desk.server._read_peer = desk.server._read_peer, broken
    code, _said, _errors = await desk.start("c")
    assert code == 1
    desk.server._read_peer = real
    assert (await desk.start("c"))[0] == 0


async def test_descriptors_that_a_peer_sends_are_closed(desk: Desk) -> None:
    inner, outer = os.pipe()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(desk.server.wrapper_path))
        socket.send_fds(sock, [b"\0\0\0\x50half"], [outer] * 100)
        os.close(outer)
        os.set_blocking(inner, False)
        ended: Callable[[], bool] = lambda: os.read(inner, 1) == b""  # noqa: E731
        await eventually(lambda: _not_blocking(ended))
    os.close(inner)


def _not_blocking(check: Callable[[], bool]) -> bool:
    try:
        return check()
    except BlockingIOError:
        return False


async def test_the_sockets_have_the_documented_permissions(desk: Desk) -> None:
    assert desk.server.admin_path.stat().st_mode & 0o777 == 0o600
    assert desk.server.wrapper_path.stat().st_mode & 0o777 == 0o666
    assert desk.server.admin_path.parent.stat().st_mode & 0o777 == 0o711


async def test_the_wrapper_is_rewritten_only_when_something_changed(desk: Desk) -> None:
    path = desk.wrapper("python")
    before = path.stat()
    assert desk.wrapper("python").stat().st_ctime_ns == before.st_ctime_ns
    desk.emulator.chmod(0o700)
    desk.emulator.chmod(0o755)
    after = desk.wrapper("python").stat()
    assert after.st_ctime_ns > before.st_ctime_ns
    assert after.st_ino == before.st_ino
    assert desk.wrapper("python").stat().st_ctime_ns == after.st_ctime_ns
    moved = install(path.parent, Path("/elsewhere.sock"), emulator=desk.emulator, compiler=None)
    assert moved.stat().st_ino != before.st_ino
    assert moved.stat().st_mode & 0o777 == 0o755


async def test_without_a_compiler_the_python_wrapper_is_installed(desk: Desk) -> None:
    directory = desk.node.host.tmp / "none"
    for compiler in ("no-such-compiler", "/bin/false"):
        path = install(
            directory, desk.server.wrapper_path, emulator=desk.emulator, compiler=compiler
        )
        assert path.read_bytes().startswith(b"#!/usr/bin/python3 -ISE\n")
