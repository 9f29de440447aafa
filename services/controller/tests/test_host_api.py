"""A node's host and its approved capacity: recorded once, changed only by a person."""

import asyncio

from services.controller.tests.fleets import GIB, node
from services.controller.tests.test_node_api import again, detail
from services.controller.tests.test_vm_api import played, refused
from services.controller.tests.virtual import World

from virtbus.bus.client.ports import EntryKind
from virtbus.controller.core.placement import kind_of
from virtbus.schemas import subjects
from virtbus.schemas.hosts import HostMarks, HostRecord, Instance
from virtbus.schemas.node import NodeState
from virtbus.schemas.states import VmState
from virtbus.schemas.wire import encode, read

MARKS = HostMarks(key="k1", machine="m1")
OTHER = HostMarks(key="k2", machine="m2")


async def known(made: World) -> HostRecord:
    """Return the host record of n1, once it was made."""
    await asyncio.sleep(2.5)
    entry = await made.host.get(subjects.node_host("n1"))
    assert entry is not None
    assert entry.kind is EntryKind.PUT
    return read(HostRecord, entry.value)


async def waits(made: World, instance: str = "life-2", folder: str = "8:1") -> None:
    """A refused agent of n1 reports itself."""
    rival = Instance(
        node="n1",
        instance=instance,
        host=OTHER,
        folder=folder,
        hostname="other",
        why="it belongs to another host",
    )
    await made.host.put(subjects.node_rival("n1"), encode(rival))


@played(controllers=2)
async def test_a_nodes_first_report_is_kept_and_later_ones_change_nothing(made: World) -> None:
    await made.hear(node(host=MARKS, labels={"zone": "a"}))
    host = await known(made)
    assert host.host == MARKS
    assert host.approved is not None
    assert (host.approved.cpus, host.approved.labels) == (8, {"zone": "a"})
    await made.hear(node(host=OTHER, cpus=64))
    assert await known(made) == host


@played()
async def test_unapproved_labels_attract_no_vm(made: World) -> None:
    await known(made)
    await made.hear(node(labels={"gpu": "a100", "kubernetes.io/hostname": "n2"}))
    for selector in ({"gpu": "a100"}, {"kubernetes.io/hostname": "n2"}):
        name = f"v{len(selector)}-{next(iter(selector.values()))}"
        error = await refused(
            made.vm("create", name=name, image="tiny", spec={"node_selector": selector})
        )
        assert error.reason == "no_capacity"
    shown = await detail(made, "get")
    assert shown.node.unapproved == (
        "label gpu=a100",
        "label kubernetes.io/hostname=n2, which is not its name",
    )
    await detail(made, "approve")
    at_gpu = {"node_selector": {"gpu": "a100"}}
    placed = await made.vm("create", name="gpu", image="tiny", spec=at_gpu)
    assert placed.node == "n1"
    error = await refused(
        made.vm(
            "create",
            name="h",
            image="tiny",
            spec={"node_selector": {"kubernetes.io/hostname": "n2"}},
        )
    )
    assert error.reason == "no_capacity"


@played(nodes=2)
async def test_unapproved_capacity_attracts_no_vm(made: World) -> None:
    await known(made)
    await made.hear(node(cpus=512, memory_bytes=4096 * GIB, max_vcpus=512))
    placed = [
        (await made.vm("create", name=f"v{number}", image="tiny", memory=4 * GIB)).node
        for number in range(6)
    ]
    assert sorted(placed) == ["n1"] * 3 + ["n2"] * 3
    shown = await detail(made, "get")
    assert len(shown.node.unapproved) == 2
    large = await refused(made.vm("create", name="large", image="tiny", memory=64 * GIB))
    assert large.reason == "no_capacity"
    await detail(made, "approve", cpus=512, memory_bytes=128 * GIB)
    assert (await made.vm("create", name="large", image="tiny", memory=64 * GIB)).node == "n1"


