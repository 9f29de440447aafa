"""The API of volumes as a client sees it: a real controller over the fake bus."""

import asyncio
from typing import Any

from services.controller.tests.fleets import GIB, record, uid
from services.controller.tests.schedules import Gates, ScheduledBus, sample
from services.controller.tests.test_vm_api import played, refused
from services.controller.tests.virtual import World, run, settle, world
from services.controller.tests.volumes import tried, volume

from virtbus.bus.client.memory_bus import MemoryBus, MemoryServer
from virtbus.bus.client.ports import EntryKind
from virtbus.bus.provisioning import permissions
from virtbus.controller.core.quotas import Quota
from virtbus.controller.core.volume_quota import VolumeQuota
from virtbus.controller.edge.volume_writes import VolumeWrites
from virtbus.schemas import subjects
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.volume import VolumeRecord
from virtbus.schemas.volume_api import VolumeView
from virtbus.schemas.wire import encode, read, validate

SPEC = {"size": "1GiB"}
DATA = subjects.volume_record("default", "data")


async def make(made: World, name: str = "data", number: int = 1, **more: Any) -> VolumeView:
    asked = {"name": name, "uid": uid(number), "spec": SPEC} | more
    return validate(VolumeView, (await made.ask("create", "volume", **asked))["volume"])


async def of(made: World, verb: str, **data: Any) -> VolumeView:
    return validate(VolumeView, await made.ask(verb, "volume", **{"name": "data", **data}))


async def kinds(made: World, number: int = 1) -> list[str]:
    found = await made.client.history(subjects.events(uid(number)))
    return [message.subject.split(".", 4)[4] for message in found]


async def held(made: World, holder: VmRecord, **more: Any) -> VolumeRecord:
    """Write a volume that a VM holds, as a commit will do."""
    one = volume(1, holder=holder.uid, bound=True, node="n1", **more)
    await made.host.put(DATA, encode(one))
    await settle()
    return one


@played()
async def test_a_volume_is_made_shown_and_told(made: World) -> None:
    view = await make(made, labels={"tier": "db"})
    assert (view.uid, view.state, view.node, view.holder) == (uid(1), "Available", "", "")
    assert view.spec.size == GIB
    assert await of(made, "get") == view
    assert await kinds(made) == ["volume.created"]


@played()
async def test_a_repeated_create_is_the_same_volume_and_one_event(made: World) -> None:
    first = await made.ask("create", "volume", name="data", uid=uid(1), spec=SPEC)
    again = await made.ask("create", "volume", name="data", uid=uid(1), spec=SPEC)
    assert (first["created"], again.get("created", False)) == (True, False)
    assert first["volume"] == again["volume"]
    assert await kinds(made) == ["volume.created"]


@played()
async def test_names_and_uids_have_one_volume(made: World) -> None:
    await make(made)
    assert (await refused(make(made, number=2))).reason == "name_taken"
    other = await refused(make(made, spec={"size": "2GiB"}))
    assert (other.reason, other.body.details[0].path) == ("uid_taken", "spec.size")
    assert (await refused(make(made, "logs"))).reason == "uid_taken"
    assert (await make(made, number=3, namespace="shop")).namespace == "shop"


@played()
async def test_a_deleted_uid_is_gone_and_its_name_is_free(made: World) -> None:
    await make(made)
    assert (await of(made, "delete")).state == "Deleting"
    entry = await made.client.get(DATA)
    assert entry is not None
    assert (entry.kind, entry.why) == (EntryKind.PURGE, uid(1).encode())
    assert (await refused(make(made))).code == 410
    assert (await refused(of(made, "get"))).reason == "volume_not_found"
    assert (await refused(of(made, "delete"))).code == 404
    assert (await make(made, number=2)).uid == uid(2)
    assert await kinds(made) == ["volume.created", "volume.deleting", "volume.deleted"]


@played()
async def test_a_delete_of_another_volume_of_that_name_is_refused(made: World) -> None:
    await make(made)
    assert (await refused(of(made, "delete", uid=uid(9)))).reason == "not_its_uid"
    assert (await of(made, "get", uid=uid(1))).uid == uid(1)


@played()
async def test_a_protected_volume_is_deleted_after_its_protection_is_cleared(made: World) -> None:
    await make(made, spec=SPEC | {"protected": True})
    error = await refused(of(made, "delete"))
    assert (error.code, error.reason) == (409, "protected")
    assert "virtbus volume update data" in str(error)
    await of(made, "update", protected=False)
    assert (await of(made, "delete")).deleting


@played()
async def test_a_volume_grows_and_never_shrinks(made: World) -> None:
    await make(made)
    grown = await of(made, "update", size="3GiB")
    assert (grown.spec.size, grown.generation) == (3 * GIB, 2)
    error = await refused(of(made, "update", size="2GiB"))
    assert (error.code, error.body.details[0].path) == (400, "size")
    same = await of(made, "update", size="3GiB")
    assert same.revision == grown.revision


