"""An agent accepts only the VM's own secrets."""

import hashlib
from pathlib import Path

import pytest
from services.nodeagent.tests.pretended_node import (
    NODE,
    Node,
    eventually,
    in_state,
    record,
    uid,
)

from virtbus.schemas import subjects
from virtbus.schemas.seed import CloudInitNoCloud
from virtbus.schemas.vm import VmSecrets
from virtbus.schemas.wire import encode, read

A = uid(1)


def secrets(user_data: str) -> bytes:
    seed = CloudInitNoCloud(user_data=user_data)
    return encode(VmSecrets(uid=A, cloud_init={"ci": seed}))


async def test_a_vm_starts_with_the_secrets_of_its_record_and_no_others(tmp_path: Path) -> None:
    """A server that lags, or a create that lost, may have others under the same key."""
    node = Node(tmp_path)
    own = secrets("own")
    await node.join()
    await node.bus.put(subjects.vm_secret(NODE, A), secrets("another's"))
    seeded = {"volumes": [{"name": "ci", "cloud_init_no_cloud": {}}]}
    await node.put(record(spec=seeded, sec_digest=hashlib.sha256(own).hexdigest()))
    async with node.agent():

        async def told() -> bool:
            status = await node.status(A)
            return status is not None and status.reason == "secrets_lost"

        await eventually(told)
        assert node.domains.done == []
        await node.bus.put(subjects.vm_secret(NODE, A), own)
        await eventually(lambda: node.domains.done == [("start", A)])


@pytest.mark.parametrize("named", ["new", "own"])
async def test_a_start_uses_those_secrets_of_a_changed_entry_that_the_record_names(
    tmp_path: Path, named: str
) -> None:
    """A controller may be killed after it stored new secrets, and before the record."""
    node = Node(tmp_path)
    await node.join()
    both = read(VmSecrets, secrets("secret-new")).model_copy(
        update={"replaced": secrets("secret-own")}
    )
    await node.bus.put(subjects.vm_secret(NODE, A), encode(both))
    seeded = {"volumes": [{"name": "ci", "cloud_init_no_cloud": {}}]}
    digest = hashlib.sha256(secrets(f"secret-{named}")).hexdigest()
    await node.put(record(spec=seeded, sec_digest=digest))
    async with node.agent():
        await eventually(in_state(node, "Running"))
        seed = (node.files.vms / A / "seed-ci.iso").read_bytes()
        assert [word for word in ("new", "own") if f"secret-{word}".encode() in seed] == [named]


async def test_each_start_writes_the_seed_again_and_a_stop_does_not(tmp_path: Path) -> None:
    node = Node(tmp_path)
    await node.join()
    made = record(spec={"volumes": [{"name": "ci", "cloud_init_no_cloud": {}}]})
    async with node.agent():
        await node.put(made)
        await eventually(in_state(node, "Running"))
        seed = node.files.vms / A / "seed-ci.iso"
        whole = seed.read_bytes()
        seed.write_bytes(b"old")
        await node.put(made.model_copy(update={"powered": False, "power_epoch": 2}))
        await eventually(in_state(node, "Stopped"))
        assert seed.read_bytes() == b"old"
        await node.put(made.model_copy(update={"power_epoch": 3}))
        await eventually(in_state(node, "Running"))
        assert len(seed.read_bytes()) == len(whole)
