"""Image names expire without a use, but never under a VM; reports have a bound."""

import asyncio
import os
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from services.imaged.tests.records import record, uid, volume
from services.imaged.tests.site_under_test import Node, NodeMaker, Web, qcow2_image
from services.imaged.tests.test_service import Desk, serving

from virtbus.bus.client.memory_bus import MemoryServer
from virtbus.imaged.core.expiry import ExpiryLimits, NameUse, expired
from virtbus.imaged.core.links import NameLink, file_name
from virtbus.imaged.core.listing import PAGE_BYTES, keys_of, page_of
from virtbus.schemas.image import MAX_IMAGE_KEYS, ImageFormat, ImageInfo, image_key, parse_image_ref
from virtbus.schemas.node import NodeState, ServiceState
from virtbus.schemas.node_rpc import HeldImages, ListImages, ServiceReport
from virtbus.schemas.wire import encode

DAY_S = 86_400.0
KEEP = ExpiryLimits(14 * DAY_S, 3)
NOW_S = 1_000 * DAY_S


def use(name: str, days: float, *, held: bool = False) -> NameUse:
    return NameUse(f"https://h/{name}", NOW_S - days * DAY_S, held)


def gone(uses: Iterable[NameUse], *wanted: NameUse, keep: ExpiryLimits = KEEP) -> set[str]:
    return set(expired(uses, frozenset(one.name for one in wanted), NOW_S, keep))


# --- rule --------------------------------------------------------------------------------------
def test_a_name_expires_when_unused_for_long_and_no_vm_has_it() -> None:
    old, young, of_a_vm, on_a_disk = use("a", 15), use("b", 13), use("c", 99), use("d", 99)
    plain = NameUse("debian/12", 0.0, held=False)
    uses = [old, young, of_a_vm, on_a_disk._replace(held=True), plain]
    assert gone(uses, of_a_vm, keep=ExpiryLimits(14 * DAY_S, 99)) == {old.name}


def test_the_least_used_names_are_removed_first_and_those_of_vms_stay() -> None:
    uses = [use(str(n), n / 10, held=True) for n in range(6)]
    plain = NameUse("debian/12", 0.0, held=False)
    assert gone(uses) == {use(n, 0).name for n in "543"}
    assert gone(uses, uses[5]) == {use(n, 0).name for n in "432"}
    assert gone([*uses, plain]) == {use(n, 0).name for n in "5432"}
    assert gone(uses, *uses) == set()


def test_a_clock_that_went_back_expires_nothing() -> None:
    assert gone([use("a", -400)]) == set()


@given(
    st.lists(st.builds(NameUse, st.text(max_size=9), st.floats(0, NOW_S), st.booleans())),
    st.frozensets(st.text(max_size=9), max_size=5),
    st.integers(1, 9),
)
def test_the_names_of_vms_never_expire(
    uses: list[NameUse], wanted: frozenset[str], most: int
) -> None:
    uses = list({one.name: one for one in uses}.values())
    went = set(expired(uses, wanted, NOW_S, ExpiryLimits(DAY_S, most)))
    assert not went & wanted
    assert len({one.name for one in uses} - went) <= max(most, len(wanted))


# --- reports -----------------------------------------------------------------------------------
def image(digest: str) -> ImageInfo:
    return ImageInfo(digest=digest, format=ImageFormat.RAW, size_bytes=1, virtual_size_bytes=1)


def link(name: str, digest: str) -> NameLink:
    return NameLink(
        name=name, digest=digest, format=ImageFormat.RAW, size_bytes=1, virtual_size_bytes=1
    )


def stored(count: int, length: int) -> tuple[dict[str, ImageInfo], list[NameLink]]:
    """Make this many images, each with a name of this many bytes."""
    digests = [f"sha256:{n:064x}" for n in range(count)]
    names = [f"https://h/{n}-".ljust(length, "x") for n in range(count)]
    return {d: image(d) for d in digests}, list(map(link, names, digests))


@pytest.mark.parametrize("length", [120, 4000])
def test_telemetry_and_pages_are_bounded_for_any_number_of_names(length: int) -> None:
    images, links = stored(4293, length)
    keys = keys_of(links, {}, frozenset(images))
    state = ServiceState(state=NodeState.READY)
    assert len(encode(ServiceReport(service="imaged", state=state, image_keys=keys))) < 16 * 1024
    seen: list[str] = []
    page = HeldImages()
    while page.next or not seen:
        page = page_of(images, links, page.next)
        assert len(encode(page)) < 2 * PAGE_BYTES
        seen += [name for image in page.images for name in image.names]
    assert sorted(seen) == sorted(link.name for link in links)


