"""Refused and lost directories in the status of a VM."""

from pathlib import Path

import pytest
from services.nodeagent.tests.pretended_node import Node, eventually, record, uid

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
