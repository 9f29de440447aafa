"""Volumes against a scripted controller."""

import time
from typing import Any

import pytest
from cli.tests.fakes import UID, Cli, Script, vm_view

from virtbus.bus.client.ports import Request
from virtbus.schemas.api import NodeForgotten, VmCreated
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.volume import VolumeSpec, VolumeState
from virtbus.schemas.volume_api import VolumeCreated, VolumeHolder, VolumePage, VolumeView
from virtbus.schemas.volume_spec import Access, VolumeSource

pytestmark = pytest.mark.integration


def view(**changes: Any) -> VolumeView:
    known: dict[str, Any] = {
        "uid": UID,
        "namespace": "default",
        "name": "data-1",
        "spec": VolumeSpec(size=10 * 1024**3),
        "state": VolumeState.AVAILABLE,
        "generation": 1,
        "revision": 3,
        "created_ns": 1,
    }
    return VolumeView(**(known | changes))


async def test_create_sends_the_spec_and_shows_the_volume(script: Script, cli: Cli) -> None:
    script.answer("volume", "create", VolumeCreated(volume=view(), created=True))
    flags = (
        "--size",
        "10GiB",
        "--from-image",
        "tiny",
        "--node",
        "n1",
        "--protected",
        "--label",
        "a=b",
    )
    ended = await cli("volume", "create", "data-1", *flags)
    assert ended.code == 0, ended.err
    assert ended.out.splitlines()[1].split() == [
        *("default", "data-1", "Available", "10GiB", "-", "-", "-", "empty"),
    ]
    (asked,) = script.data("volume.create")
    assert asked["uid"][14] == "7"
    del asked["uid"]
    assert asked == {
        "name": "data-1",
        "namespace": "default",
        "spec": {"size": "10GiB", "source": {"image": "tiny"}, "protected": True},
        "labels": {"a": "b"},
        "node": "n1",
    }
    assert (await cli("volume", "create", "data-1")).code == 2


async def test_a_shared_volume_is_made_and_shown_with_all_holders(script: Script, cli: Cli) -> None:
    spec = VolumeSpec(size=10 * 1024**3, access=Access.SHARED, protected=True)
    holders = (VolumeHolder(uid=UID, name="web"), VolumeHolder(uid=f"{UID[:-1]}0"))
    held = view(state=VolumeState.IN_USE, node="n1", spec=spec, holder=UID, holders=holders)
    script.answer("volume", "create", VolumeCreated(volume=held, created=True))
    ended = await cli("volume", "create", "data-1", "--size", "10GiB", "--access", "shared")
    assert script.data("volume.create")[0]["spec"] == {"size": "10GiB", "access": "shared"}
    assert ended.out.splitlines()[1].split()[2:6] == [
        *("InUse,protected,shared", "10GiB", "n1", f"web,{UID[:-1]}0"),
    ]


async def test_a_detach_from_one_vm_waits_for_that_guest_only(script: Script, cli: Cli) -> None:
    holders = (VolumeHolder(uid=UID, name="web", detaching=True),)
    held = view(state=VolumeState.DETACHING, node="n1", holder=UID, holders=holders)
    script.answer("volume", "detach", held)
    script.answer("volume", "get", held)
    assert (await cli("volume", "detach", "data-1", "db")).code == 0
    assert script.data("volume.detach")[0]["vm"] == "db"
    ended = await cli("volume", "detach", "data-1", "web", "--timeout", "0.1")
    assert "is still being detached" in ended.err


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        (VolumeSource(), "empty"),
        (VolumeSource(image="tiny"), "tiny"),
        (VolumeSource(volume="data-0"), "volume/data-0"),
        (VolumeSource(vm="web"), "vm/web"),
        (VolumeSource(snapshot="before"), "snapshot/before"),
        (VolumeSource(backup=UID, disk="root"), f"backup/{UID}"),
    ],
)
async def test_get_shows_the_source(
    script: Script, cli: Cli, source: VolumeSource, shown: str
) -> None:
    script.answer("volume", "get", view(spec=VolumeSpec(size=10 * 1024**3, source=source)))
    ended = await cli("volume", "get", "data-1")
    assert ended.out.splitlines()[1].split()[-1] == shown