def test_an_image_with_very_many_names_is_listed_with_some_of_them() -> None:
    images, links = stored(500, 2000)
    digest = links[7].digest
    links = [link(each.name, digest) for each in links]
    (one,) = page_of({digest: images[digest]}, links, "").images
    assert 0 < len(one.names) < 500
    assert len(one.names) + one.more_names == 500


def test_placement_learns_the_most_recently_used_names() -> None:
    images, links = stored(1000, 40)
    used_s = {link.name: float(n) for n, link in enumerate(links)}
    keys = keys_of(links, used_s, frozenset(images))
    assert len(keys) == MAX_IMAGE_KEYS
    assert {image_key(links[-1].name), image_key(links[-1].digest)} <= set(keys)
    assert image_key(links[0].name) not in keys


# --- on a node ---------------------------------------------------------------------------------
def age(node: Node, ref: str, days: float) -> None:
    """Set a name's last use to that long ago; the next imaged on this state sees it."""
    at_s = time.time() - days * DAY_S
    os.utime(node.state / "images/links" / file_name(ref), (at_s, at_s))


async def test_the_image_of_an_expired_name_is_removed_unless_a_disk_depends_on_it(
    make_node: NodeMaker, server: Web
) -> None:
    refs = {name: server.url(name) for name in ("unused", "of-disk", "of-record")}
    async with make_node() as node:
        for name, ref in refs.items():
            server.files[name] = qcow2_image()
            await node.images.ensure(parse_image_ref(ref))
        made = await node.disks.ensure(record(volume(refs["of-disk"]), uid=uid(2)))
        for ref in refs.values():
            age(node, ref, 20)
    async with make_node() as node:
        wanted = frozenset({refs["of-record"]})
        assert await node.disks.expire_names(wanted, ExpiryLimits(14 * DAY_S, 99)) == (
            refs["unused"],
        )
        assert await node.disks.collect_garbage(60) == (), "its time begins when it is first seen"
        assert len(await node.disks.collect_garbage(0)) == 1
        assert await node.disks.expire_names(wanted, ExpiryLimits(14 * DAY_S, 1)) == (
            refs["of-disk"],
        )
        assert await node.disks.collect_garbage(0) == (), "a disk still rests on it"
        assert node.store.path(made.ready.digest).exists()
        named = [image.names for image in node.store.images() if image.names]
        assert named == [(refs["of-record"],)]
    assert len(list((node.state / "images/links").iterdir())) == 1


async def test_a_use_is_remembered_over_a_restart(make_node: NodeMaker, server: Web) -> None:
    server.files["a"], keep = qcow2_image(), ExpiryLimits(14 * DAY_S, 99)
    source = parse_image_ref(server.url("a"))
    async with make_node() as node:
        await node.images.ensure(source)
        age(node, source.ref, 20)
    async with make_node() as node:
        assert node.images.cached(source)
        assert await node.disks.expire_names(frozenset(), keep) == ()
    async with make_node() as node:
        assert await node.disks.expire_names(frozenset(), keep) == ()
        age(node, source.ref, 20)
    async with make_node() as node:
        assert await node.disks.expire_names(frozenset(), keep) == (source.ref,)


async def test_old_files_that_name_nothing_are_removed(make_node: NodeMaker, server: Web) -> None:
    server.files["a"] = qcow2_image()
    async with make_node() as node:
        found = await node.images.ensure(parse_image_ref(server.url("a")))
        age(node, server.url("a"), 20)
        node.store.path(found.digest).unlink()
    async with make_node() as node:
        await node.disks.expire_names(frozenset(), ExpiryLimits(14 * DAY_S, 99))
        assert node.tree() == []


async def names(desk: Desk) -> set[str]:
    page = HeldImages.model_validate(await desk.ask("list", ListImages()))
    return {name for image in page.images for name in image.names}


async def test_the_service_keeps_few_names_and_those_of_its_vms(
    tmp_path: Path, server: Web
) -> None:
    data = qcow2_image()
    refs = [server.url(f"a{n}") for n in range(6)]
    server.files |= {f"a{n}": data for n in range(6)}
    async with serving(tmp_path, MemoryServer(), max_names=2) as desk:
        await desk.put(record(volume(refs[0])))
        assert (await desk.ready()).error is None
        for number, ref in enumerate(refs[1:], 1):
            await desk.ask("pull", {"ref": ref, "job": uid(number)})
        async with asyncio.timeout(10):
            while len(kept := await names(desk)) > 2:
                await asyncio.sleep(0.02)
        assert kept == {refs[0], refs[-1]}
