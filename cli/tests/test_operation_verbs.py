"""Exports and operations against a scripted controller and agent."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
from cli.tests.fakes import UID, Cli, Script

from virtbus.bus.client.ports import Endpoint, Request, ServiceInfo
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.export_link import ExportLink, ExportLinkAsk
from virtbus.schemas.operation import ExportResult, OperationPhase
from virtbus.schemas.operation_api import OperationPage, OperationView
from virtbus.schemas.subjects import rpc
from virtbus.schemas.wire import validate

pytestmark = pytest.mark.integration

CONTENT = b"x" * 100_000
DIGEST = f"sha256:{hashlib.sha256(CONTENT).hexdigest()}"
ID = "0192f0c1-2d3e-7abc-8def-ba9876543210"


def view(phase: OperationPhase = OperationPhase.SUCCEEDED, **changes: Any) -> OperationView:
    result = ExportResult(path="/state/x", size_bytes=len(CONTENT), digest=DIGEST)
    known: dict[str, Any] = {
        "id": ID,
        "namespace": "default",
        "kind": "export",
        "resource": "vm",
        "name": "web",
        "uid": UID,
        "node": "n1",
        "disk": "root",
        "phase": phase,
        "result": result if phase is OperationPhase.SUCCEEDED else None,
        "created_ns": 1,
    }
    return OperationView(**(known | changes))


async def test_an_export_is_accepted_and_continues_without_the_command(
    script: Script, cli: Cli
) -> None:
    script.answer("operation", "export", view(OperationPhase.ACCEPTED))
    ended = await cli("vm", "export", "web", "--disk", "root", "--format", "raw", "--id", ID)
    assert ended.code == 0, ended.err
    assert ended.out.splitlines()[1].split()[:6] == [
        *(ID, "export", "default", "vm/web:root", "n1", "Accepted")
    ]
    (asked,) = script.data("operation.export")
    assert asked == {
        "vm": "web", "disk": "root", "format": "raw", "id": ID, "namespace": "default"
    }  # fmt: skip
    assert (await cli("vm", "export", "web", "--format", "vmdk")).code == 2


async def test_a_wait_shows_the_path_or_the_failure(script: Script, cli: Cli) -> None:
    left = [view(OperationPhase.RUNNING, done_bytes=1, total_bytes=4), view()]

    async def get(_: Request) -> OperationView:
        return left.pop(0)

    script.answer("operation", "export", view(OperationPhase.ACCEPTED))
    script.handlers["operation", "get"] = get
    ended = await cli("volume", "export", "data-1", "--wait")
    assert (ended.code, ended.out.strip()) == (0, "n1: /state/x")
    assert script.data("operation.export")[0]["volume"] == "data-1"
    error = VirtbusError(Code.CONFLICT, "vm_runs", "web runs; stop it").body
    script.answer("operation", "get", view(OperationPhase.FAILED, error=error))
    ended = await cli("operation", "watch", ID, "-o", "json")
    assert ended.code == 1
    assert "web runs; stop it" in ended.err + ended.out


async def test_a_wait_prints_its_reason_once(script: Script, cli: Cli) -> None:
    waits = view(OperationPhase.ACCEPTED, message="web is starting")
    left = [waits, waits, view()]

    async def get(_: Request) -> OperationView:
        return left.pop(0)

    script.handlers["operation", "get"] = get
    ended = await cli("operation", "watch", ID)
    assert (ended.code, ended.err) == (0, "waits: web is starting\n")


async def test_list_get_cancel_and_delete(script: Script, cli: Cli) -> None:
    running = view(OperationPhase.RUNNING, done_bytes=1, total_bytes=4)
    script.answer("operation", "list", OperationPage(items=(running,)))
    for verb in ("get", "cancel", "delete"):
        script.answer("operation", verb, running)
    for arguments in (("list",), ("get", ID), ("cancel", ID)):
        ended = await cli("operation", *arguments)
        assert ended.out.splitlines()[1].split()[5:8] == ["Running", "25", "%"]
    assert (await cli("operation", "delete", ID)).out.strip() == f"{ID} deleted"
    assert (await cli("export", "download", ID)).code == 1


@pytest.mark.parametrize("verb", ["cancel", "delete"])
async def test_an_operation_that_refuses_does_not_hide_the_others(
    script: Script, cli: Cli, verb: str
) -> None:
    async def answer(request: Request) -> OperationView:
        if request.data["id"] == "gone":
            raise VirtbusError(Code.NOT_FOUND, "operation_not_found", "there is no operation gone")
        return view()

    script.handlers["operation", verb] = answer
    ended = await cli("operation", verb, ID, "gone")
    assert (ended.code, ID in ended.out) == (3, True)
    assert "there is no operation gone" in ended.err


async def test_a_download_of_an_agent_that_is_away_leaves_no_file(
    script: Script, cli: Cli, tmp_path: Path
) -> None:
    script.answer("operation", "get", view(node="n9"))
    path = tmp_path / "web.qcow2"
    ended = await cli("export", "download", ID, "-f", str(path))
    assert ended.code == 5
    assert not path.exists()


async def test_a_link_is_printed_alone(script: Script, cli: Cli) -> None:
    asked: list[ExportLinkAsk] = []

    async def make(request: Request) -> ExportLink:
        asked.append(validate(ExportLinkAsk, request.data))
        return ExportLink(url="http://n1/x?token=t", expires_ns=1, size_bytes=9, digest=DIGEST)

    script.answer("operation", "get", view())
    endpoint = Endpoint("link", rpc("n1", "imaged", "export-link"), make)
    async with script.node.serve(ServiceInfo("virtbus-imaged", "0", "fake"), [endpoint]):
        ended = await cli("export", "link", ID, "--expires", "2h")
        assert (ended.code, ended.out.strip()) == (0, "http://n1/x?token=t"), ended.err
        assert DIGEST in ended.err
        assert (await cli("export", "link", ID, "-o", "json")).json["size_bytes"] == 9
        assert (await cli("export", "link", ID, "--expires", "soon")).code == 2
    assert [one.valid_s for one in asked] == [7200, 3600]
    script.answer("operation", "get", view(OperationPhase.RUNNING))
    assert (await cli("export", "link", ID)).code == 1


async def test_a_merge_of_layers_waits_for_its_end(script: Script, cli: Cli) -> None:
    done = view(kind="flatten", disk="", result=None)
    script.answer("operation", "flatten", done)
    for words, of in ((("vm", "flatten", "web"), "vm"), (("volume", "flatten", "web"), "volume")):
        ended = await cli(*words, "--id", ID)
        assert ended.code == 0, ended.err
        assert "Succeeded" in ended.out
        assert script.data("operation.flatten")[-1] == {of: "web", "namespace": "default", "id": ID}
    failed = view(
        OperationPhase.FAILED,
        kind="flatten",
        error=VirtbusError(Code.CONFLICT, "disk_in_use", "web runs").body,
    )
    script.answer("operation", "flatten", failed)
    assert (await cli("vm", "flatten", "web")).code == 1
