"""A VM that only holds its network, and the create that gives it disks: a pod's sandbox."""

import asyncio
import contextlib
import hashlib
from typing import Any

import pytest
from services.controller.tests.fleets import uid
from services.controller.tests.test_owners import Asking
from services.controller.tests.test_vm_api import played
from services.controller.tests.virtual import World

from virtbus.controller.edge.commit import Commits
from virtbus.schemas import subjects
from virtbus.schemas.errors import VirtbusError

HERE = {"run_strategy": "Manual", "node_selector": {"kubernetes.io/hostname": "n1"}}
BARE: dict[str, Any] = HERE | {"network_state": "Held"}
SEED = {"name": "seed", "cloud_init_no_cloud": {"user_data": "canary-1"}}
WHOLE: dict[str, Any] = BARE | {
    "volumes": [{"name": "root", "image": {"ref": "tiny"}}, SEED],
    "domain": {"memory": {"guest": "1Gi"}},
}
OTHER = WHOLE | {
    "volumes": [WHOLE["volumes"][0], SEED | {"cloud_init_no_cloud": {"user_data": "2"}}]
}
POD = {"name": "pod", "uid": uid(1)}


async def stored_secret(made: World) -> str:
    entry = await made.host.get(subjects.vm_secret("n1", uid(1)))
    return hashlib.sha256(entry.value).hexdigest() if entry is not None else ""


@played()
async def test_a_second_create_gives_a_bare_vm_its_disks_and_secrets(made: World) -> None:
    runtime = Asking(made, "CRI-N1")
    bare = (await runtime.ask("create", **POD, spec=BARE, labels={"pod": "web"}))["vm"]
    assert (bare["generation"], bare["spec"].get("volumes", [])) == (1, [])
    assert not bare.get("powered", False)
    asked = POD | {"spec": WHOLE, "labels": {"pod": "web", "attempt": "0"}}
    views = [(await runtime.ask("create", **asked))["vm"] for _repeat in range(2)]
    assert views[0] == views[1], "a repeat changes nothing"
    assert (views[0]["generation"], views[0]["labels"]["attempt"]) == (2, "0")
    record = await made.stored(uid(1))
    assert record is not None
    assert record.created_ns == bare["created_ns"]
    assert [volume.name for volume in record.spec.volumes] == ["root", "seed"]
    assert record.spec.domain.memory.guest == 1024**3
    assert "canary" not in record.model_dump_json()
    assert record.sec_digest == await stored_secret(made)
    other = WHOLE | {"domain": {"memory": {"guest": "2Gi"}}}
    assert await runtime.refused("create", **POD, spec=other) == "uid_taken"
    assert await runtime.refused("create", **POD, spec=BARE) == "uid_taken"
    await runtime.ask("start", uid=uid(1))


@played()
async def test_a_second_create_changes_no_network_no_name_and_no_vm_with_disks(
    made: World,
) -> None:
    runtime = Asking(made, "CRI-N1")
    await runtime.ask("create", **POD, spec=BARE)
    for wrong in (
        POD | {"spec": WHOLE | {"networks": [{"name": "default"}, {"name": "b"}]}},
        POD | {"spec": WHOLE, "name": "other"},
        POD | {"spec": WHOLE, "namespace": "other"},
    ):
        assert await runtime.refused("create", **wrong) == "uid_taken"
    record = await made.stored(uid(1))
    assert record is not None
    assert (record.generation, record.sec_digest, await stored_secret(made)) == (1, None, "")


@played()
async def test_only_the_runtime_of_a_node_gives_disks_by_a_second_create(made: World) -> None:
    await made.ask("create", **POD, spec=BARE)
    for account in ("CLIENT", "BRIDGE", "CRI-N1"):
        with pytest.raises(VirtbusError) as caught:
            await Asking(made, account).ask("create", **POD, spec=WHOLE)
        assert caught.value.reason in {"uid_taken", "not_owner"}


@played()
async def test_one_of_two_creates_with_other_secrets_gives_the_disks(made: World) -> None:
    """The refused one is repeated by its runtime under another uid."""
    runtime = Asking(made, "CRI-N1")
    await runtime.ask("create", **POD, spec=BARE)
    refused: list[str] = []

    async def give(spec: dict[str, Any]) -> None:
        try:
            await runtime.ask("create", **POD, spec=spec)
        except VirtbusError as error:
            refused.append(error.reason)

    async with asyncio.TaskGroup() as group:
        for spec in (WHOLE, OTHER):
            group.create_task(give(spec))
    assert len(refused) == 1
    assert refused[0] in {"contended", "uid_taken"}


@pytest.mark.parametrize("first", [0, 1])
def test_the_disks_come_with_the_secrets_of_the_same_create(first: int) -> None:
    gates: list[asyncio.Event] = []
    replace = Commits.replace

    async def gated(self: Commits, *of: Any) -> Any:
        gates.append(gate := asyncio.Event())
        await gate.wait()
        return await replace(self, *of)

    async def waiting(number: int) -> asyncio.Event:
        while len(gates) <= number:
            await asyncio.sleep(0.01)
        return gates[number]

    async def give(runtime: Asking, spec: dict[str, Any]) -> None:
        with contextlib.suppress(VirtbusError):
            await runtime.ask("create", **POD, spec=spec)

    @played()
    async def scenario(made: World) -> None:
        runtime = Asking(made, "CRI-N1")
        await runtime.ask("create", **POD, spec=BARE)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Commits, "replace", gated)
            async with asyncio.TaskGroup() as group:
                for number, spec in enumerate((WHOLE, OTHER)):
                    group.create_task(give(runtime, spec))
                    await waiting(number)
                gates[first].set()
                await asyncio.sleep(1)
                patched.undo()
                for gate in gates:
                    gate.set()
        record = await made.stored(uid(1))
        assert record is not None
        assert (record.generation, record.sec_digest) == (2, await stored_secret(made))

    scenario()


@played()
async def test_a_vm_without_its_network_cannot_start(made: World) -> None:
    runtime = Asking(made, "CRI-N1")
    await runtime.ask("create", **POD, spec=BARE)
    view = (await runtime.ask("create", **POD, spec=WHOLE))["vm"]

    async def become(state: str) -> None:
        nonlocal view
        spec = view["spec"] | {"network_state": state}
        view = await runtime.ask("update", uid=uid(1), revision=view["revision"], spec=spec)

    await become("Released")
    assert (view["generation"], view["spec"]["network_state"]) == (3, "Released")
    assert await runtime.refused("start", uid=uid(1)) == "network_released"
    await become("Held")
    view = await runtime.ask("start", uid=uid(1))
    with pytest.raises(VirtbusError, match="stop the guest before a release"):
        await become("Released")
