"""Creates and copies of volumes against a scripted controller."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cli.tests.fakes import UID, Cli, Script
from cli.tests.test_volume_verbs import view

from virtbus.bus.client.ports import Request
from virtbus.cli import image_nodes, image_upload, volume_create
from virtbus.cli.failures import CliError
from virtbus.cli.invocation import Invocation
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.operation import OperationPhase
from virtbus.schemas.operation_api import OperationView
from virtbus.schemas.volume import VolumeSource, VolumeSpec, VolumeState
from virtbus.schemas.volume_api import VolumeCreated, VolumeView

pytestmark = pytest.mark.integration
ID = "0192f0c1-2d3e-7abc-8def-000000000090"


def filling(**changes: Any) -> VolumeView:
    spec = VolumeSpec(size=0, source=VolumeSource(volume="data-1"))
    known = {"spec": spec, "state": VolumeState.FILLING, "node": "n1", "fill_operation": ID}
    return view(name="data-2", **(known | changes))


def operation() -> OperationView:
    return OperationView(
        id=ID,
        kind="fill",
        namespace="default",
        resource="volume",
        name="data-2",
        uid=UID,
        node="n1",
        phase=OperationPhase.RUNNING,
        step="copy",
        done_bytes=1,
        total_bytes=4,
        created_ns=1,
    )


@pytest.mark.parametrize(
    ("flags", "source"),
    [
        (("--from-image", "tiny", "--full"), {"image": "tiny", "full": True}),
        (("--from-url", "https://a.example/x"), {"image": "https://a.example/x", "full": True}),
        (
            ("--from-container-disk", "quay.io/x/fedora:40"),
            {"image": "docker://quay.io/x/fedora:40", "full": True},
        ),
        (("--from-container-disk", "docker://q.io/x"), {"image": "docker://q.io/x", "full": True}),
        (("--from-volume", "data-1"), {"volume": "data-1"}),
        (("--from-vm", "web:root"), {"vm": "web", "disk": "root"}),
    ],
)
async def test_a_copy_needs_no_size(
    script: Script, cli: Cli, flags: tuple[str, ...], source: dict[str, Any]
) -> None:
    script.answer("volume", "create", VolumeCreated(volume=filling(), created=True))
    ended = await cli("volume", "create", "data-2", *flags, "--no-wait")
    assert (ended.code, f"operation watch {ID}" in ended.err) == (0, True), ended.err
    assert ended.out.splitlines()[1].split()[2:] == [
        *("Filling", "-", "n1", "-", "-", "volume/data-1"),
    ]
    assert script.data("volume.create")[0]["spec"] == {"size": 0, "source": source}


async def test_sources_exclude_each_other_and_others_need_a_size(script: Script, cli: Cli) -> None:
    for flags in (
        (),
        ("--from-image", "tiny"),
        ("--from-image", "tiny", "--from-volume", "data-1"),
        ("--size", "1GiB", "--full"),
        ("--from-file", "x", "--no-wait"),
    ):
        assert (await cli("volume", "create", "data-2", *flags)).code == 2, flags
    assert script.data("volume.create") == []


async def test_a_create_waits_for_its_copy(script: Script, cli: Cli) -> None:
    script.answer("volume", "create", VolumeCreated(volume=filling(), created=True))
    times = 0

    async def get(_: Request) -> VolumeView:
        nonlocal times
        times += 1
        done = {"state": VolumeState.BOUND, "fill_operation": ""}
        return filling() if times < 3 else filling(**done)

    async def ask(_: Request) -> OperationView:
        if not times:  # the leader has not written it yet
            raise VirtbusError(Code.NOT_FOUND, "operation_not_found", "there is none")
        return operation()

    script.handlers["volume", "get"] = get
    script.handlers["operation", "get"] = ask
    ended = await cli("volume", "create", "data-2", "--from-volume", "data-1")
    assert (ended.code, times) == (0, 3), ended.err
    assert ended.out.splitlines()[1].split()[2] == "Bound"


async def test_a_failed_copy_shows_the_cause_and_is_repeated(script: Script, cli: Cli) -> None:
    failed = filling(state=VolumeState.FILL_FAILED, message="n1 is full; `virtbus volume fill`")
    script.answer("volume", "fill", filling())
    script.answer("volume", "get", failed)
    script.answer("operation", "get", operation())
    ended = await cli("volume", "fill", "data-2")
    assert (ended.code, "n1 is full" in ended.err) == (1, True)
    assert script.data("volume.fill") == [{"name": "data-2", "namespace": "default"}]
    script.answer("volume", "fill", failed)
    assert (await cli("volume", "fill", "data-2", "--no-wait")).code == 0


def test_the_image_of_a_failed_copy_of_a_file_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    image = SimpleNamespace(name="volumes/default/data-2", digest="sha256:0")
    monkeypatch.setattr(image_nodes, "chosen", lambda *_: ["n1"])
    monkeypatch.setattr(image_upload, "uploaded", lambda *_: image)
    invocation = Invocation("json", None, None)
    told: list[str] = []
    made = {"volume": {"name": "data-2", "state": "FillFailed"}, "created": True}
    monkeypatch.setattr(invocation, "call", lambda *_: made)
    monkeypatch.setattr(invocation, "note", told.append)
    wanted: dict[str, Any] = {"namespace": "default", "name": "data-2", "spec": {}}
    with pytest.raises(CliError, match="data-2 has no content"):
        volume_create._make_of_file(invocation, wanted, Path("x"), None)
    assert "stays as the image volumes/default/data-2" in told[0]


async def test_a_file_must_have_content(script: Script, cli: Cli, tmp_path: Path) -> None:
    script.answer("node", "list", {"items": [{"node": "n1", "state": "ready"}]})
    empty = tmp_path / "empty"
    empty.touch()
    ended = await cli("volume", "create", "data-2", "--from-file", str(empty))
    assert (ended.code, "no file with content" in ended.err) == (2, True), ended.err
    assert script.data("volume.create") == []
