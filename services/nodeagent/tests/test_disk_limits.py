"""Limits of disks change while their guest runs, also those that an agent missed."""

from pathlib import Path
from typing import Any

import pytest
from services.nodeagent.tests.pretended_node import Node, eventually, in_state, record, uid

from virtbus.nodeagent.core.disk_drivers import NO_LIMITS, iotune, shown_limits
from virtbus.nodeagent.core.metadata import domain_hash
from virtbus.schemas.disk import DiskLimits
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.vm import VmRecord

A = uid(1)


def limited(limits: dict[str, Any] | None = None, generation: int = 1, **more: Any) -> VmRecord:
    disks = [{"name": "root", "limits": limits}, {"name": "cd", "bus": "sata", "device": "cdrom"}]
    volumes = [{"name": "root", "empty_disk": {"capacity": "1GiB"}}]
    spec = {"domain": {"devices": {"disks": disks}}, "networks": [], "volumes": volumes}
    return record(spec=spec, generation=generation, **more)


def calls(node: Node) -> int:
    return node.domains.done.count(("limit", A))


async def shown(node: Node) -> dict[str, dict[str, int]]:
    found = await node.status(A)
    assert found is not None
    assert "RestartRequired" not in {one.type for one in found.conditions}
    return found.disk_limits


@pytest.fixture
async def node(tmp_path: Path) -> Node:
    made = Node(tmp_path)
    await made.join()
    return made


async def shows(node: Node, limits: dict[str, dict[str, int]]) -> None:
    async def so() -> bool:
        return await shown(node) == limits

    await eventually(so)


async def test_limits_change_while_the_guest_runs(node: Node) -> None:
    await node.put(limited())
    async with node.agent():
        await eventually(in_state(node, "Running"))
        assert calls(node) == 0, "a VM without limits costs no call"
        await node.put(limited({"iops": 50}, 2))
        await shows(node, {"root": {"iops": 50}})
        assert node.domains.limits[A] == {"vda": NO_LIMITS | {"total_iops_sec": 50}}
        await node.put(limited(None, 3))
        await shows(node, {})
        assert node.domains.limits[A] == {"vda": NO_LIMITS}
        assert ("start", A) in node.domains.done
        assert node.domains.done.count(("start", A)) == 1


async def test_limits_of_a_start_are_read_back(node: Node) -> None:
    await node.put(limited({"iops": 50, "burst": {"iops": 90}}))
    async with node.agent():
        await eventually(in_state(node, "Running"))
        await shows(node, {"root": {"iops": 50, "burst_iops": 90, "burst_s": 1}})


async def test_a_new_agent_applies_what_changed_while_none_ran(node: Node) -> None:
    await node.put(limited({"iops": 50}))
    async with node.agent():
        await eventually(in_state(node, "Running"))
        await shows(node, {"root": {"iops": 50}})
    await node.put(limited(None, 2))
    async with node.agent():
        await shows(node, {})
        assert node.domains.limits[A] == {"vda": NO_LIMITS}


async def test_limits_of_a_paused_guest_change(node: Node) -> None:
    await node.put(limited(paused=True))
    async with node.agent():
        await eventually(in_state(node, "Paused"))
        await node.put(limited({"iops": 50}, 2, paused=True))
        await shows(node, {"root": {"iops": 50}})


async def test_a_failed_change_is_shown_and_repeated(node: Node) -> None:
    await node.put(limited())
    async with node.agent():
        await eventually(in_state(node, "Running"))
        node.domains.errors["limit"] = VirtbusError(Code.UNAVAILABLE, "libvirt_down", "it is away")
        await node.put(limited({"iops": 50}, 2))

        async def said() -> bool:
            found = await node.status(A)
            return found is not None and found.message == "the agent retries: it is away"

        await eventually(said)
        del node.domains.errors["limit"]
        await shows(node, {"root": {"iops": 50}})


def test_limits_alone_need_no_restart() -> None:
    plain, slow = limited(), limited({"iops": 50})
    assert domain_hash(plain) == domain_hash(slow)
    other = limited({"iops": 50}).model_dump(mode="json")
    other["spec"]["domain"]["devices"]["disks"][0]["cache"] = "none"
    assert domain_hash(VmRecord.model_validate(other)) != domain_hash(slow)


def test_other_dns_settings_need_a_restart() -> None:
    plain = limited()

    def with_dns(*servers: str) -> VmRecord:
        spec = plain.spec.model_dump() | {"dns_config": {"nameservers": servers}}
        return VmRecord.model_validate(plain.model_dump() | {"spec": spec})

    found = {domain_hash(one) for one in (plain, with_dns("192.0.2.1"), with_dns("192.0.2.2"))}
    assert len(found) == 3


def test_figures_of_libvirt_have_our_names() -> None:
    limits = DiskLimits.model_validate({"read_iops": 5, "burst": {"read_iops": 9}, "burst_s": 3})
    figures = NO_LIMITS | iotune(limits)
    assert shown_limits(figures) == {"read_iops": 5, "burst_read_iops": 9, "burst_s": 3}
    assert shown_limits(NO_LIMITS | {"total_bytes_sec_max_length": 1}) == {}
