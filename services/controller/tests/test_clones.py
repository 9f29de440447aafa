"""A clone is a VM whose record names a snapshot: it goes to the node of that data."""

from typing import Any

import pytest
from services.controller.tests.fleets import record, status, uid
from services.controller.tests.test_snapshot_api import create, end
from services.controller.tests.test_vm_api import played, refused
from services.controller.tests.virtual import World
from services.controller.tests.volumes import volume

from virtbus.controller.core.admission import admit
from virtbus.controller.core.clones import taken_over
from virtbus.schemas import subjects
from virtbus.schemas.seed import CloudInit
from virtbus.schemas.states import VmState
from virtbus.schemas.vm import VmRecord, VmSecrets
from virtbus.schemas.wire import encode, read

SEED = "#cloud-config\nhostname: x\n"


async def source(made: World) -> None:
    """The VM web, which is off, with first-boot data."""
    await made.ask("create", name="web", uid=uid(1), image="tiny", user_data=SEED)
    await made.ask("stop", name="web")


async def clone(made: World, **more: Any) -> VmRecord:
    asked = {"name": "web2", "uid": uid(2), "image": "tiny", "origin": "s", "user_data": ""}
    await made.ask("create", **(asked | more))
    stored = await made.stored(uid(2))
    assert stored is not None
    return stored


async def snapshot(made: World) -> str:
    """A complete snapshot of web; return its node."""
    record = await made.stored(uid(1))
    assert record is not None
    await made.say(status(record, VmState.STOPPED))
    await create(made)
    await end(made)
    return record.node


@played()
async def test_a_clone_is_on_the_node_of_its_snapshot_and_takes_over_first_boot_data(
    made: World,
) -> None:
    await source(made)
    node = await snapshot(made)
    made_clone = await clone(made)
    assert made_clone.origin is not None
    assert (made_clone.node, made_clone.origin.node) == (node, node)
    assert made_clone.origin.snapshot.name == "s"
    seed = await cloned_seed(made, node)
    assert (seed.user_bytes, seed.hostname) == (SEED.encode(), "web2")


async def cloned_seed(made: World, node: str) -> CloudInit:
    """The only seed of the clone's secrets, which are its own."""
    entry = await made.host.get(subjects.vm_secret(node, uid(2)))
    assert entry is not None
    secrets = read(VmSecrets, entry.value)
    assert secrets.uid == uid(2)
    (seed,) = secrets.cloud_init.values()
    return seed


@played()
async def test_a_clone_has_the_first_boot_data_in_force_not_those_of_a_refused_update(
    made: World,
) -> None:
    await source(made)
    node = await snapshot(made)
    key = subjects.vm_secret(node, uid(1))
    entry = await made.host.get(key)
    assert entry is not None
    newer = VmSecrets(uid=uid(1), cloud_init={"cloudinit": CloudInit(user_data="#!/bin/sh\n")})
    refused_update = newer.model_copy(update={"replaced": entry.value})
    await made.host.put(key, encode(refused_update), expect=entry.revision)
    await clone(made)
    assert (await cloned_seed(made, node)).user_bytes == SEED.encode()


@played()
async def test_a_clone_waits_for_secrets_that_the_bus_does_not_have_now(made: World) -> None:
    await source(made)
    node = await snapshot(made)
    key = subjects.vm_secret(node, uid(1))
    entry = await made.host.get(key)
    assert entry is not None
    await made.host.put(key, encode(VmSecrets(uid=uid(1))), expect=entry.revision)
    assert (await refused(clone(made))).reason == "secrets_lost"
    assert await made.stored(uid(2)) is None


@pytest.mark.parametrize(
    "own",
    [
        {"user_data_parts": [{"data": "#!/bin/sh\n"}]},
        {"vendor_data": "#cloud-config\n"},
        {"network_data": "version: 2\n"},
        {"environment": {"A": "b"}},
        {"write_files": [{"path": "/a", "content": "b"}]},
    ],
    ids=lambda own: next(iter(own)),
)
def test_a_seed_of_the_clone_with_any_secret_content_stays(own: dict[str, Any]) -> None:
    before, after = seeds(own)
    assert after == before


def test_a_seed_of_the_clone_with_mounts_only_keeps_them_beside_the_first_boot_data() -> None:
    _, after = seeds({"mounts": [{"volume": "root", "path": "/data"}]})
    assert after["cloudinit"].user_data == SEED
    assert [one.path for one in after["cloudinit"].mounts] == ["/data"]


def seeds(own: dict[str, Any]) -> tuple[dict[str, CloudInit], dict[str, CloudInit]]:
    """The secret seeds of a clone with the seed `own`, before and after the source's were added."""
    volumes = [{"name": "cloudinit", "cloud_init_no_cloud": own}]
    asked = {"name": "web2", "image": "tiny", "spec": {"volumes": volumes}}
    admitted = admit(asked, uid(2))
    held = VmSecrets(uid=uid(1), cloud_init={"cloudinit": CloudInit(user_data=SEED)})
    after = taken_over(admitted.spec, admitted.secrets, record(), held, "web2", uid(2))
    return {} if admitted.secrets is None else admitted.secrets.cloud_init, after.cloud_init


@played()
async def test_only_a_complete_snapshot_of_a_vm_begins_a_clone(made: World) -> None:
    await source(made)
    assert (await refused(clone(made))).reason == "snapshot_not_found"
    record = await made.stored(uid(1))
    assert record is not None
    key = subjects.volume_record("default", "data")
    await made.host.put(key, encode(volume(1, node="n1", bound=True)))
    await create(made, vm=None, volume="data")
    assert (await refused(clone(made))).reason == "snapshot_not_ready"
    await end(made)
    assert (await refused(clone(made))).reason == "not_of_a_vm"
