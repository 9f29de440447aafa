"""`vm clone` against a scripted controller."""

from typing import Any

import pytest
from cli.tests.fakes import Cli, Script, vm_view
from cli.tests.test_operation_verbs import view as operation_view
from cli.tests.test_snapshot_verbs import view as snapshot_view
from cli.tests.test_volume_verbs import view as volume_view

from virtbus.bus.client.ports import Request
from virtbus.schemas.api import VmCreate, VmCreated
from virtbus.schemas.vm import EmptyDisk, ImageVolume, VmSpec, Volume
from virtbus.schemas.volume import VolumeState
from virtbus.schemas.volume_api import VolumeView
from virtbus.schemas.volume_ref import NamedVolume

pytestmark = pytest.mark.integration

SOURCE = vm_view(
    spec=VmSpec(
        volumes=(
            Volume(name="root", image=ImageVolume(ref="tiny")),
            Volume(name="scratch", empty_disk=EmptyDisk(capacity=1024**3)),
        )
    )
)


def answers(script: Script, source: Any = SOURCE) -> None:
    async def create(request: Request) -> VmCreated:
        wanted = VmCreate.model_validate(request.data)
        return VmCreated(vm=vm_view(name=wanted.name, spec=wanted.spec), created=True)

    script.answer("vm", "get", source)
    script.answer("snapshot", "create", snapshot_view(name="clone-web2"))
    script.answer("operation", "get", operation_view(kind="snapshot", result=None))
    script.answer("snapshot", "get", snapshot_view(name="clone-web2"))
    script.answer("snapshot", "delete", snapshot_view(name="clone-web2"))
    script.handlers["vm", "create"] = create


async def test_a_clone_rests_on_a_snapshot_which_stays(script: Script, cli: Cli) -> None:
    answers(script)
    ended = await cli("vm", "clone", "web", "web2")
    assert ended.code == 0, ended.err
    (asked,) = script.data("vm.create")
    assert (asked["origin"], asked["spec"]["volumes"][0]["image"]) == (
        "clone-web2",
        {"ref": "tiny"},
    )
    assert script.data("snapshot.delete") == []


async def test_a_full_clone_copies_each_disk_and_then_removes_its_snapshot(
    script: Script, cli: Cli
) -> None:
    answers(script)
    left = [VolumeState.FILLING, VolumeState.IN_USE, VolumeState.IN_USE]

    async def get(request: Request) -> VolumeView:
        assert script.data("snapshot.delete") == []
        return volume_view(name=request.data["name"], state=left.pop(0))

    script.handlers["volume", "get"] = get
    ended = await cli("vm", "clone", "web", "web2", "--full")
    assert ended.code == 0, ended.err
    (asked,) = script.data("vm.create")
    assert asked["origin"] == "clone-web2"
    assert [(one["name"], one["volume"]["name"]) for one in asked["spec"]["volumes"]] == [
        ("root", "web2-root"),
        ("scratch", "web2-scratch"),
    ]
    template = asked["spec"]["volumes"][0]["volume"]["template"]
    assert template["source"] == {"snapshot": "clone-web2", "disk": "root"}
    assert template["retention"] == "Delete"
    assert [one["name"] for one in script.data("snapshot.delete")] == ["clone-web2"]
    assert left == []


async def test_a_given_snapshot_stays_and_a_failed_copy_is_an_error(
    script: Script, cli: Cli
) -> None:
    answers(script)
    failed = volume_view(state=VolumeState.FILL_FAILED, message="the disk is full")
    script.answer("volume", "get", failed)
    ended = await cli("vm", "clone", "web", "web2", "--full", "--snapshot", "s1")
    assert (ended.code, "the disk is full" in ended.err) == (1, True)
    assert script.data("snapshot.create") == script.data("snapshot.delete") == []


async def test_only_a_full_clone_copies_the_volumes_of_its_source(script: Script, cli: Cli) -> None:
    held = Volume(name="data", volume=NamedVolume(name="data-1"))
    answers(script, vm_view(spec=VmSpec(volumes=(held,))))
    script.answer("volume", "get", volume_view(state=VolumeState.IN_USE))
    refused = await cli("vm", "clone", "web", "web2")
    assert (refused.code, "--full" in refused.err) == (2, True)
    assert (await cli("vm", "clone", "web", "web2", "--full")).code == 0
    (asked,) = script.data("vm.create")
    assert asked["spec"]["volumes"][0]["volume"]["name"] == "web2-data"
