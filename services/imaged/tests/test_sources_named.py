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


async def test_a_broken_file_takes_no_other_one_down(make_node: NodeMaker, server: Web) -> None:
    server.files["a"] = server.files["b"] = qcow2_image()
    entry = "[[image]]\nname = '{0}'\nurl = '" + server.base + "/{0}'\n"
    async with make_node() as node:
        (node.names_dir / "10.toml").write_text(entry.format("a"))
        (node.names_dir / "20.toml").write_text("[[image]\n")
        (node.names_dir / "30.toml").write_text(entry.format("b"))
        (node.names_dir / "40.toml").write_bytes(b"\xff")
        (node.names_dir / "50.toml").mkdir()
        (node.names_dir / "60.toml").symlink_to("nowhere")
        os.mkfifo(node.names_dir / "70.toml")
        for name in ("a", "b"):
            await node.images.ensure(parse_image_ref(name))
        error = await refused(node.images, "c")
        assert error.reason == "image_names_invalid"
        assert [one.path for one in error.body.details] == [f"{n}.toml" for n in (20, 40, 50, 60)]


async def test_rules_change_without_a_restart(make_node: NodeMaker, server: Web) -> None:
    one, other = (qcow2_image(), qcow2_image())
    server.files |= {"1": one, "2": other}
    async with make_node() as node:
        for path, data in (("1", one), ("2", other), ("1", one)):
            (node.names_dir / "a.toml").write_text(
                f"[[image]]\nname = 'x'\nurl = '{server.url(path)}'\n"
            )
            assert (await node.images.refresh(parse_image_ref("x"))).digest == digest_of(data)
        (node.names_dir / "a.toml").unlink()
        with pytest.raises(VirtbusError, match="no image is named 'x'"):
            await node.images.refresh(parse_image_ref("x"))


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