@played()
async def test_labels_are_replaced_without_a_new_generation(made: World) -> None:
    await make(made, labels={"a": "1"})
    view = await of(made, "update", labels={"b": "2"})
    assert (view.labels, view.generation) == ({"b": "2"}, 1)


@played()
async def test_a_held_volume_neither_grows_nor_is_deleted(made: World) -> None:
    vm = record(7)
    await made.host.put(subjects.vm_record("n1", vm.uid), encode(vm))
    await held(made, vm)
    view = await of(made, "get")
    assert (view.state, view.holder, view.holder_name) == ("InUse", vm.uid, "web")
    for asking in (of(made, "delete"), of(made, "update", size="2GiB")):
        error = await refused(asking)
        assert (error.reason, vm.uid in str(error)) == ("volume_in_use", True)
    assert (await of(made, "update", protected=True)).spec.protected


@played()
async def test_a_volume_with_data_stays_until_its_data_is_removed(made: World) -> None:
    await made.host.put(DATA, encode(volume(1, bound=True, node="n1")))
    await settle()
    assert (await of(made, "get")).state == "Bound"
    assert (await of(made, "delete")).state == "Deleting"
    assert (await of(made, "get")).state == "Deleting"
    for asking in (make(made), make(made, number=2), of(made, "update", size="2GiB")):
        assert (await refused(asking)).reason == "deleting"


@played()
async def test_volumes_are_listed_in_pages_by_namespace_and_labels(made: World) -> None:
    names = [("a", "z"), ("a-b", "y"), ("a-b", "z"), ("b", "a")]
    for number, (namespace, name) in enumerate(names):
        labels = {"odd": "yes"} if number % 2 else {}
        await make(made, name, number, namespace=namespace, labels=labels)
    found: list[tuple[str, str]] = []
    more: dict[str, str] = {}
    while True:
        page = await made.ask("list", "volume", limit=1, **more)
        found += [(item["namespace"], item["name"]) for item in page["items"]]
        if "continue" not in page:
            break
        more = {"continue": page["continue"]}
    assert found == names
    page = await made.ask("list", "volume", namespace="a-b", labels={"odd": "yes"})
    assert [item["name"] for item in page["items"]] == ["y"]
    assert (await refused(made.ask("list", "volume", **{"continue": "A"}))).reason == "bad_continue"


@played()
async def test_a_node_may_be_chosen_if_it_is_known(made: World) -> None:
    assert (await make(made, node="n1")).node == "n1"
    assert (await refused(make(made, "logs", 2, node="n9"))).code == 404
    assert (await refused(make(made, "logs", 2, spec={"size": "1GiB", "pool": "x"}))).code == 422


@played()
async def test_a_volume_that_is_too_large_to_store_is_refused_by_field(made: World) -> None:
    labels = {f"{'k' * 251}{n}": "v" * 63 for n in range(64)}
    image = "http://example.org/" + "\U0001f600" * 1900
    spec = SPEC | {"source": {"image": image}}
    error = await refused(make(made, labels=labels, spec=spec))
    assert (error.code, error.body.details[0].path) == (413, "labels")


@played()
async def test_creates_stop_at_the_quota_and_repeats_do_not(made: World) -> None:
    (controller,) = made.controllers.values()
    controller._volumes.room._quota = VolumeQuota(Quota(2, 3))
    await make(made, "a", 1)
    await make(made, "b", 2)
    error = await refused(make(made, "c", 3))
    assert (error.code, error.reason, "namespace default" in str(error)) == (
        429,
        "volume_quota",
        True,
    )
    assert (await make(made, "b", 2)).uid == uid(2)
    await make(made, "c", 3, namespace="shop")
    assert "the fleet" in str(await refused(make(made, "d", 4, namespace="shop")))
    await made.ask("delete", "volume", name="a")
    await make(made, "c", 5)


@played()
async def test_the_bytes_of_volumes_have_a_quota_also_when_they_grow(made: World) -> None:
    (controller,) = made.controllers.values()
    controller._volumes.room._quota = VolumeQuota(Quota(9, 9), 3 * GIB, 4 * GIB)
    await make(made, "a", 1, spec={"size": GIB})
    await make(made, "b", 2, spec={"size": GIB})
    error = await refused(make(made, "c", 3, spec={"size": 2 * GIB}))
    assert (error.code, error.reason) == (429, "volume_quota")
    assert "namespace default has volumes of 2GiB, and 1GiB left" in str(error)
    assert (await make(made, "b", 2, spec={"size": GIB})).uid == uid(2), "a repeat"
    await made.ask("update", "volume", name="a", size=2 * GIB)
    grown = await refused(made.ask("update", "volume", name="b", size=2 * GIB))
    assert grown.reason == "volume_quota"
    await make(made, "d", 4, namespace="shop", spec={"size": GIB})
    fleet = await refused(make(made, "e", 5, namespace="shop", spec={"size": GIB}))
    assert "the fleet has volumes of 4GiB, and 0B left" in str(fleet)
    await made.ask("delete", "volume", name="a")
    await make(made, "c", 6, spec={"size": 2 * GIB})


