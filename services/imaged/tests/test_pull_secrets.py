"""Logins that a VM brings for its container disks: out of `$KV.sec`, and for itself alone."""

import asyncio
import hashlib
import logging

import pytest
from services.imaged.tests.records import NODE, UID, Secrets, record, uid
from services.imaged.tests.registry_under_test import Registry, digest_of, gz, tar
from services.imaged.tests.site_under_test import NodeMaker, Web, qcow2_image

from virtbus.imaged.disks import Disks
from virtbus.schemas import subjects
from virtbus.schemas.container import ContainerDisk
from virtbus.schemas.errors import Retry, VirtbusError
from virtbus.schemas.registry_login import Login
from virtbus.schemas.vm import VmRecord, VmSecrets, Volume
from virtbus.schemas.wire import encode

DISK = qcow2_image(payload=1000)
LOGIN = Login("me", "pass:word")


@pytest.fixture
def registry(server: Web) -> Registry:
    found = Registry(server, challenge='Basic realm="r"', login=LOGIN.header)
    found.push("team/disk", "1", gz(tar(("disk/a", DISK))))
    return found


def wanted(
    registry: Registry,
    secrets: Secrets,
    login: Login | None,
    one: str = UID,
    policy: str = "Always",
) -> VmRecord:
    """A record as a controller writes it; what it withholds is in `secrets`."""
    text = login.config(registry.host) if login is not None else None
    image = f"{registry.host}/team/disk:1"
    disk = ContainerDisk.model_validate(
        {"image": image, "image_pull_secret": text, "image_pull_policy": policy}
    ).without_secrets()
    made = record(Volume(name="root", container_disk=disk), uid=one)
    if text is None:
        return made
    body = encode(VmSecrets(uid=one, image_pull={"root": text}))
    secrets.entries[subjects.vm_secret(NODE, one)] = body
    return made.model_copy(update={"sec_digest": hashlib.sha256(body).hexdigest()})


async def refused(disks: Disks, one: VmRecord) -> VirtbusError:
    with pytest.raises(VirtbusError) as caught:
        await disks.ensure(one)
    return caught.value


async def test_a_private_image_is_pulled_with_the_vms_own_login_which_nobody_tells(
    make_node: NodeMaker, registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    secrets = Secrets()
    one = wanted(registry, secrets, LOGIN)
    assert "pass" not in one.model_dump_json()
    async with make_node(registries=registry.known, secrets=secrets) as node:
        done = await node.disks.ensure(one)
        assert done.ready.digest == digest_of(DISK)
        assert "pass:word" not in done.ready.model_dump_json()
        secrets.entries.clear()
        await node.disks.ensure(one)  # what stands needs no login
        again = wanted(registry, Secrets(), LOGIN, uid(2), "IfNotPresent")
        await node.disks.ensure(again)  # nor does what is here already
    assert "pass:word" not in caplog.text
    assert LOGIN.auth not in caplog.text


async def test_a_login_opens_nothing_for_others_who_ask_at_the_same_time(
    make_node: NodeMaker, registry: Registry
) -> None:
    secrets = Secrets()
    mine = wanted(registry, secrets, LOGIN)
    strangers = [
        wanted(registry, secrets, None, uid(2)),
        wanted(registry, secrets, Login("you", "guess"), uid(3)),
    ]
    async with make_node(registries=registry.known, secrets=secrets) as node:
        async with asyncio.TaskGroup() as group:
            own = group.create_task(node.disks.ensure(mine))
            others = [group.create_task(refused(node.disks, each)) for each in strangers]
        assert own.result().made
        errors = [task.result() for task in others]
        assert [error.reason for error in errors] == ["image_denied"] * 2
        assert "give the disk an image_pull_secret" in str(errors[0])
        assert "the VM's image_pull_secret" in str(errors[1])
        assert "guess" not in str(errors[1])


@pytest.mark.parametrize("there", [None, b"another's"])
async def test_a_login_that_the_bus_does_not_have_yet_is_asked_for_again(
    make_node: NodeMaker, registry: Registry, there: bytes | None
) -> None:
    secrets = Secrets()
    one = wanted(registry, secrets, LOGIN)
    held, secrets.entries = secrets.entries, {}
    if there is not None:
        secrets.entries[subjects.vm_secret(NODE, UID)] = there
    async with make_node(registries=registry.known, secrets=secrets) as node:
        error = await refused(node.disks, one)
        assert (error.reason, error.body.retry) == ("secrets_lost", Retry.LATER)
        assert registry.asked("") == 0
        secrets.entries = held
        assert (await node.disks.ensure(one)).made
