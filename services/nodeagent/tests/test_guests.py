"""Guest-agent data: from a simulated libvirt to a client on the bus."""

import asyncio
import base64
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import libvirt
import libvirt_qemu
import pytest
from services.nodeagent.tests.pretended_node import record

from virtbus.bus.client.memory_bus import MemoryBus, MemoryServer
from virtbus.nodeagent.core.guest_answers import (
    MOST_BYTES,
    MOST_ITEMS,
    MOST_PARTS,
    guest_info,
    named_disks,
)
from virtbus.nodeagent.edge import libvirt_displays, libvirt_links
from virtbus.nodeagent.edge.console import Consoles
from virtbus.nodeagent.edge.libvirt_calls import Threads
from virtbus.nodeagent.edge.libvirt_displays import LibvirtDisplays
from virtbus.nodeagent.edge.libvirt_guests import QUICK_S, LibvirtGuests
from virtbus.nodeagent.edge.libvirt_links import LibvirtLinks
from virtbus.nodeagent.rpc import AgentRpc
from virtbus.nodeagent.vm.actor import VmActor
from virtbus.nodeagent.vm.observation import Observed
from virtbus.schemas import subjects
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.guest import GuestAsk, GuestExec, GuestExecuted, GuestInfo, GuestQuestion
from virtbus.schemas.wire import encode, validate

UIDS = tuple(f"0192f0c1-2d3e-7abc-8def-{number:012x}" for number in range(9))
ANSWERS: dict[str, object] = {
    "hostname": "web",
    "os.id": "debian",
    "os.pretty-name": "Debian GNU/Linux 12 (bookworm)",
    "os.kernel-release": "6.1.0",
    "timezone.name": "CET",
    "timezone.offset": 3600,
    "user.count": 1,
    "user.0.name": "debian",
    "user.0.login-time": 1_790_000_000_500,
    "fs.count": 1,
    "fs.0.name": "vda1",
    "fs.0.mountpoint": "/",
    "fs.0.fstype": "ext4",
    "fs.0.total-bytes": 2 * 1024**3,
    "fs.0.used-bytes": 1024**3,
    "fs.0.disk.count": 1,
    "fs.0.disk.0.alias": "vda",
    "if.count": 1,
    "if.0.name": "enp1s0",
    "if.0.hwaddr": "52:54:00:12:34:56",
    "if.0.addr.count": 2,
    "if.0.addr.0.addr": "10.127.0.5",
    "if.0.addr.0.prefix": 24,
    "if.0.addr.1.addr": "fe80::1",
    "if.0.addr.1.prefix": 64,
}