@played()
async def test_creates_of_volumes_stop_before_creates_of_vms(made: World) -> None:
    (controller,) = made.controllers.values()
    controller._storage.fill = 0.7
    assert (await refused(make(made))).reason == "bus_full"
    assert (await made.ask("create", name="web", image="tiny"))["created"]


@played()
async def test_a_repeated_update_acts_once(made: World) -> None:
    await make(made)
    subject = subjects.api("volume", "update")
    body = {"name": "data", "labels": {"v": "1"}}
    await made.client.request(subject, body, timeout_s=10, request_id="r1")
    await of(made, "update", labels={"v": "2"})
    answer = await made.client.request(subject, body, timeout_s=10, request_id="r1")
    assert validate(VolumeView, answer).labels == {"v": "2"}


@played()
async def test_an_unreadable_volume_is_reported_to_who_asks_for_it(made: World) -> None:
    await made.host.put(DATA, b"\xc1 no msgpack")
    await settle()
    for asking in (of(made, "get"), make(made)):
        assert (await refused(asking)).reason == "unreadable"


@played()
async def test_a_volume_that_was_never_readable_is_deleted_by_name(made: World) -> None:
    await made.host.put(DATA, b"\xc1 no msgpack")
    await settle()
    assert (await of(made, "delete")).state == "Deleting"
    entry = await made.client.get(DATA)
    assert entry is not None
    assert entry.kind is EntryKind.PURGE
    await made.host.put(DATA, encode(volume(schema_version=99)))
    await settle()
    assert (await refused(of(made, "delete"))).reason == "unreadable"


@played()
async def test_an_unreadable_volume_is_deleted_by_its_last_readable_record(made: World) -> None:
    known = volume(1, node="n1", bound=True)
    for last in (known.model_copy(update={"holder": uid(7)}), known):
        await made.host.put(DATA, encode(last))
        await settle()
        await made.host.put(DATA, b"\xc1 no msgpack")
        await settle()
        assert (await refused(of(made, "delete", uid=uid(2)))).reason == "not_its_uid"
        if last.holder:
            assert (await refused(of(made, "delete"))).reason == "volume_in_use"
    view = await of(made, "delete", uid=uid(1))
    assert (view.state, view.uid, view.node) == ("Deleting", uid(1), "n1")
    entry = await made.client.get(DATA)
    assert entry is not None
    assert read(VolumeRecord, entry.value).deleting


@played()
async def test_an_unreadable_volume_of_a_vm_is_not_deleted(made: World) -> None:
    await make(made)
    spec = {"volumes": [{"name": "disk", "volume": {"name": "data"}}]}
    await made.ask("create", name="web", image="tiny", spec=spec)
    await made.host.put(DATA, b"\xc1 no msgpack")
    await settle()
    assert (await refused(of(made, "delete"))).reason == "volume_in_use"


def test_one_of_two_controllers_makes_a_volume() -> None:
    async def scenario(gates: Gates) -> None:
        server = MemoryServer()
        rivals = {
            f"c{n}": VolumeWrites(ScheduledBus(server, f"c{n}", gates)).create(volume(n))
            for n in (1, 2)
        }
        results = await gates.run(rivals)
        won = [one for one in results.values() if isinstance(one, tuple) and one[1]]
        lost = [one for one in results.values() if isinstance(one, VirtbusError)]
        assert (len(won), [one.reason for one in lost]) == (1, ["name_taken"])
        entry = await MemoryBus(server).get(DATA)
        assert entry is not None
        assert read(VolumeRecord, entry.value).uid == won[0][0].record.uid

    asyncio.run(sample(scenario, runs=100))


def test_two_controllers_that_delete_and_make_a_name_end_with_one_volume() -> None:
    async def body() -> None:
        async with world(controllers=2) as made:
            await make(made)
            async with asyncio.TaskGroup() as group:
                group.create_task(of(made, "delete"))
                again = group.create_task(tried(make(made, number=2)))
            entry = await made.client.get(DATA)
            assert entry is not None
            assert (entry.kind is EntryKind.PUT) == (again.result() == "done")

    run(body)


def test_people_change_volumes_observers_read_them_and_bridges_see_none() -> None:
    verbs = ("create", "get", "list", "update", "adopt", "attach", "detach", "delete")
    subjects_of = {verb: subjects.api("volume", verb) for verb in verbs}
    allowed = {
        role.user: {verb for verb in verbs if subjects_of[verb] in role.publish}
        for role in (permissions.client(), permissions.observer(), permissions.bridge())
    }
    assert allowed == {"client": set(verbs), "observer": {"get", "list"}, "bridge": set()}
