"""A VM's spec makes volumes: with the VM or not at all, and their retention decides their end."""

import asyncio
from typing import Any

import pytest
from services.controller.tests.fleets import GIB, record, status, uid
from services.controller.tests.fleets import node as heartbeat
from services.controller.tests.schedules import Gates, ScheduledBus, broken_everywhere, sample
from services.controller.tests.test_owners import Asking
from services.controller.tests.test_vm_api import played, refused
from services.controller.tests.test_volume_fills import snapshot
from services.controller.tests.virtual import World, settle
from services.controller.tests.volumes import volume

from virtbus.bus.client.memory_bus import MemoryBus, MemoryServer
from virtbus.bus.client.ports import EntryKind
from virtbus.controller.core.vm_keys import StoredVolume
from virtbus.controller.core.volume_holds import freed, ref_of, restored, uid_of
from virtbus.controller.edge.commit import Commits
from virtbus.controller.edge.volume_holders import VolumeHolders
from virtbus.schemas import subjects
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.pool import NodePools, PoolKind, PoolReport, PoolState
from virtbus.schemas.states import VmState
from virtbus.schemas.vm import VmRecord, VmSecrets, Volume
from virtbus.schemas.volume import Retention, VolumeRecord, VolumeSpec
from virtbus.schemas.volume_api import VolumeView
from virtbus.schemas.volume_ref import NamedVolume
from virtbus.schemas.wire import encode, read, validate

DELETE = {"retention": "Delete"}


def template(name: str = "own", **more: Any) -> dict[str, Any]:
    return {"name": name, "volume": {"name": name, "template": {"size": "1GiB"} | more}}


async def create(made: World, number: int, *templates: dict[str, Any], **more: Any) -> VmRecord:
    asked = {"name": f"vm{number}", "image": "tiny", "uid": uid(number)}
    await made.ask("create", **asked | {"spec": {"volumes": list(templates)}} | more)
    found = await made.stored(uid(number))
    assert found is not None
    return found


async def shown(made: World, name: str = "own") -> VolumeView:
    return validate(VolumeView, await made.ask("get", "volume", name=name))


async def stored(bus: MemoryBus, name: str = "own") -> VolumeRecord | None:
    entry = await bus.get(subjects.volume_record("default", name))
    put = entry is not None and entry.kind is EntryKind.PUT
    return read(VolumeRecord, entry.value) if entry is not None and put else None


async def end(made: World, number: int) -> None:
    """Delete the VM, and let its node release it."""
    await made.vm("delete", uid=uid(number), grace_s=0)
    found = await made.stored(uid(number))
    assert found is not None
    await made.say(status(found, released=True))
    await settle()
    assert await made.stored(uid(number)) is None


# --- create -----------------------------------------------------------------------------------
@played(controllers=2)
async def test_a_create_makes_the_volumes_of_its_spec_and_a_repeat_makes_no_more(
    made: World,
) -> None:
    spec = template(source={"image": "tiny"}, retention="Delete", protected=True)
    one = await create(made, 1, spec, template("more"))
    ref = one.volume_refs["own"]
    assert (ref.image, ref.size_bytes, ref.uid) == ("tiny", GIB, uid_of(uid(1), "own"))
    view = await shown(made)
    assert (view.state, view.node, view.holder, view.made_for) == ("InUse", "n1", uid(1), uid(1))
    assert (view.spec.retention, view.spec.protected) == (Retention.DELETE, True)
    before = [await stored(made.host, name) for name in ("own", "more")]
    again = await made.ask(
        "create",
        name="vm1",
        image="tiny",
        uid=uid(1),
        spec={"volumes": [spec, template("more")]},
    )
    assert not again.get("created", False)
    assert [await stored(made.host, name) for name in ("own", "more")] == before
    events = await made.client.history(subjects.events(view.uid))
    assert [message.subject.split(".", 4)[4] for message in events] == ["volume.created"]


