"""A node's images: known by keys, outside the heartbeat; listed in bounded pages."""

import pytest
from services.controller.tests.fleets import node
from services.controller.tests.test_fleet import hear
from services.controller.tests.test_vm_api import played
from services.controller.tests.virtual import World, settle

from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.image_pages import PAGE_BYTES, merged
from virtbus.controller.core.placement import place
from virtbus.schemas import subjects
from virtbus.schemas.api import NodePage
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.image import MAX_IMAGE_KEYS, ImageFormat, ImageInfo, image_key
from virtbus.schemas.image_api import NodeImage
from virtbus.schemas.model import SCHEMA_VERSION
from virtbus.schemas.node import NodeImages
from virtbus.schemas.node_rpc import HeldImages
from virtbus.schemas.vm import VmSpec
from virtbus.schemas.wire import encode, validate


def told(name: str, *refs: str) -> NodeImages:
    return NodeImages(node=name, keys=tuple(image_key(ref) for ref in refs))


def say(fleet: Fleet, one: NodeImages, key: str = "") -> None:
    fleet.put_images(key or subjects.node_images(one.node), encode(one))


def first(fleet: Fleet, ref: str) -> str:
    wanted = VmSpec.model_validate({"volumes": [{"name": "root", "image": {"ref": ref}}]})
    return place(wanted, fleet.candidates(1.0)).nodes[0]


def test_a_vm_goes_where_its_image_is() -> None:
    fleet, pin = Fleet(), f"sha256:{'7' * 64}"
    for name in ("n1", "n2", "n3"):
        hear(fleet, node(name), 1.0, 0)
    assert first(fleet, "tiny") == "n1"
    say(fleet, told("n2", "tiny", pin))
    say(fleet, told("n3", "https://h/a"))
    assert [first(fleet, ref) for ref in ("tiny", f"x@{pin}", "https://h/a", "other")] == [
        "n2", "n2", "n3", "n1",
    ]  # fmt: skip
    fleet.purge_images(subjects.node_images("n2"))
    assert first(fleet, "tiny") == "n1"


def test_a_node_reports_only_its_own_images_and_a_bounded_number() -> None:
    fleet = Fleet()
    with pytest.raises(VirtbusError):
        say(fleet, told("n2", "tiny"), subjects.node_images("n1"))
    keys = tuple(image_key(str(n)) for n in range(MAX_IMAGE_KEYS + 1))
    assert len(encode(NodeImages(node="n1", keys=keys[:-1]))) < 16 * 1024
    for bad in (keys, ("x" * 16,), ("0" * 17,)):
        body = encode({"schema_version": SCHEMA_VERSION, "node": "n1", "keys": bad})
        with pytest.raises(VirtbusError):
            fleet.put_images(subjects.node_images("n1"), body)


@played()
async def test_image_keys_of_nodes_are_followed_and_invalid_ones_are_ignored(
    made: World,
) -> None:
    async def images() -> dict[str, int]:
        page = validate(NodePage, await made.ask("list", resource="node"))
        return {one.node: one.images for one in page.items}

    for name in ("n1", "n2"):
        await made.hear(node(name))
        await made.host.put(subjects.node_images(name), encode(told(name, "tiny")))
    await made.host.put(subjects.node_images("n2"), b"\xc1garbage")
    await settle()
    assert await images() == {"n1": 1, "n2": 1}
    await made.host.purge(subjects.node_images("n1"), marker_ttl_s=60)
    await settle()
    assert await images() == {"n1": 0, "n2": 1}


# --- image.list --------------------------------------------------------------------------------
def image(number: int, *names: str, more: int = 0) -> ImageInfo:
    return ImageInfo(
        digest=f"sha256:{number:064x}",
        names=names,
        more_names=more,
        format=ImageFormat.RAW,
        size_bytes=1,
        virtual_size_bytes=1,
    )


def test_pages_of_nodes_merge_up_to_the_point_that_all_have_reported() -> None:
    pages = {
        "n1": HeldImages(images=(image(1, "a"), image(2, "b", more=3)), next=image(2).digest),
        "n2": HeldImages(images=(image(1, "c"), image(3))),
    }
    page = merged(pages)
    assert [(i.digest[-1], i.names, i.nodes, i.more_names) for i in page.items] == [
        ("1", ("a", "c"), ("n1", "n2"), 0),
        ("2", ("b",), ("n1",), 3),
    ]
    assert page.continue_ == image(2).digest
    assert merged({"n2": pages["n2"]}).continue_ is None
    assert merged({}).items == ()


def test_a_page_is_bounded_by_bytes_and_the_next_one_continues() -> None:
    every = [image(n, f"https://h/{n}-".ljust(2000, "x")) for n in range(1000)]
    seen: list[NodeImage] = []
    after = ""
    while True:
        left = tuple(one for one in every if one.digest > after)
        page = merged({f"n{n}": HeldImages(images=left) for n in range(3)})
        assert len(encode(page)) < 2 * PAGE_BYTES
        seen += page.items
        if page.continue_ is None:
            break
        after = page.continue_
    assert [one.digest for one in seen] == [one.digest for one in every]
    many = image(1, *(f"{n}".ljust(1000, "x") for n in range(500)))
    (one,) = merged({"n1": HeldImages(images=(many,))}).items
    assert len(one.names) + one.more_names == 500
    assert one.more_names
