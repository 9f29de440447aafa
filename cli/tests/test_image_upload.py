"""`virtbus image upload` against a scripted imaged."""

import hashlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from cli.tests.fakes import Cli, Script
from cli.tests.test_fleet_verbs import IMAGE, node

from virtbus.bus.client.ports import Endpoint, Request, ServiceInfo
from virtbus.schemas.api import NodePage
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.image import ImageInfo
from virtbus.schemas.image_upload import PIECE_BYTES, UploadedImage, UploadImage
from virtbus.schemas.subjects import rpc
from virtbus.schemas.version import VERSION
from virtbus.schemas.wire import validate

pytestmark = pytest.mark.integration

DATA = bytes(range(256)) * 2048
"""Four pieces."""


@dataclass
class FakeImaged:
    """Stores the pieces; forgets all but the first one, once, at the bytes `dies_at`."""

    stored: bytearray = field(default_factory=bytearray)
    dies_at: int = 0
    refusal: VirtbusError | None = None
    asked: list[UploadImage] = field(default_factory=list)

    async def upload(self, request: Request) -> UploadedImage:
        want = validate(UploadImage, request.data)
        self.asked.append(want)
        if self.refusal is not None:
            raise self.refusal
        if want.at == len(self.stored):
            self.stored += want.data
        if self.dies_at and len(self.stored) >= self.dies_at:
            self.dies_at = 0
            del self.stored[PIECE_BYTES:]
        done = len(self.stored) == want.size_bytes and not want.data
        image = ImageInfo(**IMAGE) if done else None
        return UploadedImage(offset_bytes=len(self.stored), window_bytes=2**18, image=image)


@pytest.fixture
async def imaged(script: Script) -> AsyncIterator[FakeImaged]:
    fake = FakeImaged()
    script.answer("node", "list", NodePage(items=(node(labels={"zone": "a"}),)))
    endpoint = Endpoint("upload", rpc("n1", "imaged", "upload"), fake.upload)
    async with script.node.serve(ServiceInfo("imaged", VERSION, "fake"), [endpoint]):
        yield fake


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "disk.qcow2"
    path.write_bytes(DATA)
    return path


async def test_a_file_is_sent_whole_although_imaged_loses_bytes(
    cli: Cli, imaged: FakeImaged, file: Path
) -> None:
    imaged.dies_at = 3 * PIECE_BYTES
    ended = await cli("image", "upload", str(file), "--name", "mine/1", "-o", "json")
    assert ended.code == 0, ended.err
    assert bytes(imaged.stored) == DATA
    digest = f"sha256:{hashlib.sha256(DATA).hexdigest()}"
    assert {(one.name, one.digest, one.size_bytes) for one in imaged.asked} == {
        ("mine/1", digest, len(DATA))
    }
    assert ended.json["digest"] == digest
    assert ended.json["images"]["n1"]["format"] == "qcow2"


async def test_a_resumed_upload_sends_only_what_is_missing(
    cli: Cli, imaged: FakeImaged, file: Path
) -> None:
    imaged.stored += DATA[: 2 * PIECE_BYTES]
    ended = await cli("image", "upload", str(file), "--name", "mine/1", "--label", "zone=a")
    assert ended.code == 0, ended.err
    assert min(one.at for one in imaged.asked if one.data) == 2 * PIECE_BYTES
    assert "100 %" in ended.err
    assert "qcow2" in ended.out


async def test_a_node_that_refuses_is_named(cli: Cli, imaged: FakeImaged, file: Path) -> None:
    imaged.refusal = VirtbusError(Code.CONFLICT, "image_name_taken", "the name is taken")
    ended = await cli("image", "upload", str(file), "--name", "mine/1", "--node", "n1")
    assert ended.code == 1
    assert "  n1: the name is taken" in ended.err


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("--name", "https://x"), 2),
        (("--name", "a@sha256:0"), 2),
        (("--name", "x", "--node", "n1", "--label", "a=b"), 2),
        (("--name", "x", "--node", "n9"), 3),
        (("--name", "x", "--label", "zone=b"), 1),
    ],
)
async def test_a_request_that_cannot_be_sent_reads_no_file(
    cli: Cli, imaged: FakeImaged, file: Path, words: tuple[str, ...], code: int
) -> None:
    ended = await cli("image", "upload", str(file), *words)
    assert ended.code == code, ended.err
    assert imaged.asked == []


async def test_a_file_without_content_is_refused(
    cli: Cli, imaged: FakeImaged, tmp_path: Path
) -> None:
    (tmp_path / "empty").touch()
    for path in (tmp_path / "empty", tmp_path / "nothing", Path("/dev/null")):
        assert (await cli("image", "upload", str(path), "--name", "x")).code == 2
