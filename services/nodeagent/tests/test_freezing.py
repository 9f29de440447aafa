"""A frozen guest is thawed at its deadline, also after a death of its agent or of libvirtd."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import libvirt
import pytest
from services.nodeagent.tests.pretended_node import (
    NODE,
    Insides,
    Node,
    eventually,
    in_state,
    record,
    uid,
)
from services.nodeagent.tests.test_guests import Host, Refusal, guests, host

from virtbus.bus.runtime.sources import Sources
from virtbus.nodeagent.core.freezes import Frozen
from virtbus.nodeagent.core.ports import DomainChange, DomainEvent, Ending
from virtbus.nodeagent.edge import freezing
from virtbus.nodeagent.edge.freeze_files import DiskFreezes
from virtbus.nodeagent.edge.freezing import GuestFreezes
from virtbus.nodeagent.edge.libvirt_guests import LibvirtGuests
from virtbus.schemas import subjects
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.vm_status import Condition

__all__ = ["guests", "host"]
A = uid(1)
SILENT = VirtbusError(Code.UNAVAILABLE, "guest_agent_silent", "the guest agent does not answer")
ABSENT = VirtbusError(Code.CONFLICT, "guest_agent_absent", "no guest agent runs in the guest")


class Host1:
    """A host whose agents come and go; its guest `A` stays."""

    def __init__(self, tmp: Path) -> None:
        self.vms = tmp
        self.file = tmp / A / "frozen"
        self.file.parent.mkdir()
        self.insides = Insides()
        self.now_ns = 10**18
        self.heard: list[tuple[str, str]] = []

    @asynccontextmanager
    async def agent(self) -> AsyncIterator[GuestFreezes]:
        sources = Sources(time_ns=lambda: self.now_ns)
        freezes = GuestFreezes(self.insides, DiskFreezes(self.vms), sources)
        freezes.heard = lambda _uid, change, why: self.heard.append((change, why))
        async with freezes.keeping():
            yield freezes

    async def thawed(self) -> None:
        await eventually(lambda: not self.insides.frozen and not self.file.exists())


@pytest.fixture
def at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host1:
    monkeypatch.setattr(freezing, "RETRY_S", (0.01, 0.02))
    return Host1(tmp_path)


async def refused(asking: Awaitable[Any]) -> str:
    with pytest.raises(VirtbusError) as caught:
        await asking
    return caught.value.reason


async def test_a_guest_is_thawed_at_its_deadline(at: Host1) -> None:
    async with at.agent() as freezes:
        await freezes.freeze(A, for_s=0.05, timeout_s=1)
        assert freezes.of(A) == Frozen(at.now_ns, at.now_ns + 50_000_000)
        assert at.insides.frozen == {A}
        await at.thawed()
        assert freezes.of(A) is None
        await eventually(lambda: at.heard == [("frozen", "asked"), ("thawed", "timeout")])


async def test_the_deadline_is_on_disk_before_the_guest_is_asked(at: Host1) -> None:
    async with at.agent() as freezes:
        at.file.parent.rmdir()
        assert await refused(freezes.freeze(A, for_s=9, timeout_s=1)) == "state_write"
        assert at.insides.done == []


@pytest.mark.parametrize("content", [None, b"", b"[]", b'{"since_ns": 1, "until_ns": "x"}'])
async def test_an_agent_thaws_at_its_start_what_is_over_or_unknown(
    at: Host1, content: bytes | None
) -> None:
    async with at.agent() as freezes:
        await freezes.freeze(A, for_s=60, timeout_s=1)
    assert at.insides.frozen, "the agent ended before the deadline"
    at.now_ns += 61 * 10**9
    if content is not None:
        at.file.write_bytes(content)
    async with at.agent():
        await at.thawed()


async def test_a_new_agent_keeps_a_deadline_that_is_not_over(at: Host1) -> None:
    async with at.agent() as freezes:
        await freezes.freeze(A, for_s=60, timeout_s=1)
    at.now_ns += 60 * 10**9 - 50_000_000
    async with at.agent() as freezes:
        assert freezes.of(A) is not None
        assert at.insides.done == ["freeze"]
        await at.thawed()


async def test_a_guest_is_asked_until_it_is_thawed(at: Host1) -> None:
    at.insides.errors["thaw"] = VirtbusError(Code.UNAVAILABLE, "libvirt_down", "it is away")
    async with at.agent() as freezes:
        await freezes.freeze(A, for_s=0.01, timeout_s=1)
        await eventually(lambda: at.insides.done.count("thaw") > 2)
        frozen = freezes.of(A)
        assert frozen is not None
        assert frozen.trouble == "it is away"
        del at.insides.errors["thaw"]
        await at.thawed()
        await eventually(lambda: at.heard[-1] == ("thawed", "timeout"))
    assert at.heard[:2] == [("frozen", "asked"), ("not thawed", "libvirt_down")]


async def test_a_second_freeze_sets_a_new_deadline(at: Host1) -> None:
    async with at.agent() as freezes:
        await freezes.freeze(A, for_s=0.1, timeout_s=1)
        await freezes.freeze(A, for_s=60, timeout_s=1)
        await asyncio.sleep(0.15)
        assert at.insides.frozen == {A}
        await freezes.freeze(A, for_s=0.01, timeout_s=1)
        await at.thawed()
        await eventually(lambda: at.heard[-1] == ("thawed", "timeout"))
    assert [change for change, _ in at.heard] == ["frozen", "extended", "extended", "thawed"]


async def test_a_guest_that_was_thawed_inside_is_frozen_again(at: Host1) -> None:
    async with at.agent() as freezes:
        await freezes.freeze(A, for_s=60, timeout_s=1)
        at.insides.frozen.clear()
        await freezes.freeze(A, for_s=60, timeout_s=1)
        assert at.insides.frozen == {A}


async def test_a_failed_extension_keeps_the_first_deadline(at: Host1) -> None:
    async with at.agent() as freezes:
        await freezes.freeze(A, for_s=60, timeout_s=1)
        before, file = freezes.of(A), at.file.read_bytes()
        at.insides.errors["freeze"] = SILENT
        at.now_ns += 10**9
        assert await refused(freezes.freeze(A, for_s=600, timeout_s=1)) == "guest_agent_silent"
        assert (freezes.of(A), at.file.read_bytes()) == (before, file)


async def test_a_guest_without_an_agent_is_refused_and_leaves_nothing(at: Host1) -> None:
    at.insides.errors["freeze"] = ABSENT
    async with at.agent() as freezes:
        assert await refused(freezes.freeze(A, for_s=60, timeout_s=1)) == "guest_agent_absent"
        assert freezes.of(A) is None
        assert not at.file.exists()
    assert at.insides.done == ["freeze"]
    assert at.heard == []


async def test_a_guest_that_may_be_frozen_after_an_error_is_thawed_at_once(at: Host1) -> None:
    at.insides.errors["freeze"] = SILENT
    at.insides.frozen.add(A)
    async with at.agent() as freezes:
        assert await refused(freezes.freeze(A, for_s=60, timeout_s=1)) == "guest_agent_silent"
        assert freezes.of(A) is None
        await at.thawed()
    assert at.heard == []


async def test_a_guest_that_rebooted_during_a_freeze_has_its_deadline(at: Host1) -> None:
    async with at.agent() as freezes:

        async def rebooting(of: str, *, timeout_s: float) -> bool:
            freezes.ended(of)
            at.insides.frozen.add(of)
            return timeout_s > 0

        at.insides.freeze = rebooting  # type: ignore[method-assign]
        await freezes.freeze(A, for_s=0.05, timeout_s=1)
        await asyncio.sleep(0)
        assert freezes.of(A) is not None
        assert at.file.exists()
        await at.thawed()


async def test_a_guest_that_ended_is_not_thawed(at: Host1) -> None:
    async with at.agent() as freezes:
        await freezes.freeze(A, for_s=0.05, timeout_s=1)
        freezes.ended(A)
        assert freezes.of(A) is None
        await eventually(lambda: not at.file.exists())
        await asyncio.sleep(0.06)
    assert at.insides.done == ["freeze"]


# --- through libvirt -----------------------------------------------------------------------------
SAID = "internal error: unable to execute QEMU agent command 'guest-fsfreeze-freeze': "


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f"{SAID}Command guest-fsfreeze-freeze has been disabled: the agent is in frozen state",
         "guest_frozen"),
        (f"{SAID}The command guest-fsfreeze-freeze has been disabled for this instance",
         "guest_frozen"),
        (f"{SAID}Command guest-fsfreeze-freeze has been disabled: the command is not allowed",
         "guest_agent_refused"),
        (f"{SAID}failed to freeze /: Operation not supported", "guest_agent_refused"),
        ("internal error: anything else", "libvirt_failed"),
    ],
)  # fmt: skip
async def test_a_refusal_of_the_agent_is_told_from_an_error_of_libvirt(
    guests: LibvirtGuests, host: Host, text: str, reason: str
) -> None:
    host.error = Refusal(libvirt.VIR_ERR_INTERNAL_ERROR, text)
    host.error.get_error_domain = lambda: libvirt.VIR_FROM_QEMU  # type: ignore[method-assign]
    assert await refused(guests.freeze(A, timeout_s=1)) == reason


async def test_a_guest_that_is_off_is_not_asked(guests: LibvirtGuests, host: Host) -> None:
    assert await guests.freeze(A, timeout_s=1)
    assert await guests.thaw(A, timeout_s=1)
    host.active = False
    assert not await guests.freeze(A, timeout_s=1)
    assert not await guests.thaw(A, timeout_s=1)


async def test_guests_that_answer_no_freeze_delay_no_question_and_no_thaw(
    guests: LibvirtGuests, host: Host
) -> None:
    host.hung = {uid(number) for number in range(3)}
    for silent in host.hung:
        assert await refused(guests.freeze(silent, timeout_s=0.05)) == "guest_agent_silent"
    async with asyncio.timeout(5):
        assert await guests.thaw(uid(9), timeout_s=5)
        assert await guests.ask(uid(9), (), timeout_s=5)


# --- in the agent --------------------------------------------------------------------------------
async def ask(node: Node, timeout_s: int = 60, epoch: int = 1) -> Any:
    data = {"uid": A, "epoch": epoch, "timeout_s": timeout_s}
    return await node.bus.request(subjects.rpc(NODE, "agent", "freeze"), data, timeout_s=5)


async def condition(node: Node) -> Condition | None:
    found = await node.status(A)
    conditions = found.conditions if found is not None else ()
    return next((one for one in conditions if one.type == "Frozen"), None)


@pytest.fixture
async def node(tmp_path: Path) -> Node:
    made = Node(tmp_path)
    await made.join()
    await made.put(record(spec={"termination_grace_s": 30}))
    return made


async def test_a_frozen_guest_has_a_condition_until_it_is_thawed(node: Node) -> None:
    async with node.agent():
        await eventually(in_state(node, "Running"))
        await ask(node)
        said = await eventually(lambda: condition(node))
        assert (said.status, said.reason) == (True, "Requested")
        assert said.message.startswith("its file systems are frozen until 20")
        await ask(node, timeout_s=0)
        await eventually(lambda: _none(node))
        await ask(node, timeout_s=0)
        assert node.insides.done == ["freeze", "thaw", "thaw"]


async def _none(node: Node) -> bool:
    return await condition(node) is None


async def test_a_new_agent_shows_the_freeze_of_the_earlier_one(node: Node) -> None:
    async with node.agent():
        await eventually(in_state(node, "Running"))
        await ask(node)
    async with node.agent():
        await node.start_another()
        assert await condition(node) is not None
        await ask(node, timeout_s=0)
        await eventually(lambda: _none(node))


async def test_a_frozen_guest_is_thawed_before_it_is_shut_down(node: Node) -> None:
    async with node.agent():
        await eventually(in_state(node, "Running"))
        await ask(node)
        changes: dict[str, Any] = {"powered": False, "power_epoch": 1}
        await node.put(record(spec={"termination_grace_s": 30}, **changes))
        await eventually(lambda: ("shutdown", A) in node.domains.done)
        assert node.insides.done == ["freeze", "thaw"]
        node.domains.end(A, Ending.SHUT_DOWN, DomainChange.SHUT_DOWN)
        await eventually(in_state(node, "Stopped"))


async def test_a_silent_guest_delays_its_shutdown_and_blocks_no_delete(node: Node) -> None:
    async with node.agent():
        await eventually(in_state(node, "Running"))
        await ask(node)
        node.insides.errors["thaw"] = SILENT
        await node.put(record(deleting=True, delete_grace_s=30))
        await eventually(lambda: ("shutdown", A) in node.domains.done)
        await node.put(record(deleting=True, delete_grace_s=0))
        await eventually(lambda: A not in node.domains.there)
        await eventually(lambda: not (node.files.vms / A).exists())


async def test_a_frozen_guest_can_be_paused_and_reset(node: Node) -> None:
    async with node.agent():
        await eventually(in_state(node, "Running"))
        await ask(node)
        await node.put(record(spec={"termination_grace_s": 30}, paused=True, pause_epoch=1))
        await eventually(in_state(node, "Paused"))
        assert await condition(node) is not None
        assert await refused(ask(node)) == "paused"
        assert await refused(ask(node, timeout_s=0)) == "paused"
        node.domains.tell(DomainEvent(A, DomainChange.REBOOTED))
        await eventually(lambda: _none(node))
        await eventually(lambda: not (node.files.vms / A / "frozen").exists())


async def test_a_freeze_for_another_assignment_or_of_a_stopped_vm_is_refused(node: Node) -> None:
    async with node.agent():
        await eventually(in_state(node, "Running"))
        assert await refused(ask(node, epoch=2)) == "moved"
        assert await refused(ask(node, timeout_s=3601)) == "invalid"
        node.insides.errors["freeze"] = ABSENT
        assert await refused(ask(node)) == "guest_agent_absent"
        assert await condition(node) is None
        await node.put(record(powered=False, power_epoch=1))
        await eventually(in_state(node, "Stopped"))
        assert await refused(ask(node)) == "not_running"


async def test_a_frozen_guest_is_not_asked_to_reboot(node: Node) -> None:
    async with node.agent():
        await eventually(in_state(node, "Running"))
        await ask(node)
        data = {"uid": A, "epoch": 1, "verb": "soft-reboot", "id": "a"}
        subject = subjects.rpc(NODE, "agent", "command")
        assert await refused(node.bus.request(subject, data, timeout_s=5)) == "frozen"