@played()
async def test_a_refused_create_makes_no_volume(made: World) -> None:
    await create(made, 1, template("taken"))
    both = template("own"), template("taken")
    assert (await refused(create(made, 2, *both))).reason == "volume_in_use"
    assert (await refused(create(made, 1, *both, name="vm1"))).reason == "uid_taken"
    assert (await refused(create(made, 3, template(), cpus=200))).reason == "no_capacity"
    pools = template(pool="fast")
    assert (await refused(create(made, 3, pools))).reason == "pool_unknown"
    assert (await refused(create(made, 3, template(size=1)))).code == 400
    assert await stored(made.host) is None


@played()
async def test_the_volumes_of_one_create_count_together_for_the_quota(made: World) -> None:
    room = made.controllers["c1"]._volumes.room
    quota = room._quota
    room._quota = quota._replace(number=quota.number._replace(per_namespace=2))
    made.controllers["c1"]._vms._creates._templates._room._quota = room._quota
    three = [template(f"v{number}") for number in range(3)]
    assert (await refused(create(made, 1, *three))).reason == "volume_quota"
    await create(made, 1, *three[:2])
    assert (await refused(create(made, 2, three[2]))).reason == "volume_quota"


@played()
async def test_a_bridge_makes_no_volumes(made: World) -> None:
    spec = {"volumes": [template()]}
    asked = {"name": "web", "image": "tiny", "spec": spec}
    assert await Asking(made, "BRIDGE").refused("create", **asked) == "not_owner"
    assert await stored(made.host) is None


@played()
async def test_the_runtime_of_a_node_makes_only_volumes_on_servers_that_its_node_assigns(
    made: World,
) -> None:
    assigns = {"assigned": ("default.own",), "state": PoolState.READY}
    pools = (
        PoolReport(name="ceph", kind=PoolKind.RBD, **assigns),
        PoolReport(name="raw", kind=PoolKind.BLOCK, **assigns),
    )

    async def reports(name: str, *found: PoolReport) -> None:
        await made.host.put(subjects.node_pools(name), encode(NodePools(node=name, pools=found)))
        await settle()

    await reports("n1", *pools)
    runtime = Asking(made, "CRI-N1")
    here = {"kubernetes.io/hostname": "n1"}

    def asked(name: str, **more: Any) -> dict[str, Any]:
        spec = {"volumes": [template(name, **more)], "node_selector": here}
        return {"name": "vm1", "image": "tiny", "uid": uid(1), "spec": spec}

    for wrong in (
        asked("own", pool="ceph"),  # it would be retained
        asked("own", pool="raw", **DELETE),
        asked("own", **DELETE),
        asked("other", pool="ceph", **DELETE),
        asked("own", pool="ceph", protected=True, **DELETE),
    ):
        assert await runtime.refused("create", **wrong) == "not_owner"
    with pytest.raises(VirtbusError, match=r"pools\.toml of n1.*restart virtbus-imaged"):
        await runtime.ask("create", **asked("other", pool="ceph", **DELETE))
    other = asked("own", pool="ceph", **DELETE)
    assert await Asking(made, "BRIDGE").refused("create", **other) == "not_owner"
    await reports("n0", PoolReport(name="ceph", kind=PoolKind.LOCAL, state=PoolState.READY))
    assert await runtime.refused("create", **other) == "pool_kinds_differ"
    await reports("n0", PoolReport(name="ceph", kind=PoolKind.RBD, state=PoolState.READY))
    await runtime.ask("create", **other)
    found = await stored(made.host)
    assert found is not None
    assert (found.owner, found.holder, found.node) == ("cri-n1", uid(1), "n1")
    assert found.pool_kind is PoolKind.RBD
    await end(made, 1)
    found = await stored(made.host)
    assert found is None or found.deleting


