"""A guest boots from an image that was uploaded over the bus, across a kill of imaged."""

import asyncio
import hashlib
import json

import pytest
from tests.e2e.platform import NODE, Platform, tiny_image

from virtbus.imaged.uploads import STEP_BYTES
from virtbus.schemas import subjects
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.image_upload import PIECE_BYTES, UploadedImage, UploadImage

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

IMAGE = "mine/tiny"
UPLOAD = subjects.rpc(NODE, "imaged", "upload")


def _want() -> UploadImage:
    data = tiny_image().read_bytes()
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    return UploadImage(name=IMAGE, digest=digest, size_bytes=len(data))


async def _begin(platform: Platform, want: UploadImage) -> int:
    """Send half of the file as a client that then disappears; return the stored bytes."""
    data = tiny_image().read_bytes()
    at = 0
    async with platform.bus() as bus:
        while at < len(data) // 2:
            piece = {"at": at, "data": data[at : at + PIECE_BYTES]}
            answer = await bus.request(UPLOAD, want.model_copy(update=piece), timeout_s=30)
            at = UploadedImage.model_validate(answer).offset_bytes
    return at


async def _stored(platform: Platform, want: UploadImage) -> int:
    async with platform.bus() as bus, asyncio.timeout(60):
        while True:
            try:
                answer = await bus.request(UPLOAD, want, timeout_s=30)
            except VirtbusError as error:  # it reads its store first
                if error.code != Code.UNAVAILABLE:
                    raise
                await asyncio.sleep(0.2)
            else:
                return UploadedImage.model_validate(answer).offset_bytes


def test_an_upload_survives_a_kill_of_imaged_and_boots_a_guest(patient: Platform) -> None:
    want = _want()
    patient.try_cli("image", "delete", want.digest)  # or nothing would be sent
    sent = asyncio.run(_begin(patient, want))
    patient.wait_back("imaged", patient.kill("imaged"))
    kept = asyncio.run(_stored(patient, want))
    assert sent - STEP_BYTES < kept <= sent
    assert kept >= STEP_BYTES
    text = patient.cli("image", "upload", str(tiny_image()), "--name", IMAGE, "-o", "json")
    assert json.loads(text)["images"][NODE]["digest"] == want.digest
    patient.wait_back("imaged", patient.kill("imaged"))
    view = patient.create("uploaded", "--image", IMAGE)
    assert view["image_digest"] == want.digest
    patient.delete("uploaded")
    patient.cli("image", "delete", IMAGE)
    assert IMAGE not in patient.cli("image", "list")
