"""A VM's own logins for its container disks: used only for them, and never revealed."""

import asyncio
import logging

import pytest
from services.imaged.tests.records import UID, record, uid
from services.imaged.tests.registry_under_test import Registry, digest_of, gz, tar
from services.imaged.tests.site_under_test import NodeMaker, Web, qcow2_image

from virtbus.imaged.disks import Disks
from virtbus.schemas.container import ContainerDisk
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.registry_login import Login
from virtbus.schemas.vm import VmRecord, Volume

DISK = qcow2_image(payload=1000)
LOGIN = Login("me", "pass:word")


@pytest.fixture
def registry(server: Web) -> Registry:
    found = Registry(server, challenge='Basic realm="r"', login=LOGIN.header)
    found.push("team/disk", "1", gz(tar(("disk/a", DISK))))
    return found


def wanted(registry: Registry, one: str = UID, policy: str = "Always") -> VmRecord:
    """A record as a controller writes it, of a VM with a login."""
    image = f"{registry.host}/team/disk:1"
    disk = {"image": image, "image_pull_secret": "", "image_pull_policy": policy}
    volume = Volume(name="root", container_disk=ContainerDisk.model_validate(disk))
    return record(volume, uid=one)


def logins(registry: Registry, login: Login = LOGIN) -> dict[str, str]:
    return {"root": login.config(registry.host)}


async def refused(disks: Disks, one: VmRecord, logins: dict[str, str]) -> VirtbusError:
    with pytest.raises(VirtbusError) as caught:
        await disks.ensure(one, None, logins)
    return caught.value


async def test_a_private_image_is_pulled_with_the_vms_own_login_which_is_never_revealed(
    make_node: NodeMaker, registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    one = wanted(registry)
    async with make_node(registries=registry.known) as node:
        done = await node.disks.ensure(one, None, logins(registry))
        assert done.ready.digest == digest_of(DISK)
        assert "pass:word" not in done.ready.model_dump_json()
        await node.disks.ensure(one)  # an existing disk needs no login
        # nor does an existing image
        await node.disks.ensure(wanted(registry, uid(2), "IfNotPresent"))
        node.store.path(digest_of(DISK)).unlink()
        assert (await refused(node.disks, one, {})).reason == "image_denied"
        await node.disks.ensure(one, None, logins(registry))
        assert node.store.path(digest_of(DISK)).read_bytes() == DISK
    assert "pass:word" not in caplog.text
    assert LOGIN.auth not in caplog.text


async def test_a_login_opens_nothing_for_others_who_ask_at_the_same_time(
    make_node: NodeMaker, registry: Registry
) -> None:
    strangers = {uid(2): {}, uid(3): logins(registry, Login("you", "guess"))}
    async with make_node(registries=registry.known) as node:
        async with asyncio.TaskGroup() as group:
            own = group.create_task(node.disks.ensure(wanted(registry), None, logins(registry)))
            others = [
                group.create_task(refused(node.disks, wanted(registry, one), theirs))
                for one, theirs in strangers.items()
            ]
        assert own.result().made
        errors = [task.result() for task in others]
        assert [error.reason for error in errors] == ["image_denied"] * 2
        assert "give the disk an image_pull_secret" in str(errors[0])
        assert "the VM's image_pull_secret" in str(errors[1])
        assert "guess" not in str(errors[1])
