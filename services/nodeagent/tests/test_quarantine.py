"""Absence ends nothing, a move keeps the disks, a delete removes them; then a person decides."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from services.nodeagent.tests.pretended_node import NODE, Node, eventually, in_state, record, uid

from virtbus.nodeagent.core.ports import DomainState
from virtbus.schemas import subjects
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.quarantine import Quarantine, QuarantineRequest
from virtbus.schemas.records import DELETED
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.wire import validate

A, COPY = uid(1), uid(5)
KEY = subjects.vm_record(NODE, A)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path, resync_s=0.05, orphan_grace_s=0.1)


async def run(node: Node, **more: Any) -> None:
    """One running VM, so its disk has writes."""
    await node.join()
    await node.put(record(**more))
    await eventually(in_state(node, "Running"))


async def lose_record(node: Node) -> None:
    """The record is gone without a marker, as on a bus that was restored to an older state."""
    del node.server.shelf("$KV.vm.x").entries[KEY]
    await eventually(lambda: is_held(node))


async def is_held(node: Node) -> bool:
    status = await node.status(A)
    return status is not None and any(c.type == "Held" and c.status for c in status.conditions)


def gone(node: Node) -> Callable[[], Awaitable[bool]]:
    async def check() -> bool:
        return await node.status(A) is None and A not in node.domains.there

    return check


async def ask(node: Node, do: str, entry: str | None = None, **more: Any) -> Quarantine:
    subject = subjects.rpc(NODE, "agent", "quarantine")
    asked = {"do": do, "entry": entry, **more}
    return validate(Quarantine, await node.bus.request(subject, asked, timeout_s=5.0))


async def refused(node: Node, do: str, entry: str, **more: Any) -> str:
    with pytest.raises(VirtbusError) as caught:
        await ask(node, do, entry, **more)
    return caught.value.reason


@pytest.mark.parametrize(("why", "kept"), [(b"", [A]), (DELETED, [])])
async def test_a_purge_ends_the_guest_and_only_that_of_a_delete_removes_its_disks(
    node: Node, why: bytes, kept: list[str]
) -> None:
    async with node.agent():
        await run(node)
        await node.bus.purge(KEY, why=why)
        await eventually(gone(node))
        assert list(node.simulated.kept) == kept
        assert await node.files.list() == {}


@pytest.mark.parametrize("word", ["deleting", "evacuating"])
async def test_a_delete_and_a_drain_remove_the_disks(node: Node, word: str) -> None:
    async with node.agent():
        await run(node)
        await node.put(record(**{word: True}))
        await eventually(lambda: ("destroy", A) in node.domains.done)
        await eventually(lambda: A not in node.simulated.disks)
        assert node.simulated.kept == {}


async def test_a_vm_moved_by_a_fence_leaves_its_record_with_its_disks(node: Node) -> None:
    async with node.agent():
        await run(node)
    node.domains.set(A, DomainState.SHUT_OFF)
    await node.bus.purge(KEY)  # moved while the host was off
    async with node.agent():
        node.simulated.disks.add(A)
        node.simulated.armed.append(A)
        await eventually(gone(node))
        keep = node.simulated.kept[A]
        assert keep.record is not None
        assert keep.record.name == "vm-1"
        assert "moved" in keep.why
        assert (node.settings.state_dir / "quarantine" / A / "record").exists()


async def test_a_held_vm_and_the_entries_are_listed(node: Node) -> None:
    async with node.agent():
        await run(node)
        await lose_record(node)
        node.simulated.kept[COPY] = QuarantineRequest(why="a test")
        found = await ask(node, "list")
        assert [(one.entry, one.held, one.name) for one in found.entries] == [
            (A, True, "vm-1"),
            (COPY, False, ""),
        ]
        assert found.total == 2
        assert node.domains.done == [("start", A)]


async def test_a_held_vm_is_adopted_as_it_runs(node: Node) -> None:
    async with node.agent():
        await run(node)
        await lose_record(node)
        adopted = (await ask(node, "adopt", A)).record
        assert adopted == record()
        await node.put(adopted)
        await eventually(lambda: not_held(node))
    assert node.domains.done == [("start", A)]


async def not_held(node: Node) -> bool:
    return not await is_held(node)


async def test_a_person_ends_a_held_vm_and_its_disks_stay(node: Node) -> None:
    async with node.agent():
        await run(node)
        await lose_record(node)
        assert await refused(node, "purge", A) == "held"
        found = await ask(node, "keep", A)
        assert [(one.entry, one.held) for one in found.entries] == [(A, False)]
        assert A not in node.domains.there
        assert list(node.simulated.kept) == [A]
        await ask(node, "purge", A)
        assert node.simulated.kept == {}
        assert not (node.settings.state_dir / "quarantine" / A).exists()


async def test_a_vm_with_a_record_is_not_ended_by_keep(node: Node) -> None:
    async with node.agent():
        await run(node)
        assert await refused(node, "keep", A) == "record_stands"
        assert node.domains.done == [("start", A)]


async def test_only_keep_ends_a_guest_without_any_record(node: Node) -> None:
    async with node.agent():
        await node.join()
        await node.start_another()
        node.domains.set(A, DomainState.RUNNING)
        node.simulated.held[A] = 1
        node.simulated.disks.add(A)
        node.simulated.armed.append(A)
        await ask(node, "keep", A)
        assert A not in node.domains.there
        assert list(node.simulated.kept) == [A]


async def quarantined(node: Node) -> VmRecord:
    """A VM that ran and whose disks are now in quarantine."""
    await run(node)
    await lose_record(node)
    await ask(node, "keep", A)
    node.domains.done.clear()
    return record()


async def test_an_entry_is_adopted_as_its_former_vm_switched_off(
    node: Node,
) -> None:
    async with node.agent():
        was = await quarantined(node)
        adopted = (await ask(node, "adopt", A)).record
        assert adopted is not None
        assert (adopted.uid, adopted.name, adopted.epoch) == (A, was.name, was.epoch + 1)
        assert not adopted.powered
        assert node.simulated.kept == {}
        assert A in node.simulated.disks
        await node.put(adopted)
        await eventually(in_state(node, "Stopped"))
        assert node.domains.done == []
        await node.put(adopted.model_copy(update={"powered": True, "power_epoch": 9}))
        await eventually(in_state(node, "Running"))


async def test_an_adoption_that_was_not_finished_is_held_and_repeated(node: Node) -> None:
    """The requester died before it wrote the record."""
    async with node.agent():
        await quarantined(node)
        first = (await ask(node, "adopt", A)).record
    async with node.agent():
        await eventually(lambda: is_held(node))
        assert (await ask(node, "adopt", A)).record == first
    assert node.domains.done == []


async def test_an_entry_is_adopted_as_a_new_vm(node: Node) -> None:
    async with node.agent():
        await quarantined(node)
        adopted = (await ask(node, "adopt", A, name="copy", new_uid=COPY)).record
        assert adopted is not None
        assert (adopted.uid, adopted.name, adopted.epoch) == (COPY, "copy", 2)
        assert COPY in node.simulated.disks
        assert node.simulated.kept == {}


async def test_an_entry_returns_to_its_recreated_vm_once_that_is_off(
    node: Node,
) -> None:
    async with node.agent():
        await quarantined(node)
        await node.put(record(epoch=5))
        await eventually(in_state(node, "Running"))
        assert await refused(node, "adopt", A) == "not_off"
        await node.put(record(epoch=5, powered=False, power_epoch=7))
        await eventually(in_state(node, "Stopped"))
        await ask(node, "adopt", A)
        assert list(node.simulated.kept) == [f"{A}.2"]  # the disk that it had meanwhile
        assert "took their place" in node.simulated.kept[f"{A}.2"].why


async def test_an_entry_without_a_saved_record_names_the_way_to_adopt_it(node: Node) -> None:
    async with node.agent():
        await run(node)
        node.simulated.kept[COPY] = QuarantineRequest(why="a test")
        assert await refused(node, "adopt", COPY) == "no_record_saved"
        assert await refused(node, "adopt", uid(9)) == "no_entry"