@played()
async def test_a_node_that_is_trusted_offers_what_it_reports(made: World) -> None:
    record = HostRecord(node="n1", trusted=True)
    entry = await made.host.get(subjects.node_host("n1"))
    await made.host.put(
        subjects.node_host("n1"), encode(record), expect=entry.revision if entry else 0
    )
    await made.hear(node(labels={"gpu": "a100"}, memory_bytes=64 * GIB))
    await asyncio.sleep(2)
    at_gpu = {"node_selector": {"gpu": "a100"}}
    vm = await made.vm("create", name="gpu", image="tiny", memory=32 * GIB, spec=at_gpu)
    assert vm.node == "n1"
    assert (await detail(made, "get")).node.unapproved == ()


@played(controllers=2)
async def test_a_second_agent_is_an_alarm_in_the_status_and_of_its_node(made: World) -> None:
    await waits(made)
    await asyncio.sleep(2.5)
    shown = await detail(made, "get")
    assert [one.hostname for one in shown.node.rivals] == ["other"]
    status = await made.ask("status", resource="bus")
    assert any("second agent" in alarm for alarm in status["alarms"])
    facts = [message.subject for message in made.server.stored.get("EVT", ())]
    assert facts.count("virtbus.evt.n1._.node.rival") == 1
    await waits(made, "life-3")  # the same host's agent, started again
    await asyncio.sleep(0.5)
    assert [one.instance for one in (await detail(made, "get")).node.rivals] == ["life-3"]
    await asyncio.sleep(25)
    status = await made.ask("status", resource="bus")
    assert not any("second agent" in alarm for alarm in status.get("alarms", ()))


@played()
async def test_a_heartbeat_of_another_host_is_an_alarm(made: World) -> None:
    await made.hear(node(host=MARKS))
    await known(made)
    await made.hear(node(host=OTHER, hostname="thief"))
    await asyncio.sleep(0.5)
    alarms = (await made.ask("status", resource="bus"))["alarms"]
    assert any("thief" in alarm for alarm in alarms)


@played()
async def test_only_a_person_gives_a_node_to_another_host(made: World) -> None:
    await made.hear(node(host=MARKS))
    await known(made)
    say = {"confirm": "the old host is scrap"}
    assert (await refused(detail(made, "takeover", **say))).reason == "no_rival"
    await waits(made)
    assert (await refused(detail(made, "takeover", **say))).reason == "node_answers"
    revision = await made.host.put(
        subjects.node_instance("n1"), encode(Instance(node="n1", instance="life-1", host=MARKS))
    )
    await made.hear(node(host=MARKS, state=NodeState.LEFT))
    await waits(made)
    await waits(made, "life-3", folder="8:2")
    assert (await refused(detail(made, "takeover", **say))).reason == "many_rivals"
    for _ in range(2):
        await again(made, "takeover", "r1", instance="life-2", **say)
    host = await known(made)
    assert host.host == OTHER
    assert host.takeover is not None
    assert (host.takeover.instance, host.takeover.over) == ("life-2", revision)


@played()
async def test_any_host_may_take_a_forgotten_node(made: World) -> None:
    await made.hear(node(host=MARKS))
    await known(made)
    await made.host.put(subjects.join_nonce("n1"), b"x")
    await made.hear(node(host=MARKS, state=NodeState.LEFT))
    await asyncio.sleep(0.5)
    await made.ask("forget", resource="node", node="n1")
    entry = await made.host.get(subjects.node_host("n1"))
    assert entry is not None
    assert entry.kind is EntryKind.PURGE
    await made.hear(node(host=OTHER))
    assert (await known(made)).host == OTHER


@played()
async def test_a_damaged_host_record_affects_its_node_only_and_a_person_repairs_it(
    made: World,
) -> None:
    await made.hear(node(host=MARKS))
    await known(made)
    await made.host.put(subjects.node_host("n1"), b"\xc1")
    await asyncio.sleep(2)
    vm = await made.vm("create", name="web", image="tiny")
    assert vm.state is VmState.SCHEDULED or vm.node == "n1"
    await detail(made, "approve")
    assert (await known(made)).approved is not None


def test_nodes_that_differ_in_their_hosts_only_are_of_one_kind() -> None:
    kinds = {
        kind_of(
            node(f"n{number}", host=HostMarks(key=f"k{number}"), disk_bytes=number).model_dump()
        )
        for number in range(5)
    }
    assert len(kinds) == 1
