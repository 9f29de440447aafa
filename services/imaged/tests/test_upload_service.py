"""Uploads over the bus: the VM that starts from one, and a restart in the middle."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
from services.imaged.tests.records import record, volume
from services.imaged.tests.site_under_test import MIB, qcow2_image
from services.imaged.tests.test_service import Desk, serving

from virtbus.bus.client.memory_bus import MemoryServer
from virtbus.imaged import uploads as module
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.image_upload import PIECE_BYTES, UploadedImage
from virtbus.schemas.node_rpc import Ensure, ForgetImage

IMAGE = qcow2_image(payload=MIB)
DIGEST = f"sha256:{hashlib.sha256(IMAGE).hexdigest()}"


async def ask(desk: Desk, at: int = 0, data: bytes = b"", **changes: Any) -> UploadedImage:
    want = {"name": "golden", "digest": DIGEST, "size_bytes": len(IMAGE), "at": at, "data": data}
    return UploadedImage.model_validate(await desk.ask("upload", want | changes))


async def send(desk: Desk, until: int) -> UploadedImage:
    state = await ask(desk)
    while state.image is None and state.offset_bytes < until:
        at = state.offset_bytes
        state = await ask(desk, at, IMAGE[at : at + PIECE_BYTES])
    return state


async def test_a_vm_starts_from_an_upload_that_a_restart_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STEP_BYTES", 2 * PIECE_BYTES)
    server = MemoryServer()
    async with serving(tmp_path, server) as desk:
        begun = await send(desk, until=len(IMAGE) // 2)
        assert begun.window_bytes >= PIECE_BYTES
        assert (await desk.ask("list", {})) == {}
    async with serving(tmp_path, server) as desk:
        assert (await ask(desk)).offset_bytes == begun.offset_bytes
        await send(desk, until=len(IMAGE))
        done = await ask(desk, at=len(IMAGE))
        assert done.image is not None
        assert done.image.digest == DIGEST
    async with serving(tmp_path, server) as desk:
        made = await desk.ask("ensure", Ensure(record=record(volume("golden"))))
        assert made["disks"]["root"]["digest"] == DIGEST
        gone = await desk.ask("delete", ForgetImage(ref="golden"))
        assert list(gone["names"]) == ["golden"]


@pytest.mark.parametrize(
    "lie",
    [
        {"name": "https://images.example/x"},
        {"name": f"golden@{DIGEST}"},
        {"name": "../x"},
        {"name": "a" * 300},
        {"digest": "sha256:../../x"},
        {"size_bytes": 0},
        {"size_bytes": 2**63 - 1},
        {"at": -1},
        {"at": len(IMAGE), "data": b"x"},
        {"data": bytes(PIECE_BYTES + 1)},
        {"data": "no base64"},
    ],
)
async def test_a_malformed_piece_is_refused_and_begins_nothing(
    tmp_path: Path, lie: dict[str, Any]
) -> None:
    async with serving(tmp_path, MemoryServer()) as desk:
        with pytest.raises(VirtbusError) as caught:
            await ask(desk, **lie)
        assert caught.value.code == 400
        assert list((desk.state / "images/part").iterdir()) == []