@played(nodes=2)
async def test_a_pod_of_a_dead_node_gets_its_volume_on_a_server_on_another_node(
    made: World,
) -> None:
    ceph = PoolReport(
        name="ceph", kind=PoolKind.RBD, assigned=("default.own",), state=PoolState.READY
    )
    for name in ("n1", "n2"):
        value = encode(NodePools(node=name, pools=(ceph,)))
        await made.host.put(subjects.node_pools(name), value)
    await settle()

    def pod(number: int) -> dict[str, Any]:
        here = {"kubernetes.io/hostname": f"n{number}"}
        spec = {"volumes": [template(pool="ceph", **DELETE)], "node_selector": here}
        return {"name": f"pod{number}", "image": "tiny", "uid": uid(number), "spec": spec}

    await Asking(made, "CRI-N1").ask("create", **pod(1))
    await asyncio.sleep(60)
    await made.ask("fence", "node", node="n1", confirm="off")
    await made.hear(heartbeat("n2"))
    await made.vm("delete", uid=uid(1), grace_s=0)
    await asyncio.sleep(20)
    assert await made.stored(uid(1)) is None
    await made.hear(heartbeat("n2"))
    await Asking(made, "CRI-N2").ask("create", **pod(2))
    found = await stored(made.host)
    assert found is not None
    assert (found.owner, found.holder, found.node) == ("cri-n2", uid(2), "n2")


@played()
async def test_a_vm_that_waits_for_a_node_has_its_volumes_already(made: World) -> None:
    await made.ask("cordon", "node", node="n1")
    assert (await create(made, 1, template())).node == "_"
    assert (await shown(made)).holder == uid(1)
    await made.ask("uncordon", "node", node="n1")
    await asyncio.sleep(3)
    assert (await shown(made)).node == "n1"


@played()
async def test_a_template_does_not_change(made: World) -> None:
    await create(made, 1, template())
    view = await made.vm("get", uid=uid(1))
    spec = view.spec.model_dump(mode="json")
    spec["volumes"][1]["volume"]["template"]["retention"] = "Delete"
    error = await refused(made.vm("update", uid=uid(1), revision=view.revision, spec=spec))
    assert error.body.details[0].path == "spec.volumes[1].volume.template.retention"


@played()
async def test_a_copied_volume_is_filled_on_the_node_of_its_vm(made: World) -> None:
    one = await create(made, 1, template(source={"image": "tiny", "full": True}))
    view = await shown(made)
    assert (view.state, view.node, one.node) == ("Filling", "n1", "n1")
    await asyncio.sleep(3)
    (operation,) = (await made.ask("list", "operation"))["items"]
    assert (operation["kind"], operation["id"]) == ("fill", view.fill_operation)


@played(nodes=3)
async def test_the_copies_of_one_vm_are_on_a_node_that_can_take_it(made: World) -> None:
    for number, node in ((1, "n1"), (2, "n2")):
        names = [f"{name}{number}" for name in ("a", "b", "c")]
        copies = [template(name, source={"image": "tiny", "full": True}) for name in names]
        selector = {"kubernetes.io/hostname": node}
        spec: dict[str, Any] = {"volumes": copies, "node_selector": selector}
        await made.ask("create", name=f"vm{number}", image="tiny", uid=uid(number), spec=spec)
        found = await made.stored(uid(number))
        assert found is not None
        assert found.node == node
        assert {(await shown(made, name)).node for name in names} == {node}


@played(nodes=2)
async def test_a_volume_that_is_not_copied_is_not_bound_before_its_vm(made: World) -> None:
    for node in ("n1", "n2"):
        await made.ask("cordon", "node", node=node)
    assert (await create(made, 1, template(source={"image": "tiny"}))).node == "_"
    assert not (await shown(made)).node
    await made.ask("uncordon", "node", node="n2")
    await asyncio.sleep(3)
    assert (await shown(made)).node == "n2"


