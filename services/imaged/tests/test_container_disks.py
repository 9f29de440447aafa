"""Disks of VMs on container images: pull policies, and the images that disks depend on."""

import pytest
from services.imaged.tests.records import UID, record
from services.imaged.tests.registry_under_test import Registry, digest_of, gz, tar
from services.imaged.tests.site_under_test import MIB, NodeMaker, Web, qcow2_image

from virtbus.schemas.container import ContainerDisk, ImagePullPolicy
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.image import parse_image_ref
from virtbus.schemas.vm import Volume

DISK = qcow2_image(payload=MIB)
OTHER = qcow2_image(payload=1000)


@pytest.fixture
def registry(server: Web) -> Registry:
    return Registry(server)


def container(registry: Registry, image: str, **more: object) -> Volume:
    disk = ContainerDisk.model_validate({"image": f"{registry.host}/{image}", **more})
    return Volume(name="root", container_disk=disk)


async def test_a_disk_is_made_of_it_and_kept(make_node: NodeMaker, registry: Registry) -> None:
    registry.push("a", "latest", gz(tar(("disk/a", DISK), ("disk/b", OTHER))))
    wanted = record(container(registry, "a", path="/disk/a"))
    async with make_node(registries=registry.known) as node:
        done = await node.disks.ensure(wanted)
        disk = done.ready.disks["root"]
        assert disk.digest == digest_of(DISK)
        asked = registry.asked("")
        again = await node.disks.ensure(wanted)
        assert (again.ready, again.made) == (done.ready, False)
        assert registry.asked("") == asked  # Always acts for new disks, not for an existing one


@pytest.mark.parametrize(
    ("policy", "digest", "asked"),
    [
        (ImagePullPolicy.ALWAYS, digest_of(OTHER), True),
        (ImagePullPolicy.IF_NOT_PRESENT, digest_of(DISK), False),
        (ImagePullPolicy.NEVER, digest_of(DISK), False),
    ],
    ids=["Always", "IfNotPresent", "Never"],
)
async def test_pull_policies_where_the_image_is_here_and_its_tag_has_moved(
    make_node: NodeMaker, registry: Registry, policy: ImagePullPolicy, digest: str, asked: bool
) -> None:
    registry.push("a", "1", gz(tar(("disk/a", DISK))))
    async with make_node(registries=registry.known) as node:
        await node.images.ensure(parse_image_ref(registry.ref("a:1")))
        registry.push("a", "1", gz(tar(("disk/a", OTHER))))
        before = registry.asked("manifests")
        done = await node.disks.ensure(record(container(registry, "a:1", image_pull_policy=policy)))
        assert done.ready.digest == digest
        assert (registry.asked("manifests") > before) is asked


async def test_always_asks_the_registry_and_transfers_nothing_unchanged(
    make_node: NodeMaker, registry: Registry
) -> None:
    registry.push_index("a", "latest", {"amd64": (gz(tar(("disk/a", DISK))),)})
    async with make_node(registries=registry.known) as node:
        await node.disks.ensure(record(container(registry, "a")))
        blobs, manifests = registry.asked("blobs"), registry.asked("manifests")
        other = record(container(registry, "a"), uid=UID.replace("ab", "cd"))
        assert (await node.disks.ensure(other)).made
        assert registry.asked("blobs") == blobs
        assert registry.asked("manifests") == manifests + 1
        registry.blobs.clear()
        gone = record(container(registry, "a"), uid=UID.replace("ab", "ef"))
        with pytest.raises(VirtbusError) as caught:
            await node.disks.ensure(gone)
        assert caught.value.reason == "image_not_found"


async def test_never_makes_no_request(make_node: NodeMaker, registry: Registry) -> None:
    registry.push("a", "1", gz(tar(("disk/a", DISK))))
    wanted = record(container(registry, "a:1", image_pull_policy="Never"))
    async with make_node(registries=registry.known) as node:
        with pytest.raises(VirtbusError, match="virtbus image pull docker://") as caught:
            await node.disks.ensure(wanted)
        assert caught.value.reason == "image_not_present"
        assert registry.asked("") == 0


async def test_an_image_that_was_lost_is_fetched_by_the_manifest_it_came_from(
    make_node: NodeMaker, registry: Registry
) -> None:
    manifest = registry.push("a", "1", gz(tar(("disk/a", DISK))))
    wanted = record(container(registry, "a:1"))
    async with make_node(registries=registry.known) as node:
        await node.disks.ensure(wanted)
        registry.push("a", "1", gz(tar(("disk/a", OTHER))))
        node.store.path(digest_of(DISK)).unlink()
        await node.disks.ensure(wanted)
        assert node.store.path(digest_of(DISK)).read_bytes() == DISK
        node.store.path(digest_of(DISK)).unlink()
        node.store.remove_links((registry.ref("a:1"), f"{registry.ref('a:1')}@{manifest}"))
        with pytest.raises(VirtbusError) as caught:
            await node.disks.ensure(wanted)
        assert caught.value.reason == "digest_mismatch"
