"""Directories of nodes: who may mount them, and what they keep a VM from."""

from typing import Any

import pytest
from services.controller.tests.fleets import node, record, spec, uid
from services.controller.tests.test_owners import Asking
from services.controller.tests.virtual import World, run, settle, world

from virtbus.controller.core.demand import demand_of_vm
from virtbus.controller.core.evacuation import data_stays
from virtbus.controller.core.snapshot_changes import refuse_devices
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.vm import VmSpec

OFFERED = {"/srv/open": ("*",), "/srv/shop": ("shop",), "/srv/pods": ()}


def sharing(directory: str, *, readonly: bool = False, **more: Any) -> dict[str, Any]:
    one = {"name": "www", "directory": directory, "readonly": readonly}
    return {"domain": {"devices": {"filesystems": [one]}}} | more


async def offering(made: World) -> None:
    await made.hear(node("n1", directories=OFFERED))
    await made.hear(node("n2"))
    await settle()


def test_a_vm_mounts_only_directories_that_are_open_to_its_namespace() -> None:
    async def body() -> None:
        async with world(nodes=2) as made:
            await offering(made)
            people = Asking(made, "CLIENT")
            refused = {
                "/srv/shop/a": "directory_closed",
                "/srv/pods/a": "directory_closed",
                "/etc": "no_capacity",
                "/srv/openly": "no_capacity",
            }
            for directory, reason in refused.items():
                ask = {"name": "web", "image": "tiny", "spec": sharing(directory)}
                assert await people.refused("create", **ask) == reason, directory
            for number, (directory, namespace) in enumerate(
                (("/srv/open/a", "default"), ("/srv/shop/a", "shop"), ("/srv/shop", "shop")), 1
            ):
                await people.ask(
                    "create",
                    name=f"web-{number}",
                    namespace=namespace,
                    image="tiny",
                    uid=uid(number),
                    spec=sharing(directory),
                )
                stored = await made.stored(uid(number))
                assert stored is not None
                assert stored.node == "n1", "only n1 offers it"

    run(body)


def test_a_vm_is_placed_on_a_node_that_opens_its_directory_to_its_namespace() -> None:
    async def body() -> None:
        async with world(nodes=2) as made:
            await made.hear(node("n1", directories={"/srv/d": ("team-a",)}))
            await made.hear(node("n2", directories={"/srv/d": ("team-b",), "/srv/e": ("team-a",)}))
            await settle()
            people = Asking(made, "CLIENT")
            places = {"team-a": "n1", "team-b": "n2"}
            for number in range(1, 9):
                namespace = sorted(places)[number % 2]
                ask = {"name": f"web-{number}", "namespace": namespace, "image": "tiny"}
                await people.ask("create", uid=uid(number), spec=sharing("/srv/d"), **ask)
                stored = await made.stored(uid(number))
                assert stored is not None
                assert stored.node == places[namespace]
            both = {"kubernetes.io/hostname": "n2"}
            elsewhere = {"name": "far", "namespace": "team-a", "image": "tiny"}
            wanted = sharing("/srv/d", node_selector=both)
            assert await people.refused("create", spec=wanted, **elsewhere) == "no_capacity"

    run(body)


def test_an_update_takes_only_directories_that_the_node_of_the_vm_opens() -> None:
    async def body() -> None:
        async with world(nodes=2) as made:
            await made.hear(node("n1", directories={"/srv/a": ("*",), "/srv/d": ("team-b",)}))
            await made.hear(node("n2", directories={"/srv/d": ("*",)}))
            await settle()
            ask = {"name": "web", "image": "tiny", "uid": uid(1)}
            view = await made.vm("create", **ask, spec=sharing("/srv/a"))
            assert view.node == "n1"
            spec_of = view.spec.model_dump(mode="json")
            spec_of["domain"]["devices"]["filesystems"][0]["directory"] = "/srv/d"
            change = {"name": "web", "revision": view.revision, "spec": spec_of}
            assert await Asking(made, "CLIENT").refused("update", **change) == "directory_closed"

    run(body)


def test_a_namespace_is_part_of_a_demand_only_with_directories() -> None:
    plain, other = record(spec=spec()), record(spec=spec(), namespace="shop")
    assert demand_of_vm(plain) == demand_of_vm(other)
    shared = record(spec=VmSpec.model_validate(sharing("/srv/open/a")))
    assert demand_of_vm(shared).namespace == shared.namespace
    pod = shared.model_copy(update={"owner": "CRI-N1"})
    assert demand_of_vm(pod).namespace == ""