async def test_list_and_get_show_holders(script: Script, cli: Cli) -> None:
    since_ns = time.time_ns() - 7200 * 10**9
    holder = {"holder": UID, "holder_name": "web", "held_since_ns": since_ns}
    held = view(state=VolumeState.IN_USE, node="n1", **holder)
    script.answer("volume", "list", VolumePage(items=(held,)))
    script.answer("volume", "get", held)
    for arguments in (("list", "-n", "shop"), ("get", "data-1")):
        ended = await cli("volume", *arguments)
        assert ended.out.splitlines()[1].split()[2:7] == ["InUse", "10GiB", "n1", "web", "2h"]
    assert script.data("volume.list")[0]["namespace"] == "shop"
    assert (await cli("volume", "list", "-o", "json")).json["items"][0]["name"] == "data-1"


async def test_update_sends_only_what_was_given(script: Script, cli: Cli) -> None:
    script.answer("volume", "update", view())
    ended = await cli("volume", "update", "data-1", "--size", "20GiB", "--no-protected")
    assert ended.code == 0, ended.err
    assert script.data("volume.update") == [
        {"name": "data-1", "namespace": "default", "size": "20GiB", "protected": False}
    ]
    nothing = await cli("volume", "update", "data-1")
    assert (nothing.code, "nothing to change" in nothing.err) == (2, True)


async def test_delete_waits_until_the_volume_is_gone(script: Script, cli: Cli) -> None:
    script.answer("volume", "delete", view(state=VolumeState.DELETING, deleting=True))
    times = 0

    async def get(_: Request) -> VolumeView:
        nonlocal times
        times += 1
        if times < 3:
            return view(state=VolumeState.DELETING, message="n1 does not answer")
        raise VirtbusError(Code.NOT_FOUND, "volume_not_found", "there is no volume data-1")

    script.handlers["volume", "get"] = get
    ended = await cli("volume", "delete", "data-1")
    assert (ended.code, ended.out.strip(), times) == (0, "data-1 deleted", 3)
    assert (await cli("volume", "delete", "data-1", "--no-wait")).out.strip() == "data-1 deleting"
    times = -1000
    late = await cli("volume", "delete", "data-1", "--timeout", "0.1")
    assert (late.code, "n1 does not answer" in late.err) == (4, True)


async def test_a_refused_delete_shows_the_holder(script: Script, cli: Cli) -> None:
    error = VirtbusError(Code.CONFLICT, "volume_in_use", f"VM {UID} holds data-1")
    script.answer("volume", "delete", error)
    ended = await cli("volume", "delete", "data-1")
    assert (ended.code, UID in ended.err) == (1, True)


async def test_vm_create_names_volumes(script: Script, cli: Cli) -> None:
    script.answer("vm", "create", VmCreated(vm=vm_view(), created=True))
    ended = await cli(
        *("vm", "create", "web", "--image", "tiny", "--volume", "data-1", "--volume", "logs=log")
    )
    assert ended.code == 0, ended.err
    (asked,) = script.data("vm.create")
    assert asked["spec"]["volumes"] == [
        {"name": "data-1", "volume": {"name": "data-1"}},
        {"name": "log", "volume": {"name": "logs"}},
    ]
    assert (await cli("vm", "create", "web", "--image", "tiny", "--volume", "a=")).code == 2


async def test_forget_names_the_volumes_that_are_lost(script: Script, cli: Cli) -> None:
    script.answer("node", "forget", NodeForgotten(node="n1", lost_volumes=1))
    ended = await cli("node", "forget", "n1", "--lose-volume", "default/data-1")
    assert ended.code == 0, ended.err
    assert script.data("node.forget") == [{"node": "n1", "lose_volumes": ["default/data-1"]}]


async def test_attach_and_detach_name_the_vm(script: Script, cli: Cli) -> None:
    held = view(state=VolumeState.IN_USE, node="n1", holder=UID, holder_name="web")
    script.answer("volume", "attach", held)
    script.answer("volume", "detach", view(state=VolumeState.BOUND, node="n1"))
    ended = await cli("volume", "attach", "data-1", "web", "--disk", "logs", "--bus", "scsi")
    assert (ended.code, "web" in ended.out) == (0, True), ended.err
    assert (await cli("volume", "detach", "data-1")).code == 0
    asked = {"name": "data-1", "namespace": "default"}
    assert script.data("volume.attach") == [{**asked, "vm": "web", "disk": "logs", "bus": "scsi"}]
    assert script.data("volume.detach") == [asked]