@played(nodes=2)
async def test_a_full_clone_has_copies_of_a_snapshot_and_the_secrets_of_its_source(
    made: World,
) -> None:
    script = "#!/bin/sh"
    await made.ask("create", name="web", image="tiny", uid=uid(7), user_data=script)
    source = await made.stored(uid(7))
    assert source is not None
    await snapshot(made, node=source.node)
    disk = template("web2-root", size=0, source={"snapshot": "s1", "disk": "root"}, **DELETE)
    asked = {"name": "web2", "uid": uid(1), "origin": "s1"}
    root = {"name": "root", "volume": disk["volume"]}
    seed = {"name": "cloudinit", "cloud_init_no_cloud": {"hostname": "web"}}
    await made.ask("create", **asked, spec={"volumes": [root, seed]})
    one = await made.stored(uid(1))
    assert one is not None
    assert (one.node, one.volume_refs["root"].copied) == (source.node, True)
    entry = await made.host.get(subjects.vm_secret(one.node, one.uid))
    assert entry is not None
    held = read(VmSecrets, entry.value).cloud_init["cloudinit"]
    assert (held.user_data, held.hostname) == (script, "web2")
    view = await shown(made, "web2-root")
    assert (view.state, view.holder, view.made_for) == ("Filling", uid(1), uid(1))


# --- the end ----------------------------------------------------------------------------------
@played()
async def test_the_retention_decides_what_the_delete_of_the_vm_removes(made: World) -> None:
    templates = template("own", **DELETE), template("kept"), template("safe", **DELETE)
    await create(made, 1, *templates)
    await made.ask("update", "volume", name="safe", protected=True)
    await made.vm("delete", uid=uid(1), grace_s=0)
    assert (await shown(made)).state == "InUse", "until the node has released the VM"
    await end(made, 1)
    assert (await shown(made)).state == "Deleting"
    for name in ("kept", "safe"):
        view = await shown(made, name)
        assert (view.state, view.holder, view.node) == ("Bound", "", "n1")


@played()
async def test_the_next_vm_uses_what_the_first_has_retained(made: World) -> None:
    await create(made, 1, template())
    first = await shown(made)
    await end(made, 1)
    await create(made, 2, template(size="5GiB", **DELETE))
    view = await shown(made)
    assert (view.uid, view.holder, view.spec) == (first.uid, uid(2), first.spec)
    await end(made, 2)
    assert (await shown(made)).state == "Bound", "it was not made for this VM"


@played()
async def test_a_detached_volume_stays(made: World) -> None:
    one = await create(made, 1, template(**DELETE))
    await made.vm("stop", uid=uid(1))
    found = await made.stored(uid(1))
    assert found is not None
    await made.say(status(found, VmState.STOPPED, power_observed=True))
    await settle()
    await made.ask("detach", "volume", name="own")
    await settle()
    found = await made.stored(uid(1))
    assert found is not None
    assert "own" not in {volume.name for volume in found.spec.volumes}
    await end(made, 1)
    assert (await shown(made)).state == "Bound"
    assert one.node == "n1"


@played()
async def test_a_volume_of_nobody_has_no_retention_to_delete_it(made: World) -> None:
    spec = {"size": "1GiB", **DELETE}
    error = await refused(made.ask("create", "volume", name="data", spec=spec))
    assert error.body.details[0].path == "spec.retention"
    await made.ask("create", "volume", name="data", spec={"size": "1GiB"})
    error = await refused(made.ask("update", "volume", name="data", retention="Delete"))
    assert error.body.details[0].path == "spec.retention"
    await create(made, 1, template())
    await made.ask("update", "volume", name="own", retention="Delete")
    await end(made, 1)
    assert (await shown(made)).state == "Deleting"


def test_only_the_end_of_its_own_vm_removes_a_volume() -> None:
    spec = VolumeSpec(size=GIB, retention=Retention.DELETE)
    own = volume(spec=spec, made_for=uid(1), holder=uid(1))
    there = StoredVolume(own, 7)
    for kept in (
        freed(there, ref_of(own), uid(1)),
        freed(
            StoredVolume(own.model_copy(update={"made_for": uid(2)}), 7),
            ref_of(own),
            uid(1),
            ended=True,
        ),
    ):
        assert kept is not None
        assert (kept.holder, kept.deleting) == ("", False)
    gone = freed(there, ref_of(own), uid(1), ended=True)
    assert gone is not None
    assert (gone.holder, gone.deleting) == ("", True)


