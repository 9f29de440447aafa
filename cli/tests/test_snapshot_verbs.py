"""Snapshots against a scripted controller."""

from typing import Any

import pytest
from cli.tests.fakes import UID, Cli, Script
from cli.tests.test_operation_verbs import view as operation_view

from virtbus.bus.client.ports import Request
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.operation import OperationPhase
from virtbus.schemas.snapshot import SnapshotState
from virtbus.schemas.snapshot_api import SnapshotPage, SnapshotView

pytestmark = pytest.mark.integration

ID = "0192f0c1-2d3e-7abc-8def-ba9876543210"


def view(**changes: Any) -> SnapshotView:
    known: dict[str, Any] = {
        "uid": ID,
        "namespace": "default",
        "name": "web-1",
        "resource": "vm",
        "source": "web",
        "source_uid": UID,
        "state": SnapshotState.READY,
        "node": "n1",
        "size_bytes": 1024**3,
        "generation": 1,
        "revision": 3,
        "created_ns": 1,
    }
    return SnapshotView(**(known | changes))


async def test_a_create_waits_for_its_operation(script: Script, cli: Cli) -> None:
    script.answer("snapshot", "create", view(state=SnapshotState.CREATING))
    script.answer("operation", "get", operation_view(kind="snapshot", result=None))
    left = [view(state=SnapshotState.CREATING), view(protected=True)]

    async def get(_: Request) -> SnapshotView:
        return left.pop(0)

    script.handlers["snapshot", "get"] = get
    ended = await cli("snapshot", "create", "web-1", "--vm", "web", "--protected", "--uid", ID)
    assert ended.code == 0, ended.err
    assert ended.out.splitlines()[1].split()[:6] == [
        *("default", "web-1", "vm/web", "Ready,protected", "1GiB", "n1")
    ]
    (asked,) = script.data("snapshot.create")
    wanted = {"name": "web-1", "namespace": "default", "uid": ID, "vm": "web", "protected": True}
    assert asked == wanted
    for sources in ((), ("--vm", "web", "--volume", "data")):
        assert (await cli("snapshot", "create", "web-1", *sources)).code == 2


async def test_a_restore_shows_what_it_replaced_or_its_failure(script: Script, cli: Cli) -> None:
    kept = view(name="before", replaced_by="web-1")
    script.answer("snapshot", "restore", kept)
    script.answer("snapshot", "get", kept)
    script.answer("operation", "get", operation_view(kind="restore", result=None))
    ended = await cli(
        "snapshot", "restore", "web-1", "--keep", "before", "--to", "web2", "--uid", ID
    )
    assert (ended.code, ended.out.splitlines()[1].split()[1]) == (0, "before")
    (asked,) = script.data("snapshot.restore")
    names = {"name": "web-1", "namespace": "default", "keep": "before", "to": "web2"}
    assert asked == names | {"keep_uid": ID}
    error = VirtbusError(Code.CONFLICT, "disk_in_use", "a guest uses the disk").body
    failed = operation_view(OperationPhase.FAILED, kind="restore", error=error)
    script.answer("operation", "get", failed)
    ended = await cli("snapshot", "restore", "web-1")
    assert (ended.code, "a guest uses the disk" in ended.err) == (1, True)
    ended = await cli("snapshot", "restore", "web-1", "--no-wait")
    assert (ended.code, "operation watch" in ended.err) == (0, True)


async def test_list_update_adopt_and_delete(script: Script, cli: Cli) -> None:
    script.answer("snapshot", "list", SnapshotPage(items=(view(),)))
    for verb in ("update", "adopt", "delete"):
        script.answer("snapshot", verb, view())
    ended = await cli("snapshot", "list", "--vm", "web", "-n", "shop")
    assert "vm/web" in ended.out
    (asked,) = script.data("snapshot.list")
    assert (asked["vm"], asked["namespace"]) == ("web", "shop")
    assert (await cli("snapshot", "update", "web-1", "--no-protected")).code == 0
    assert script.data("snapshot.update")[0]["protected"] is False
    assert (await cli("snapshot", "adopt", "web-1", "--node", "n1")).code == 0
    assert script.data("snapshot.adopt")[0]["node"] == "n1"

    async def gone(_: Request) -> SnapshotView:
        raise VirtbusError(Code.NOT_FOUND, "snapshot_not_found", "there is none")

    script.handlers["snapshot", "get"] = gone
    ended = await cli("snapshot", "delete", "web-1")
    assert (ended.code, ended.out.strip()) == (0, "web-1 deleted")
