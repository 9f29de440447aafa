"""Data of volumes without a record: an audit lists it, and a person adopts it by name."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.controller.tests.fleets import GIB, uid
from services.controller.tests.test_vm_api import played, refused
from services.controller.tests.test_volume_holders import at, holder, make
from services.controller.tests.virtual import World, settle
from services.controller.tests.volumes import volume

from virtbus.bus.client.memory_bus import MemoryBus
from virtbus.bus.client.ports import Endpoint, Request, ServiceInfo
from virtbus.controller.core.volume_holds import ref_of
from virtbus.schemas import subjects
from virtbus.schemas.audit import Audited
from virtbus.schemas.node_rpc import HeldResources, HeldVolume, Inspect
from virtbus.schemas.volume_api import VolumeView
from virtbus.schemas.wire import encode, validate


def data(number: int, name: str = "data", *, readable: bool = True) -> HeldVolume:
    ref = ref_of(volume(number, name))
    return HeldVolume(folder=ref.folder, ref=ref if readable else None)


@asynccontextmanager
async def holding(
    made: World, *volumes: HeldVolume, unread: tuple[str, ...] = ()
) -> AsyncIterator[None]:
    """The services of n1, which has the data of volumes; imaged answers with pages of one."""
    there = sorted(volumes, key=lambda one: one.folder)

    async def inspect(request: Request) -> HeldResources:
        after = validate(Inspect, request.data).volumes_after or ""
        rest = [one for one in there if one.folder > after]
        volumes, more = tuple(rest[:1]), len(rest) > 1
        return HeldResources(volumes=volumes, more=more, unread_pools=unread)

    async def audit(_: Request) -> Audited:
        return Audited()

    info = ServiceInfo("virtbus-imaged", "1.0.0", "a test", {})
    endpoints = [
        Endpoint("inspect", subjects.rpc("n1", "imaged", "inspect"), inspect),
        Endpoint("audit", subjects.rpc("n1", "agent", "audit"), audit),
    ]
    async with MemoryBus(made.server, "n1").serve(info, endpoints):
        yield


@played()
async def test_an_audit_lists_data_of_volumes_without_a_record(made: World) -> None:
    known = await make(made, uid=uid(1), name="known")
    assert known.uid == uid(1)
    others = data(2, "lost"), data(3, "known"), data(4, "torn", readable=False)
    async with holding(made, data(1, "known"), *others):
        answer = await made.ask("audit", "node", repair=True)
    found = answer["nodes"][0]["findings"]
    assert [(one["kind"], one["uid"]) for one in found] == [
        ("volume", uid(3)),
        ("volume", uid(2)),
        ("volume", uid(4)),
    ]
    assert "virtbus volume adopt lost -n default --node n1" in found[1]["what"]
    named = [(one.get("namespace"), one.get("name")) for one in found]
    assert named == [("default", "known"), ("default", "lost"), (None, None)]
    assert not any(one.get("repair") or one.get("repaired") for one in found)


@played()
async def test_a_volume_is_adopted_by_the_copy_on_its_node(made: World) -> None:
    async with holding(made, data(1), data(2, "other"), data(3, "other"), data(7, "mine")):
        asked = {"name": "data", "node": "n1"}
        view = validate(VolumeView, await made.ask("adopt", "volume", **asked))
        assert (view.uid, view.state, view.node, view.spec.size) == (uid(1), "Bound", "n1", GIB)
        again = validate(VolumeView, await made.ask("adopt", "volume", **asked))
        assert again.revision == view.revision
        several = await refused(made.ask("adopt", "volume", name="other", node="n1"))
        assert (several.reason, uid(3) in str(several)) == ("several_volumes", True)
        await made.ask("adopt", "volume", name="other", node="n1", uid=uid(3))
        assert (await at(made.host, subjects.volume_record("default", "other"))).uid == uid(3)
        taken = await refused(made.ask("adopt", "volume", name="other", node="n1", uid=uid(2)))
        assert taken.reason == "name_taken"
        await made.host.put(subjects.vm_record("n1", uid(8)), encode(holder(8, volume(7, "mine"))))
        await settle()
        mine = await made.ask("adopt", "volume", name="mine", node="n1")
        assert (mine["holder"], mine["state"]) == (uid(8), "InUse")
        missing = await refused(made.ask("adopt", "volume", name="none", node="n1"))
        assert missing.reason == "no_volume_data"
    assert (await refused(made.ask("adopt", "volume", name="data", node="n9"))).code == 404


@played()
async def test_data_in_a_pool_that_cannot_be_read_now_is_not_called_missing(made: World) -> None:
    async with holding(made, data(1), unread=("fast",)):
        later = await refused(made.ask("adopt", "volume", name="none", node="n1"))
        assert (later.code, later.reason, "fast" in str(later)) == (503, "pool_gone", True)
        found = validate(VolumeView, await made.ask("adopt", "volume", name="data", node="n1"))
        assert found.uid == uid(1)