class Domain:
    """A libvirt domain whose guest agent answers on a test's signal."""

    def __init__(self, uid: str, host: "Host") -> None:
        self._uid = uid
        self._host = host

    def name(self) -> str:
        return f"vb-{self._uid}"

    def UUIDString(self) -> str:  # noqa: N802  libvirt's name
        return self._uid

    def agentSetResponseTimeout(self, timeout_s: int) -> int:  # noqa: N802
        self._host.patience_s = self._patience_s = timeout_s
        return 0

    def guestInfo(self, types: int) -> dict[str, object]:  # noqa: N802
        self._host.asked.append((self._uid, types))
        if self._host.error is not None:
            raise self._host.error
        if self._uid in self._host.hung and not self._host.let_go.wait(self._patience_s):
            text = "Guest agent is not responding: no answer in time"
            raise Refusal(libvirt.VIR_ERR_AGENT_UNRESPONSIVE, text)
        return ANSWERS

    def fsFreeze(self) -> int:  # noqa: N802
        if self._host.error is not None:
            raise self._host.error
        if self._uid in self._host.hung:
            self._host.let_go.wait(self._patience_s)
        return 1

    fsThaw = fsFreeze  # noqa: N815

    def isActive(self) -> bool:  # noqa: N802
        return self._host.active

    def command(self, text: str) -> str:
        """Answer a command for the agent: a program that prints its words, or sleeps."""
        asked = json.loads(text)
        arguments = asked["arguments"]
        if asked["execute"] == "guest-exec":
            self._host.programs.append([arguments["path"], *arguments["arg"]])
            if self._uid in self._host.hung and not self._host.let_go.wait(self._patience_s):
                text = "Guest agent is not responding: no answer in time"
                raise Refusal(libvirt.VIR_ERR_AGENT_UNRESPONSIVE, text)
            if arguments["path"] == "missing":
                refused = "unable to execute QEMU agent command 'guest-exec': no such file"
                raise Refusal(libvirt.VIR_ERR_INTERNAL_ERROR, refused)
            return json.dumps({"return": {"pid": len(self._host.programs)}})
        words = self._host.programs[arguments["pid"] - 1]
        self._host.looks += 1
        if words[0] == "frozen" and self._host.looks == 1:
            text = "Guest agent is not responding: no answer in time"
            raise Refusal(libvirt.VIR_ERR_AGENT_UNRESPONSIVE, text)
        if words[0] == "sleep" or self._host.looks < 2:
            return json.dumps({"return": {"exited": False}})
        if words[0] == "lie":
            return json.dumps({"return": {"exited": True, "exitcode": "no", "out-data": 7}})
        out = base64.b64encode(" ".join(words).encode()).decode()
        if words[0] == "windows":
            done = {"exited": True, "exitcode": int(words[1], 16), "out-data": "\u00e9"}
            return json.dumps({"return": done})
        done = {"exited": True, "exitcode": 3, "out-data": out}
        return json.dumps({"return": done | ({"signal": 9} if words[0] == "killed" else {})})

    def XMLDesc(self) -> str:  # noqa: N802
        return "<graphics />"

    def openGraphicsFD(self, _index: int, _flags: int) -> int:  # noqa: N802
        self._host.opened.append(self._uid)
        if self._uid in self._host.hung:
            self._host.let_go.wait(30)
        return socket.socket(socket.AF_UNIX).detach()


class Host:
    """A connection to libvirt, on which guests may hang."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []
        self.opened: list[str] = []
        self.hung: set[str] = set()
        self.active = True
        self.programs: list[list[str]] = []
        self.looks = 0
        self.let_go = threading.Event()
        self.error: libvirt.libvirtError | None = None
        self.patience_s = 0

    def lookupByUUIDString(self, uid: str) -> Domain:  # noqa: N802
        return Domain(uid, self)

    def setKeepAlive(self, *_: int) -> int:  # noqa: N802
        return 0

    def registerCloseCallback(self, *_: object) -> int:  # noqa: N802
        return 0

    def close(self) -> int:
        return 0


class Refusal(libvirt.libvirtError):
    """libvirt's error, without its connection."""

    def __init__(self, code: int, text: str) -> None:
        Exception.__init__(self, text)
        self.err: tuple[int, int, str] = (code, libvirt.VIR_FROM_REMOTE, text)

    def get_error_code(self) -> int:
        return self.err[0]

    def get_error_domain(self) -> int:
        return self.err[1]

    def get_error_message(self) -> str:
        return self.err[2]


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    found = Host()
    monkeypatch.setattr(libvirt, "open", lambda _uri: found)
    monkeypatch.setattr(
        libvirt_qemu, "qemuAgentCommand", lambda domain, text, _limit, _flags: domain.command(text)
    )
    yield found
    found.let_go.set()


@pytest.fixture
async def guests(host: Host) -> AsyncIterator[LibvirtGuests]:
    threads = Threads("test")
    links = [LibvirtLinks("qemu:///system", threads, at_once=3, stuck_limit=4) for _ in range(3)]
    yield LibvirtGuests(*links)
    for one in links:
        one.close()
    threads.close()


@pytest.fixture
def here() -> dict[str, VmActor]:
    """The VMs of the node."""
    spec = {"domain": {"devices": {"disks": [{"name": "root"}]}}}
    vm = SimpleNamespace(record=record(spec=spec), observed=Observed())
    return {UIDS[0]: cast("VmActor", SimpleNamespace(vm=vm))}


