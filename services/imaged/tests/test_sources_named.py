"""Image sources other than URLs: names, allowed roots, the store itself (IMG-16, IMG-17)."""

import hashlib
import os
from pathlib import Path

import pytest
from services.imaged.tests.site_under_test import (
    NodeMaker,
    Web,
    qcow2_image,
)

from virtbus.imaged.images import Images
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.image import parse_image_ref


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


async def refused(images: Images, ref: str) -> VirtbusError:
    with pytest.raises(VirtbusError) as caught:
        await images.ensure(parse_image_ref(ref))
    return caught.value


async def test_names_are_translated_and_unknown_ones_get_a_hint(
    make_node: NodeMaker, server: Web
) -> None:
    server.files["debian-12.qcow2"] = qcow2_image()
    async with make_node() as node:
        (node.names_dir / "10-site.toml").write_text(
            f'[[image]]\nname = "debian/12"\nurl = "{server.url("debian-12.qcow2")}"\n'
        )
        await node.images.ensure(parse_image_ref("debian/12"))
        error = await refused(node.images, "debian/13")
        assert error.reason == "image_unknown"
        assert "debian/12" in str(error)


async def test_a_broken_names_file_is_named(make_node: NodeMaker) -> None:
    async with make_node() as node:
        (node.names_dir / "x.toml").write_text("[[image]\n")
        error = await refused(node.images, "tiny")
        assert error.reason == "image_names_invalid"
        assert "x.toml" in str(error)


@pytest.mark.parametrize("name", ["tiny", "debian"])
async def test_our_own_guests_come_from_the_allowed_root(make_node: NodeMaker, name: str) -> None:
    async with make_node() as node:
        assert (await refused(node.images, name)).reason == "image_not_found"
        data = qcow2_image()
        (node.source_dir / f"{name}.qcow2").write_bytes(data)
        assert (await node.images.ensure(parse_image_ref(name))).digest == digest_of(data)
        assert (await node.images.refresh(parse_image_ref(name))).digest == digest_of(data)
        newer = qcow2_image()
        (node.source_dir / f"{name}.qcow2").write_bytes(newer)
        assert (await node.images.refresh(parse_image_ref(name))).digest == digest_of(newer)


async def test_files_outside_the_roots_or_behind_links_are_refused(
    make_node: NodeMaker, tmp_path: Path
) -> None:
    async with make_node() as node:
        root = node.source_dir
        (tmp_path / "secret").write_bytes(qcow2_image())
        (root / "link").symlink_to(tmp_path / "secret")
        (root / "dir").symlink_to(tmp_path)
        os.mkfifo(root / "fifo")
        for path, reason in [
            (f"{tmp_path}/secret", "file_not_allowed"),
            (f"{root}/../secret", "file_not_allowed"),
            (f"{root}/%2e%2e/secret", "file_not_allowed"),
            (f"{root}/link", "file_not_allowed"),
            (f"{root}/dir/secret", "file_not_allowed"),
            (f"{root}/fifo", "file_not_regular"),
            (f"{root}", "file_not_allowed"),
            (f"{root}/absent", "image_not_found"),
        ]:
            assert (await refused(node.images, f"file://{path}")).reason == reason, path
        assert (await refused(node.images, f"file://host{root}/x")).reason == "file_not_allowed"
        assert node.tree() == []


async def test_a_symlink_in_the_store_is_no_image(make_node: NodeMaker, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(qcow2_image())
    async with make_node() as node:
        name = "a" * 64
        (node.state / "images/data" / name).symlink_to(tmp_path / "secret")
        (node.state / "images/links" / name).symlink_to("/etc/passwd")
    async with make_node() as node:
        assert node.store.images() == ()
        assert node.images.cached(parse_image_ref(f"x@sha256:{name}")) is None


async def test_an_image_whose_file_vanished_is_fetched_again(
    make_node: NodeMaker, server: Web
) -> None:
    server.files["a"] = qcow2_image()
    async with make_node() as node:
        source = parse_image_ref(server.url("a"))
        image = await node.images.ensure(source)
        node.store.path(image.digest).unlink()
        assert await node.images.ensure(source) == image
        assert node.store.path(image.digest).exists()


async def test_two_stores_on_one_directory_are_refused(make_node: NodeMaker) -> None:
    async with make_node():
        with pytest.raises(BaseException, match="another virtbus-imaged"):
            async with make_node():
                pass
