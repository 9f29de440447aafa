"""The limits of a VM on its host change while it runs, and the status shows those in force."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from services.nodeagent.tests.pretended_node import Node, eventually, in_state, record, uid

from virtbus.nodeagent.core import resource_values
from virtbus.nodeagent.core.metadata import domain_hash
from virtbus.nodeagent.vm import repeated_steps
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.resources import Resources, ResourcesInForce
from virtbus.schemas.vm import Domain, VmRecord
from virtbus.schemas.vm_status import VmStatus

A = uid(1)
HALF = {"cpu_shares": 512, "cpu_quota_us": 50_000, "cpus": "0-1,3", "memory_bytes": 2**28}


def limited(resources: dict[str, Any] | None = None, generation: int = 1, **more: Any) -> VmRecord:
    domain = {"memory": {"guest": 2**30}, "resources": resources}
    spec = {"domain": domain, "networks": [], "volumes": []}
    return record(spec=spec, generation=generation, **more)


async def told(node: Node) -> VmStatus:
    found = await node.status(A)
    assert found is not None
    return found


async def in_force(node: Node, resources: dict[str, Any]) -> None:
    async def so() -> bool:
        found = await node.status(A)
        if found is None:
            return False
        assert "RestartRequired" not in {one.type for one in found.conditions}
        return found.resources == ResourcesInForce(**resources)

    await eventually(so)


def calls(node: Node) -> int:
    return node.domains.done.count(("resources", A))


@pytest.fixture
async def node(tmp_path: Path) -> Node:
    made = Node(tmp_path)
    await made.join()
    return made


async def test_the_limits_of_a_running_guest_change_and_are_lifted(node: Node) -> None:
    await node.put(limited())
    async with node.agent():
        await eventually(in_state(node, "Running"))
        assert calls(node) == 0, "a VM without limits costs no call"
        await node.put(limited(HALF, 2))
        await in_force(node, HALF)
        await node.put(limited(None, 3))
        await in_force(node, {})
        assert node.domains.done.count(("start", A)) == 1


async def test_a_guest_without_limits_is_left_alone_also_by_a_new_agent(node: Node) -> None:
    """An operator may have set some by hand."""
    await node.put(limited())
    async with node.agent():
        await eventually(in_state(node, "Running"))
    await node.put(limited(None, 2))
    async with node.agent():

        async def taken() -> bool:
            return (await told(node)).generation == 2

        await eventually(taken)
        await node.start_another()
        assert calls(node) == 0
        await node.put(limited(HALF, 3))
        await in_force(node, HALF)
    await node.put(limited(None, 4))
    async with node.agent():
        await in_force(node, {})
        lifted = calls(node)
    await node.put(limited(None, 5))
    async with node.agent():
        await node.start_another()
        assert calls(node) == lifted


async def test_a_start_has_its_limits_and_so_has_a_paused_guest(node: Node) -> None:
    await node.put(limited(HALF, paused=True))
    async with node.agent():
        await eventually(in_state(node, "Paused"))
        await in_force(node, HALF)


async def test_a_new_agent_reads_the_limits_and_applies_what_changed_meanwhile(node: Node) -> None:
    await node.put(limited(HALF))
    async with node.agent():
        await in_force(node, HALF)
    async with node.agent():
        await in_force(node, HALF)
    await node.put(limited(HALF | {"cpu_shares": 100}, 2))
    async with node.agent():
        await in_force(node, HALF | {"cpu_shares": 100})


async def test_a_guest_that_keeps_its_memory_is_asked_again_and_the_status_says_so(
    node: Node,
) -> None:
    node.domains.kept = 2**30
    await node.put(limited(HALF))
    async with node.agent():

        async def says() -> bool:
            found = await node.status(A)
            reasons = {one.type: one.reason for one in found.conditions} if found else {}
            return reasons.get("ResourcesPending") == "GuestKeepsMemory"

        await eventually(says)
        assert (await told(node)).resources == ResourcesInForce(**HALF | {"memory_bytes": 2**30})
        node.domains.kept = 0
        await in_force(node, HALF)

        async def done() -> bool:
            found = await told(node)
            return not found.message and "ResourcesPending" not in {
                one.type for one in found.conditions
            }

        await eventually(done)


async def test_a_balloon_has_a_moment_to_follow(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    node.domains.kept = 2**30
    await node.put(limited(HALF))
    async with node.agent():
        await eventually(lambda: calls(node))
        node.domains.kept = 0
        await in_force(node, HALF)
        await node.start_another()
        assert not (await told(node)).message
    assert "virtio_balloon" not in caplog.text


async def test_a_new_record_is_not_kept_waiting_by_a_step_that_failed(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repeated_steps, "RETRY_S", (3600, 3600))
    node.domains.errors["resources"] = VirtbusError(Code.UNAVAILABLE, "domain_busy", "busy")
    await node.put(limited(HALF))
    async with node.agent():

        async def fails() -> bool:
            found = await node.status(A)
            return found is not None and "the agent retries: busy" in found.message

        await eventually(fails)
        del node.domains.errors["resources"]
        await node.put(limited(HALF | {"cpu_shares": 100}, 2))
        await in_force(node, HALF | {"cpu_shares": 100})


async def test_a_host_that_cannot_limit_is_not_asked_again(node: Node) -> None:
    error = VirtbusError(Code.UNSUPPORTED, "domain_unsupported", "no cgroups")
    node.domains.errors["resources"] = error
    await node.put(limited(HALF))
    async with node.agent():

        async def says() -> bool:
            found = await node.status(A)
            return found is not None and any(
                one.type == "ResourcesPending" and one.message == "no cgroups"
                for one in found.conditions
            )

        await eventually(says)
        assert (await told(node)).resources == ResourcesInForce(**HALF | {"cpu_shares": None})
        assert not (await told(node)).message, "no retry is announced"
        assert calls(node) == 1


def test_limits_need_no_restart_and_an_older_spec_keeps_its_hash() -> None:
    assert domain_hash(limited()) == domain_hash(limited(HALF))
    assert "resources" not in Domain().model_dump()


@pytest.mark.parametrize(
    "wrong",
    [
        {"cpus": "3-1"},
        {"cpus": "a"},
        {"cpus": "99999"},
        {"cpu_shares": 1},
        {"cpu_quota_us": 10},
        {"memory_bytes": 2**31},
        {"memory_bytes": 1},
    ],
)
def test_wrong_limits_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Domain.model_validate({"memory": {"guest": 2**30}, "resources": wrong})


def test_shares_become_the_weight_that_kubernetes_uses_and_are_told_as_wanted() -> None:
    assert resource_values.weight(1024) == 39
    assert (resource_values.weight(2), resource_values.weight(262_144)) == (1, 10_000)
    wanted = Resources(cpu_shares=1024)
    figures = resource_values.scheduler(wanted, unified=True)
    found = resource_values.in_force(figures, wanted, unified=True)
    assert found == {"cpu_shares": 1024, "cpu_quota_us": None, "cpu_period_us": 100_000}
    other = resource_values.in_force(figures | {"cpu_shares": 100}, wanted, unified=True)
    assert isinstance(other["cpu_shares"], int)
    assert resource_values.weight(other["cpu_shares"]) == 100


def test_a_period_changes_while_no_quota_is_in_force() -> None:
    def steps(found: dict[str, int], **wanted: int) -> list[dict[str, int]]:
        figures = resource_values.scheduler(Resources(**wanted), unified=False)
        return resource_values.different(found, figures)

    full = {"cpu_shares": 1024, "global_period": 100_000, "global_quota": 18446744073709551}
    assert steps(full) == []
    half = full | {"global_quota": 50_000}
    assert steps(half, cpu_quota_us=5000, cpu_period_us=10_000) == [
        {"global_quota": -1},
        {"global_period": 10_000},
        {"global_quota": 5000},
    ]
    assert steps(half) == [{"global_quota": -1}]


def test_a_balloon_counts_in_mib() -> None:
    assert resource_values.balloon_kib(None, 1000) == 1000
    assert resource_values.balloon_kib(100_000_000, 98_304) == 98_304, "QEMU has rounded it up"
    assert resource_values.balloon_kib(2**28, 2**20) == 2**18