@pytest.fixture
async def client(
    guests: LibvirtGuests, here: dict[str, VmActor], tmp_path: Path
) -> AsyncIterator[MemoryBus]:
    server = MemoryServer()
    path: Callable[[str], Path] = lambda _uid: tmp_path / "x"  # noqa: E731
    agent = AgentRpc(MemoryBus(server, "agent"), "n1", Consoles(path, path), guests)
    async with agent.serve(here):
        yield MemoryBus(server, "test")


async def ask(client: MemoryBus, uid: str = UIDS[0], **words: Any) -> GuestInfo:
    subject = subjects.rpc("n1", "agent", "guest")
    answer = await client.request(subject, GuestAsk(uid=uid, **words), timeout_s=10)
    return validate(GuestInfo, answer)


async def test_guest_agent_data_is_available_over_the_bus(client: MemoryBus, host: Host) -> None:
    info = await ask(client)
    assert host.asked == [(UIDS[0], 0)], "all that it knows"
    assert info.hostname == "web"
    assert info.os is not None
    assert (info.os.id, info.os.timezone, info.os.utc_offset_s) == ("debian", "CET", 3600)
    assert [(user.name, user.login_time_s) for user in info.users] == [("debian", 1_790_000_000.5)]
    assert [(fs.mountpoint, fs.used_bytes, fs.disks) for fs in info.filesystems] == [
        ("/", 1024**3, ("vda",))
    ]
    assert info.filesystems[0].spec_disks == ("root",)
    assert info.interfaces[0].addresses == ("10.127.0.5/24", "fe80::1/64")


async def test_only_the_requested_data_is_requested_from_the_guest(
    client: MemoryBus, host: Host
) -> None:
    await ask(client, about=(GuestQuestion.USERS, GuestQuestion.FILESYSTEMS))
    wanted = libvirt.VIR_DOMAIN_GUEST_INFO_USERS | libvirt.VIR_DOMAIN_GUEST_INFO_FILESYSTEM
    assert host.asked == [(UIDS[0], wanted)]


async def test_a_vm_of_another_node_gets_no_request(client: MemoryBus, host: Host) -> None:
    with pytest.raises(VirtbusError) as caught:
        await ask(client, UIDS[1])
    assert caught.value.reason == "vm_not_here"
    assert host.asked == []


async def test_a_vm_that_leaves_while_its_guest_answers_gets_the_answer(
    client: MemoryBus, host: Host, here: dict[str, VmActor]
) -> None:
    host.hung.add(UIDS[0])
    async with asyncio.TaskGroup() as group:
        asked = group.create_task(ask(client))
        while not host.asked:
            await asyncio.sleep(0.01)
        here.clear()
        host.let_go.set()
    assert asked.result().hostname == "web"


async def execute(client: MemoryBus, *words: str, timeout_s: float = 5) -> GuestExecuted:
    """Run a program in the guest, over the bus."""
    want = GuestExec(uid=UIDS[0], words=words, timeout_s=timeout_s)
    answer = await client.request(subjects.rpc("n1", "agent", "exec"), want, timeout_s=30)
    return validate(GuestExecuted, answer)


async def test_a_program_runs_in_the_guest_to_its_end(client: MemoryBus, host: Host) -> None:
    done = await execute(client, "echo", "a b", "c")
    assert (done.exit_code, done.stdout, done.stderr) == (3, b"echo a b c", b"")
    assert host.programs == [["echo", "a b", "c"]]
    assert (await execute(client, "killed")).exit_code == 128 + 9


async def test_a_program_that_does_not_end_is_killed(client: MemoryBus, host: Host) -> None:
    with pytest.raises(VirtbusError, match="did not end within 1 s") as refused:
        await execute(client, "sleep", "60", timeout_s=1)
    assert (refused.value.code, refused.value.reason) == (Code.DEADLINE, "exec_timeout")
    assert host.programs[1] == ["kill", "-KILL", "1"]


async def test_a_program_outlasts_the_silence_of_its_guest_agent(client: MemoryBus) -> None:
    assert (await execute(client, "frozen")).exit_code == 3