def test_a_volume_that_a_rebuild_restored_is_retained() -> None:
    one, made = making(1)
    assert made["own"].ends_with == uid(1)
    back = restored(one.volume_refs["own"], one, 1)
    assert (back.uid, back.holder, back.ends_with) == (made["own"].uid, uid(1), "")


def test_a_volume_on_a_server_that_a_rebuild_restored_still_ends_with_its_vm() -> None:
    one, made = making(1, pool_kind=PoolKind.RBD)
    back = restored(one.volume_refs["own"], one, 1)
    assert (back.uid, back.ends_with) == (made["own"].uid, uid(1))
    other = one.volume_refs["own"].model_copy(update={"uid": uid(7)})
    assert restored(other, one, 1).ends_with == "", "the VM used one that was there"


# --- races and crashes ------------------------------------------------------------------------
def making(number: int, **more: Any) -> tuple[VmRecord, dict[str, VolumeRecord]]:
    """Return a VM on n1, and the volume that its create makes."""
    spec = VolumeSpec(size=GIB, retention=Retention.DELETE)
    more |= {"uid": uid_of(uid(number), "own"), "made_for": uid(number)}
    own = volume(name="own", spec=spec, **more)
    one = record(number, f"vm{number}")
    disk = Volume(name="own", volume=NamedVolume(name="own", template=spec))
    wanted = one.spec.model_copy(update={"volumes": (*one.spec.volumes, disk)})
    refs = {"own": ref_of(own)}
    return one.model_copy(update={"spec": wanted, "volume_refs": refs}), {"own": own}


async def committed(bus: Any, number: int = 1) -> bool:
    one, made = making(number)
    return (await Commits(bus, None, VolumeHolders(bus, made)).create(one, None)).created


async def nothing() -> MemoryServer:
    return MemoryServer()


async def test_a_create_may_crash_at_every_call_and_makes_both_or_neither() -> None:
    crashes = 0
    async for server in broken_everywhere(nothing, committed):
        crashes += 1
        bus = MemoryBus(server)
        there = await Commits(bus).latest(uid(1)) is not None
        own = await stored(bus)
        assert (own is not None) == there
        assert own is None or own.holder == uid(1)
        assert await committed(bus) == (not there)
    assert crashes >= 2


async def test_a_delete_may_crash_at_every_call_and_ends_both_or_neither() -> None:
    async def there() -> MemoryServer:
        server = MemoryServer()
        await committed(MemoryBus(server))
        return server

    async def finish(bus: Any) -> None:
        held = await Commits(bus).latest(uid(1))
        assert held is not None
        await Commits(bus).finish(held)

    async for server in broken_everywhere(there, finish):
        bus = MemoryBus(server)
        lives, own = await Commits(bus).latest(uid(1)) is not None, await stored(bus)
        assert own is not None
        assert (own.holder, own.deleting) == ((uid(1), False) if lives else ("", True))


def test_two_creates_that_make_one_volume_end_with_one_holder() -> None:
    async def scenario(gates: Gates) -> None:
        server = MemoryServer()
        rivals = {
            f"c{number}": committed(ScheduledBus(server, f"c{number}", gates), number)
            for number in (1, 2)
        }
        results = await gates.run(rivals)
        lost = [one for one in results.values() if isinstance(one, VirtbusError)]
        assert [one.reason for one in lost] == ["volume_in_use"]
        own = await stored(MemoryBus(server))
        assert own is not None
        assert own.holder == own.made_for
        for number in (1, 2):
            there = await Commits(MemoryBus(server)).latest(uid(number))
            assert (there is not None) == (own.holder == uid(number))

    asyncio.run(sample(scenario, runs=100))


async def test_a_deleted_volume_is_not_made_again_for_the_same_vm() -> None:
    server = MemoryServer()
    bus = MemoryBus(server)
    _, made = making(1)
    key = subjects.volume_record("default", "own")
    revision = await bus.put(key, encode(made["own"]), expect=0)
    await bus.purge(key, expect=revision, why=made["own"].uid.encode())
    with pytest.raises(VirtbusError) as caught:
        await committed(bus)
    assert caught.value.reason == "deleted"