def test_a_pod_of_the_node_mounts_a_directory_that_is_open_to_no_namespace() -> None:
    async def body() -> None:
        async with world(nodes=2) as made:
            await offering(made)
            own = {"node_selector": {"kubernetes.io/hostname": "n1"}}
            ask = {"name": "pod", "image": "tiny", "uid": uid(1)}
            pods = sharing("/srv/pods/a") | own
            assert await Asking(made, "bridge").refused("create", **ask, spec=pods) == (
                "directory_closed"
            )
            await Asking(made, "CRI-N1").ask("create", **ask, spec=pods)
            assert await made.stored(uid(1)) is not None

    run(body)


def test_an_update_takes_another_directory_at_the_next_start_and_none_that_is_closed() -> None:
    async def body() -> None:
        async with world(nodes=2) as made:
            await offering(made)
            ask = {"name": "web", "image": "tiny", "uid": uid(1)}
            view = await made.vm("create", **ask, spec=sharing("/srv/open/a"))
            for directory, wanted in (("/srv/open/b", True), ("/srv/shop/b", False)):
                spec_of = view.spec.model_dump(mode="json")
                spec_of["domain"]["devices"]["filesystems"][0]["directory"] = directory
                change = {"name": "web", "revision": view.revision, "spec": spec_of}
                if wanted:
                    view = await made.vm("update", **change)
                    assert view.spec.domain.devices.filesystems[0].directory == directory
                else:
                    assert await Asking(made, "CLIENT").refused("update", **change) == (
                        "directory_closed"
                    )

    run(body)


def test_a_mount_of_a_directory_has_no_properties_of_a_disk() -> None:
    async def body() -> None:
        async with world() as made:
            await offering(made)
            mount = {"volume": "www", "path": "/srv/www", "partition": 1, "filesystem": "ext4"}
            seed = {"name": "seed", "cloud_init_no_cloud": {"mounts": [mount]}}
            volumes = [{"name": "root", "image": {"ref": "tiny"}}, seed]
            ask = {"name": "web", "spec": sharing("/srv/open/a", volumes=volumes)}
            with pytest.raises(VirtbusError) as caught:
                await Asking(made, "CLIENT").ask("create", **ask)
            at = "spec.volumes[1].cloud_init_no_cloud.mounts[0]"
            assert {one.path for one in caught.value.body.details} == {
                f"{at}.partition",
                f"{at}.filesystem",
            }
            for name in ("partition", "filesystem"):
                del mount[name]
            await Asking(made, "CLIENT").ask("create", **ask)

    run(body)


def test_a_vm_that_writes_to_a_directory_stays_and_one_that_reads_may_leave() -> None:
    writes = VmSpec.model_validate(sharing("/srv/open/a"))
    reads = VmSpec.model_validate(sharing("/srv/open/a", readonly=True))
    assert "/srv/open/a" in data_stays(record(spec=writes))
    assert data_stays(record(spec=reads)) == ""
    assert data_stays(record(spec=spec())) == ""


def test_a_directory_has_no_snapshots_and_no_backups() -> None:
    with pytest.raises(VirtbusError, match="no snapshots and no backups"):
        refuse_devices(VmSpec.model_validate(sharing("/srv/open/a")))


def test_a_disk_in_a_file_of_the_node_follows_the_rules_of_directories() -> None:
    async def body() -> None:
        async with world(nodes=2) as made:
            await offering(made)
            people = Asking(made, "CLIENT")
            for path, reason in {
                "/srv/shop/a": "directory_closed",
                "/etc/a": "no_capacity",
            }.items():
                wrong = {"volumes": [{"name": "data", "host_disk": {"path": path}}]}
                assert await people.refused("create", name="web", spec=wrong) == reason
            disk = {"name": "data", "host_disk": {"path": "/srv/open/a.img", "capacity": "1GiB"}}
            await people.ask("create", name="web", uid=uid(1), spec={"volumes": [disk]})
            stored = await made.stored(uid(1))
            assert stored is not None
            assert stored.node == "n1"
            assert "/srv/open/a.img" in data_stays(stored)
            with pytest.raises(VirtbusError, match="no snapshots"):
                refuse_devices(stored.spec)
            assert stored.spec.local_disks == ()

    run(body)