@pytest.mark.parametrize(("code", "told"), [("C0000000", 1), ("100", 1), ("1FF", 255), ("0", 0)])
async def test_no_failure_is_reported_as_success_and_no_output_breaks_the_answer(
    client: MemoryBus, code: str, told: int
) -> None:
    done = await execute(client, "windows", code)
    assert (done.exit_code, done.stdout) == (told, b"")


async def test_a_program_is_started_once_if_the_guest_answers_late(
    guests: LibvirtGuests, host: Host
) -> None:
    host.hung.add(UIDS[0])
    with pytest.raises(VirtbusError) as refused:
        await guests.execute(UIDS[0], ("touch", "/x"), timeout_s=1.5 * QUICK_S)
    assert refused.value.reason == "guest_agent_silent"
    await asyncio.sleep(QUICK_S)
    assert host.programs == [["touch", "/x"]]


async def test_an_agent_that_refuses_or_lies_about_a_program_is_reported(
    client: MemoryBus,
) -> None:
    for word, reason in (("missing", "guest_agent_refused"), ("lie", "guest_agent_silent")):
        with pytest.raises(VirtbusError) as refused:
            await execute(client, word)
        assert refused.value.reason == reason


async def test_an_absent_agent_is_reported_with_the_next_step(
    client: MemoryBus, host: Host
) -> None:
    text = "Guest agent is not responding: QEMU guest agent is not connected"
    host.error = Refusal(libvirt.VIR_ERR_AGENT_UNRESPONSIVE, text)
    with pytest.raises(VirtbusError) as caught:
        await ask(client)
    assert (caught.value.code, caught.value.reason) == (Code.CONFLICT, "guest_agent_absent")
    assert "install and start qemu-guest-agent" in str(caught.value)


async def test_an_agent_that_libvirt_gives_up_is_silent(client: MemoryBus, host: Host) -> None:
    text = "Guest agent is not responding: Guest agent not available for now"
    host.error = Refusal(libvirt.VIR_ERR_AGENT_UNRESPONSIVE, text)
    with pytest.raises(VirtbusError) as caught:
        await ask(client)
    assert (caught.value.code, caught.value.reason) == (Code.UNAVAILABLE, "guest_agent_silent")


async def test_a_hung_guest_delays_only_its_own_client(guests: LibvirtGuests, host: Host) -> None:
    host.hung = {UIDS[0]}
    for _ in range(6):
        with pytest.raises(VirtbusError) as caught:
            await guests.ask(UIDS[0], (), timeout_s=0.05)
        assert caught.value.reason == "guest_agent_silent"
    assert host.asked == [(UIDS[0], 0)], "asked once, however often it is tried"
    for uid in UIDS[1:]:
        assert await guests.ask(uid, (), timeout_s=10) == ANSWERS
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(guests.ask(UIDS[0], (), timeout_s=10))
        host.let_go.set()
    assert waiting.result() == ANSWERS, "and it is asked again once the first call has ended"
    assert len(host.asked) == 10


async def test_libvirt_waits_for_an_answer_no_longer_than_the_client(
    guests: LibvirtGuests, host: Host
) -> None:
    await guests.ask(UIDS[0], (), timeout_s=3)
    assert host.patience_s == QUICK_S, "it is quick, as far as is known"
    host.hung = {UIDS[0]}
    with pytest.raises(VirtbusError):
        await guests.ask(UIDS[0], (), timeout_s=2.5)
    assert host.patience_s in {1, 2}, "what is left, in whole seconds"
    host.hung = set()
    await guests.ask(UIDS[0], (), timeout_s=60)
    assert host.patience_s == 10


async def test_any_number_of_slow_guests_delays_no_quick_one(
    guests: LibvirtGuests, host: Host
) -> None:
    host.hung, took_s = set(UIDS[:8]), 0.0
    for _ in range(4):  # all are known after three
        async with asyncio.TaskGroup() as group:
            slow = [
                group.create_task(silent(guests, uid, timeout_s=1.2)) for uid in sorted(host.hung)
            ]
            await asyncio.sleep(0.1)
            begun_s = time.monotonic()
            assert await guests.ask(UIDS[8], (), timeout_s=10) == ANSWERS
            took_s = time.monotonic() - begun_s
        assert all(one.result() for one in slow)
    assert took_s < 0.5, "since they are known, it waits for none of them"


