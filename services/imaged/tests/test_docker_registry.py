"""Debian's registry: images pushed as container tools do, pulled by imaged."""

import asyncio
import json
from pathlib import Path

import pytest
from services.imaged.tests.docker_registry import Debian, Wire
from services.imaged.tests.registry_under_test import (
    LAYER,
    Registry,
    digest_of,
    gz,
    tar,
    zst,
)
from services.imaged.tests.site_under_test import MIB, NodeMaker, Web, qcow2_image
from services.imaged.tests.test_pulls import refused

from virtbus.imaged.edge.containers import Registries
from virtbus.schemas.image import parse_image_ref

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

DISK = qcow2_image(payload=4 * MIB)


@pytest.fixture
def images() -> Registry:
    """An image to push; nobody serves it."""
    return Registry(Web())


async def test_tags_digests_layers_and_architectures_of_a_real_registry(
    make_node: NodeMaker, images: Registry, tmp_path: Path
) -> None:
    layer = tar(("disk/", b""), ("disk/fedora.qcow2", DISK))
    base = gz(tar(("etc/os-release", b"x")))
    images.push("team/gzip", "1", gz(layer), base)
    images.push("team/plain", "1", layer)
    value = images.manifest(
        "team/zstd", [base, zst(layer)], kinds=(f"{LAYER}+gzip", f"{LAYER}+zstd")
    )
    pin = images.push_manifest("team/zstd", "1", value, value["mediaType"])
    other = gz(tar(("disk/a", qcow2_image())))
    index = images.push_index("team/multi", "latest", {"amd64": (gz(layer),), "arm64": (other,)})
    registry = Debian(tmp_path)
    with registry.running():
        await registry.push(images)
        refs = ("team/gzip:1", "team/plain:1", "team/zstd:1", f"team/zstd@{pin}", "team/multi",
                f"team/multi@{index}", "team/gzip:1#/disk/fedora.qcow2")  # fmt: skip
        for number, ref in enumerate(refs):
            state = tmp_path / f"state{number}"
            async with make_node(registries=registry.known, state=state) as node:
                image = await node.images.ensure(parse_image_ref(registry.ref(ref)))
                assert image.digest == digest_of(DISK), ref
                assert node.store.path(image.digest).read_bytes() == DISK
                assert await node.images.refresh(parse_image_ref(registry.ref(ref))) == image
                assert node.parts() == []
        async with make_node(registries=registry.known) as node:
            for ref in ("team/gzip:2", "team/none:1"):
                assert (await refused(node.images, registry.ref(ref))).reason == "image_not_found"


async def test_a_private_repository_of_a_real_registry(
    make_node: NodeMaker, images: Registry, tmp_path: Path
) -> None:
    images.push("private", "1", gz(tar(("disk/a", DISK))))
    registry = Debian(tmp_path, private=True)
    with registry.running():
        await registry.push(images)
        source = parse_image_ref(registry.ref("private:1"))
        async with make_node(registries=registry.known) as node:
            assert (await refused(node.images, source.ref)).reason == "image_denied"
        path = tmp_path / "auth.json"
        auths = {registry.host: {"username": "me", "password": "secret"}}
        path.write_text(json.dumps({"auths": auths}))
        known = Registries(
            insecure=frozenset({registry.host}), auth_file=path, architecture="amd64"
        )
        async with make_node(registries=known) as node:
            assert (await node.images.ensure(source)).digest == digest_of(DISK)


async def test_after_a_registry_dies_only_the_rest_is_fetched(
    make_node: NodeMaker, images: Registry, tmp_path: Path
) -> None:
    """The registry is killed while it sends, and another one continues at the same byte."""
    disk = qcow2_image(payload=24 * MIB)
    images.push("big", "1", gz(tar(("disk/a", disk))))
    registry = Debian(tmp_path)
    wire = Wire(registry.host, most=16 * MIB)
    limits = {"rate_window_s": 30.0, "attempts": 100, "header_timeout_s": 30.0}
    async with wire.open():
        known = Registries(insecure=frozenset({wire.host}), architecture="amd64")
        source = parse_image_ref(f"docker://{wire.host}/big:1")
        async with make_node(registries=known, **limits) as node, asyncio.TaskGroup() as group:
            with registry.running():
                await registry.push(images)
                pull = group.create_task(node.images.ensure(source))
                await wire.full.wait()
            wire.most = 1 << 40
            with registry.running():
                image = await pull
            assert image.digest == digest_of(disk)
            assert wire.carried < len(disk) + 4 * MIB  # bytes in its socket are fetched again
            assert node.parts() == []
