"""A simulated node answers every request to a real node's imaged."""

from contextlib import suppress

import pytest

from virtbus.bus.client.memory_bus import MemoryBus, MemoryServer
from virtbus.imaged.service import VERBS
from virtbus.schemas import subjects
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.image_upload import UploadImage
from virtbus.simulator.images import SimulatedImages
from virtbus.simulator.services import SimulatedNode

DEBIAN = "https://images.example/debian.qcow2"
PINNED = f"sha256:{'0' * 64}"


@pytest.mark.parametrize("verb", VERBS)
async def test_every_verb_of_imaged_is_served(verb: str) -> None:
    bus = MemoryBus(MemoryServer(), "client")
    async with SimulatedNode(bus, "n1").serve():
        with suppress(VirtbusError):  # the request has no content; without a server: BusError
            await bus.request(subjects.rpc("n1", "imaged", verb), {}, timeout_s=1)


def test_a_pulled_image_is_listed_until_it_is_deleted() -> None:
    images = SimulatedImages()
    tiny, debian = images.pull("tiny"), images.pull(f"{DEBIAN}@{PINNED}")
    assert debian.digest == PINNED
    assert {image.names for image in images.list()} == {("tiny",), (DEBIAN,)}
    assert images.forget(tiny.digest).names == ("tiny",)
    assert images.forget(DEBIAN).names == (DEBIAN,)
    assert images.list() == ()
    with pytest.raises(VirtbusError) as refused:
        images.forget("tiny")
    assert refused.value.code == Code.NOT_FOUND


def test_an_uploaded_image_is_listed_under_its_name() -> None:
    images = SimulatedImages()
    first = UploadImage(name="mine", digest=PINNED, size_bytes=8, data=b"half")
    assert images.upload(first).image is None
    done = images.upload(first.model_copy(update={"at": 4}))
    assert done.image is not None
    assert (done.image.digest, done.image.names) == (PINNED, ("mine",))


def test_an_invalid_image_reference_is_refused() -> None:
    with pytest.raises(VirtbusError) as refused:
        SimulatedImages().pull("ftp://x")
    assert refused.value.code == Code.INVALID
