"""Updates of a VM's first-boot data: the record, the secrets, and a kill between the two."""

from typing import Any

import pytest
from services.controller.tests.fleets import uid
from services.controller.tests.test_vm_api import played, refused
from services.controller.tests.virtual import World, settle

from virtbus.bus.errors import ConflictError
from virtbus.controller.edge.commit import Commits
from virtbus.schemas import subjects
from virtbus.schemas.errors import Code
from virtbus.schemas.secrets_in_force import in_force
from virtbus.schemas.vm import VmRecord, VmSecrets
from virtbus.schemas.wire import read

SEED = "cloud_init_no_cloud"
FIRST = "#cloud-config\nruncmd: [first]\n"
SECOND = "#cloud-config\nruncmd: [second]\n"
KEY = "ssh-ed25519 AAAA me"


async def create(made: World, **more: Any) -> VmRecord:
    about = {"name": "web", "image": "tiny", "uid": uid(1), "user_data": FIRST, "ssh_keys": [KEY]}
    await made.ask("create", **(about | more))
    return await stored(made)


async def stored(made: World) -> VmRecord:
    record = await made.stored(uid(1))
    assert record is not None
    return record


async def secrets(made: World) -> VmSecrets:
    """Return the secrets that the record names."""
    record = await stored(made)
    entry = await made.host.get(subjects.vm_secret(record.node, record.uid))
    assert entry is not None
    assert record.sec_digest is not None
    found = in_force(entry.key, entry.value, record.sec_digest)
    assert found is not None
    return found


async def update(made: World, **seed: Any) -> Any:
    view = await made.ask("get", uid=uid(1))
    spec = view["spec"]
    volumes = [
        one | {SEED: (one[SEED] or {}) | seed} if SEED in one else one for one in spec["volumes"]
    ]
    about = {"uid": uid(1), "revision": view["revision"], "spec": spec | {"volumes": volumes}}
    answer = await made.ask("update", **about)
    await settle()
    return answer


@played()
async def test_new_user_data_takes_effect_at_the_next_start_and_other_secrets_stay(
    made: World,
) -> None:
    before = await create(made)
    await update(made, user_data=SECOND)
    after = await stored(made)
    assert (after.seed_generation, after.generation) == (1, before.generation + 1)
    assert SECOND not in after.model_dump_json()
    seed = (await secrets(made)).cloud_init["cloudinit"]
    assert (seed.user_data, seed.ssh_keys) == (SECOND, (KEY,))
    await update(made, user_data_base64="I2Nsb3VkLWNvbmZpZwo=")
    seed = (await secrets(made)).cloud_init["cloudinit"]
    assert (seed.user_data, seed.user_data_base64) == (None, "I2Nsb3VkLWNvbmZpZwo=")
    entry = await made.host.get(subjects.vm_secret("n1", uid(1)))
    assert entry is not None
    assert SECOND.encode() in read(VmSecrets, entry.value).replaced
    assert (await stored(made)).seed_generation == 2


@played()
async def test_the_same_data_again_change_nothing(made: World) -> None:
    before = await create(made)
    await update(made, user_data=FIRST)
    after = await stored(made)
    assert (after.generation, after.seed_generation) == (before.generation, 0)
    assert after.sec_digest == before.sec_digest


@played()
async def test_a_vm_without_secrets_gets_some_and_shown_fields_change_too(made: World) -> None:
    await create(made, user_data=None, ssh_keys=[])
    assert (await stored(made)).sec_digest is None
    await update(made, hostname="db")
    first = await stored(made)
    assert (first.seed_generation, first.sec_digest) == (1, None)
    await update(made, user_data=SECOND)
    seed = (await secrets(made)).cloud_init["cloudinit"]
    assert (seed.user_data, seed.hostname) == (SECOND, "db")
    await update(made, hostname="web3")
    assert (await secrets(made)).cloud_init["cloudinit"].hostname == "web3"


@played()
async def test_a_kill_before_the_record_leaves_the_former_secrets_in_force(made: World) -> None:
    await create(made)

    async def killed(*_: Any) -> None:
        raise ConflictError

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Commits, "replace", killed)
        for data in (SECOND, "#cloud-config\nruncmd: [third]\n", SECOND):
            error = await refused(update(made, user_data=data))
            assert error.reason == "stale_revision"
            assert (await secrets(made)).cloud_init["cloudinit"].user_data == FIRST
    await update(made, user_data=SECOND)
    assert (await secrets(made)).cloud_init["cloudinit"].user_data == SECOND


@played()
async def test_data_that_cannot_be_used_are_refused(made: World) -> None:
    await create(made)
    for seed, code in (
        ({"network_data": "version: 9"}, Code.INVALID),
        ({"user_data": "x" * 300_000}, None),
        ({"user_data": "y" * 300_000}, Code.TOO_LARGE),
    ):
        if code is None:
            await update(made, **seed)
        else:
            assert (await refused(update(made, **seed))).code == code
    assert (await secrets(made)).cloud_init["cloudinit"].user_data == "x" * 300_000