async def test_a_move_waits_for_its_end_and_shows_a_failure(script: Script, cli: Cli) -> None:
    moving = view(state=VolumeState.MOVING, node="n1", moving_to="n2", message="moving to n2: x")
    left = [moving, view(state=VolumeState.BOUND, node="n2")]

    async def get(_: Request) -> VolumeView:
        return left.pop(0)

    script.answer("volume", "move", moving)
    script.handlers["volume", "get"] = get
    ended = await cli("volume", "move", "data-1", "--node", "n2")
    assert ended.code == 0, ended.err
    assert "moving to n2: x" in ended.err
    assert script.data("volume.move") == [{"name": "data-1", "namespace": "default", "node": "n2"}]
    left.append(view(state=VolumeState.BOUND, node="n1", message="the move to n2 failed: full"))
    ended = await cli("volume", "move", "data-1", "--node", "n2")
    assert (ended.code, "failed: full" in ended.err) == (1, True)
    assert (await cli("volume", "move", "data-1", "--node", "n2", "--no-wait")).code == 0


async def test_a_move_names_a_node_or_a_pool(script: Script, cli: Cli) -> None:
    there = view(state=VolumeState.BOUND, node="n1")
    fast = there.model_copy(update={"spec": there.spec.model_copy(update={"pool": "fast"})})
    script.answer("volume", "move", fast)
    assert (await cli("volume", "move", "data-1", "--pool", "fast")).code == 0
    assert script.data("volume.move")[-1] == {
        "name": "data-1",
        "namespace": "default",
        "pool": "fast",
    }
    script.answer("volume", "move", there)
    ended = await cli("volume", "move", "data-1", "--pool", "fast")
    assert (ended.code, "in the pool local" in ended.err) == (1, True)
    ended = await cli("volume", "move", "data-1")
    assert (ended.code, "--pool" in ended.err) == (2, True)


async def test_a_copy_is_made_beside_its_source_and_then_moved(script: Script, cli: Cli) -> None:
    made = view(name="copy", state=VolumeState.BOUND, node="n1")
    script.answer("volume", "create", VolumeCreated(volume=made, created=True))
    script.answer("volume", "move", view(name="copy", state=VolumeState.BOUND, node="n2"))
    for flags, moves in (((), 0), (("--node", "n1"), 0), (("--node", "n2"), 1)):
        ended = await cli("volume", "copy", "data-1", "copy", *flags)
        assert ended.code == 0, ended.err
        assert len(script.data("volume.move")) == moves
    asked = script.data("volume.create")[-1]
    assert (asked["name"], asked["spec"]["source"]) == ("copy", {"volume": "data-1"})


async def test_a_copy_is_made_in_its_pool_or_moved_to_that_of_its_node(
    script: Script, cli: Cli
) -> None:
    made = view(name="copy", state=VolumeState.BOUND, node="n1")
    fast = made.model_copy(update={"spec": made.spec.model_copy(update={"pool": "fast"})})
    script.answer("volume", "create", VolumeCreated(volume=fast, created=True))
    ended = await cli("volume", "copy", "data-1", "copy", "--pool", "fast")
    assert ended.code == 0, ended.err
    assert script.data("volume.create")[-1]["spec"]["pool"] == "fast"
    assert script.data("volume.move") == []
    script.answer("volume", "create", VolumeCreated(volume=made, created=True))
    script.answer("volume", "move", fast.model_copy(update={"node": "n2"}))
    ended = await cli("volume", "copy", "data-1", "copy", "--pool", "fast", "--node", "n2")
    assert ended.code == 0, ended.err
    assert "pool" not in script.data("volume.create")[-1]["spec"]
    asked = {"name": "copy", "namespace": "default", "node": "n2", "pool": "fast"}
    assert script.data("volume.move") == [asked]