async def silent(guests: LibvirtGuests, uid: str, *, timeout_s: float) -> bool:
    try:
        await guests.ask(uid, (), timeout_s=timeout_s)
    except VirtbusError as error:
        return error.reason == "guest_agent_silent"
    return False


async def test_displays_do_not_wait_for_guest_agents_nor_for_hung_displays(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libvirt_displays, "CONNECT_S", 0.2)
    threads = Threads("test")
    links = LibvirtLinks("qemu:///system", threads, at_once=2, stuck_limit=4)
    displays = LibvirtDisplays(links)
    host.hung = {UIDS[0]}
    for reason in ("libvirt_stuck", *["display_busy"] * 3):
        with pytest.raises(VirtbusError) as caught:
            await displays.connect(UIDS[0])
        assert caught.value.reason == reason
    assert host.opened == [UIDS[0]], "tried once, however often it is asked for"
    (await displays.connect(UIDS[1])).close()
    host.let_go.set()
    links.close()
    threads.close()


async def test_a_refused_connection_does_not_cost_the_next_client_its_turn(
    guests: LibvirtGuests, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_uri: str) -> None:
        raise Refusal(libvirt.VIR_ERR_NO_CONNECT, "no libvirtd")

    monkeypatch.setattr(libvirt_links, "FAIL_FAST_S", 0.0)
    with monkeypatch.context() as patched:
        patched.setattr(libvirt, "open", refuse)
        with pytest.raises(VirtbusError) as caught:
            await guests.ask(UIDS[0], (), timeout_s=10)
        assert caught.value.reason == "libvirt_down"
    assert await guests.ask(UIDS[0], (), timeout_s=10) == ANSWERS


def test_excessive_guest_data_is_cut_to_fit_a_message() -> None:
    huge: dict[str, object] = {
        "hostname": "x" * 10_000,
        "os.id": 7,
        "user.count": 2**63,
        "fs.count": 2**63,
        "if.count": "many",
        "fs.0.total-bytes": "big",
        "fs.0.disk.count": -3,
    }
    for number in range(MOST_ITEMS):
        huge |= {f"fs.{number}.{key}": "é" * 1000 for key in ("name", "mountpoint", "fstype")}
        huge[f"fs.{number}.disk.count"] = 2**40
        huge |= {f"fs.{number}.disk.{part}.alias": "é" * 1000 for part in range(MOST_PARTS)}
    info = guest_info(huge)
    assert (len(info.hostname), info.interfaces) == (MOST_BYTES, ())
    assert (len(info.users), len(info.filesystems)) == (MOST_ITEMS, MOST_ITEMS)
    assert info.filesystems[0].total_bytes is None
    assert info.os is not None
    assert info.os.id == ""
    assert len(encode(info)) < 1024**2


def test_a_disk_without_an_address_in_the_answer_is_found_by_its_serial() -> None:
    disks = [{"name": "root"}, {"name": "data", "bus": "usb"}]
    answers: dict[str, object] = {
        "fs.count": 2,
        "fs.0.name": "sda1",
        "fs.0.disk.count": 2,
        "fs.0.disk.0.serial": "QEMU_QEMU_HARDDISK_data-0:0",
        "fs.0.disk.1.serial": "of-nobody",
        "fs.1.name": "vda1",
        "fs.1.disk.count": 1,
        "fs.1.disk.0.alias": "vda",
        "fs.1.disk.0.serial": "root",
    }
    vm = record(spec={"domain": {"devices": {"disks": disks}}})
    info = named_disks(guest_info(answers), answers, vm, {})
    assert [one.spec_disks for one in info.filesystems] == [("data",), ("root",)]


def test_a_guest_without_data_gives_an_empty_answer() -> None:
    assert guest_info({}) == GuestInfo()
