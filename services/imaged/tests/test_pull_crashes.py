"""imaged dies at each write of a pull: no partial image is seen, and the next pull completes it."""

import gzip
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from services.imaged.tests.site_under_test import Node, NodeMaker, Web, qcow2_image
from services.imaged.tests.test_upload_crashes import MOST, Death, dying

from virtbus.imaged.edge import qemu_img
from virtbus.schemas.image import parse_image_ref

KIB = 1024
IMAGE = qcow2_image(payload=64 * KIB)
CONVERTED = qcow2_image(payload=96 * KIB)
OTHER = qcow2_image(payload=32 * KIB)


def unclean() -> bytes:
    """The image with the mark of a file that was not closed, which needs a conversion."""
    data = bytearray(IMAGE)
    data[7] = 3  # the version that has such marks
    data[79] |= 1
    return bytes(data)


async def convert(
    files: qemu_img.Files,
    limits: tuple[int, int],
    arguments: tuple[str, ...],
    look: Callable[[], Awaitable[None]],
    command: tuple[str, ...] = (),
) -> qemu_img.Ended:
    """Write CONVERTED in two pieces, as qemu-img does."""
    del limits, arguments, command
    half = len(CONVERTED) // 2
    os.pwrite(files.target, CONVERTED[:half], 0)
    await look()
    os.pwrite(files.target, CONVERTED[half:], half)
    return qemu_img.Ended(0, "")


SOURCES: dict[str, tuple[bytes, bytes]] = {
    "plain": (IMAGE, IMAGE),
    "compressed": (gzip.compress(IMAGE), IMAGE),
    "converted": (unclean(), CONVERTED),
    "compressed and converted": (gzip.compress(unclean()), CONVERTED),
}
"""The bytes of a server, and those of the image."""


@pytest.mark.parametrize(("sent", "image"), SOURCES.values(), ids=SOURCES)
async def test_a_crash_at_any_write_leaves_no_image_or_a_complete_one(
    make_node: NodeMaker,
    server: Web,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sent: bytes,
    image: bytes,
) -> None:
    monkeypatch.setattr(qemu_img, "convert", convert)
    server.files["a"] = sent
    source = parse_image_ref(server.url("a"))
    for last in range(MOST):
        state, death = tmp_path / f"state-{last}", Death(last)
        async with make_node(state=state) as node:
            with dying(death):
                await node.images.ensure(source)
        async with make_node(state=state) as node:
            _nothing_partial(node, image, last)
            found = await node.images.ensure(source)
            assert node.store.path(found.digest).read_bytes() == image
            assert (len(node.data()), node.parts()) == (1, []), f"left after {last} writes"
        async with make_node(state=state) as node:
            assert node.images.cached(source) == found
        if death.left >= 0:
            return  # it wrote no more than that
    pytest.fail(f"more than {MOST} writes")


async def test_a_delete_after_a_restart_frees_the_image(
    make_node: NodeMaker, server: Web, tmp_path: Path
) -> None:
    server.files["a"] = IMAGE
    async with make_node(state=tmp_path) as node:
        await node.images.ensure(parse_image_ref(server.url("a")))
    async with make_node(state=tmp_path) as node:
        freed, _, _ = await node.images.forget(server.url("a"), node.disks.forget_images)
        assert (freed, node.data()) == (len(IMAGE), [])


async def test_a_crash_at_any_write_of_a_delete_leaves_an_image_with_its_name_or_nothing(
    make_node: NodeMaker, server: Web, tmp_path: Path
) -> None:
    server.files |= {"a": IMAGE, "other": OTHER}
    source, url = parse_image_ref(server.url("a")), server.url("a")
    for last in range(MOST):
        state, death = tmp_path / f"state-{last}", Death(last)
        async with make_node(state=state) as node:
            await node.images.ensure(source)
            await node.images.ensure(parse_image_ref(server.url("other")))
            with dying(death):
                await node.images.forget(url, node.disks.forget_images)
        async with make_node(state=state) as node:
            left = node.data(), [*(state / "images/links").iterdir()]
            assert (len(left[0]), len(left[1])) in {(1, 1), (2, 2)}, f"{left} after {last} writes"
            assert (node.images.cached(source) is not None) == (len(left[0]) == 2)
        if death.left >= 0:
            return
    pytest.fail(f"more than {MOST} writes")


async def test_a_disk_made_while_a_delete_searches_for_users_keeps_its_image(
    make_node: NodeMaker, server: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.files["a"] = IMAGE
    async with make_node() as node:
        image = await node.images.ensure(parse_image_ref(server.url("a")))
        search = node.disks.users.used

        def used() -> dict[str, set[str]]:
            found = search()
            node.store.cached(image.digest)  # a disk is made from it, after its folder was read
            return found

        monkeypatch.setattr(node.disks.users, "used", used)
        freed, _, _ = await node.images.forget(server.url("a"), node.disks.forget_images)
        assert (freed, len(node.data())) == (0, 1)


async def test_names_stay_while_the_folder_of_images_is_not_mounted(
    make_node: NodeMaker, server: Web, tmp_path: Path
) -> None:
    server.files["a"] = IMAGE
    source, data = parse_image_ref(server.url("a")), tmp_path / "images/data"
    async with make_node(state=tmp_path) as node:
        await node.images.ensure(source)
    data.rename(tmp_path / "away")
    data.mkdir()
    async with make_node(state=tmp_path) as node:
        assert node.images.cached(source) is None
    data.rmdir()
    (tmp_path / "away").rename(data)
    async with make_node(state=tmp_path) as node:
        assert node.images.cached(source) is not None


def _nothing_partial(node: Node, image: bytes, last: int) -> None:
    for path in (node.state / "images/data").iterdir():
        assert path.read_bytes() == image, f"partial after {last} writes"
