"""Refused and lost directories in the status of a VM."""

from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from services.nodeagent.tests.pretended_node import Node, eventually, in_state, record, uid

from virtbus.nodeagent.core.ports import DomainChange, DomainEvent, DomainState
from virtbus.nodeagent.core.shares import NoShares
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.node_rpc import Arm
from virtbus.schemas.vm import VmRecord
from virtbus.simulator.services import SimulatedNode

A = uid(1)


class Refused(NoShares):
    """A directory was refused, in this start or an earlier one."""

    async def explained(self, _record: VmRecord, _error: VirtbusError) -> VirtbusError:
        return VirtbusError(Code.CONFLICT, "directory_refused", "the directory is refused")


class Lost(NoShares):
    """Each look finds a lock that nobody holds."""

    async def lost(self, _record: VmRecord) -> tuple[str, ...]:
        return ("www",)


class NetdRefuses(SimulatedNode):
    async def arm(self, arm: Arm) -> None:
        del arm
        raise VirtbusError(Code.INTERNAL, "mac_mismatch", "netd has another MAC address")


@pytest.fixture
async def node(tmp_path: Path) -> Node:
    made = Node(tmp_path)
    await made.join()
    return made


async def message(node: Node) -> str:
    found = await node.status(A)
    return found.message if found is not None else ""


async def test_a_failed_start_shows_the_reason_of_its_directory(node: Node) -> None:
    node.shares = Refused()
    node.domains.errors["start"] = VirtbusError(Code.INTERNAL, "libvirt", "virtiofsd died")
    await node.put(record())
    async with node.agent():
        await eventually(lambda: message(node))
        assert "the directory is refused" in await message(node)


async def test_a_directory_refused_earlier_does_not_hide_the_present_error(node: Node) -> None:
    node.shares, node.services = Refused(), NetdRefuses
    await node.put(record())
    async with node.agent():
        await eventually(lambda: message(node))
        assert "another MAC address" in await message(node)


async def test_a_directory_is_lost_only_once_the_guest_runs(node: Node) -> None:
    node.shares = Lost()
    node.domains.set(A, DomainState.STARTING)
    node.domains.devices.defined[A] = ET.fromstring("<domain><devices/></domain>")
    node.domains.devices.started(A)
    await node.put(record())

    async def lost() -> bool:
        found = await node.status(A)
        return found is not None and "DirectoryLost" in {one.type for one in found.conditions}

    async with node.agent():
        await eventually(in_state(node, "Starting"))
        node.domains.tell(DomainEvent("", None))
        await node.start_another()
        node.domains.set(A, DomainState.RUNNING)
        node.domains.tell(DomainEvent(A, DomainChange.STARTED))
        await eventually(in_state(node, "Running"))
        assert not await lost()
        node.domains.tell(DomainEvent("", None))
        await eventually(lost)
