"""An image store truncated at any byte: never a wrong byte, the next request repairs it (I11)."""

from pathlib import Path

import pytest
from aiohttp import web
from services.imaged.tests.site_under_test import Node, NodeMaker, Web, qcow2_image

from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.image import parse_image_ref

KIB = 1024
RAW = bytes(range(256)) * 256 + b"\x55\xaa" * 128
"""64.25 KiB without any header: only its length reveals a cut."""


def _points(length: int) -> list[int]:
    """Positions of cuts: at both ends every byte, and some in between."""
    few = {*range(min(length, 6)), *range(max(0, length - 6), length)}
    return sorted(few | set(range(0, length, max(1, length // 10))))


async def _whole(node: Node, url: str, data: bytes) -> None:
    image = await node.images.ensure(parse_image_ref(url))
    assert node.store.path(image.digest).read_bytes() == data


@pytest.mark.parametrize("data", [qcow2_image(payload=64 * KIB), RAW], ids=["qcow2", "raw"])
@pytest.mark.parametrize("folder", ["data", "links"])
async def test_cut_data_or_link_is_fetched_again(
    make_node: NodeMaker, server: Web, folder: str, data: bytes
) -> None:
    server.files["a"] = data
    async with make_node() as node:
        await _whole(node, server.url("a"), data)
        (path,) = (node.state / "images" / folder).iterdir()
    whole = path.read_bytes()
    for length in _points(len(whole)):
        path.chmod(0o644)
        path.write_bytes(whole[:length])
        async with make_node() as node:
            await _whole(node, server.url("a"), data)
            assert node.parts() == []


async def test_a_truncated_part_or_note_is_resumed_or_restarted_and_never_wrong(
    make_node: NodeMaker, server: Web, tmp_path: Path
) -> None:
    data = qcow2_image(payload=256 * KIB)

    async def half(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": str(len(data)), "ETag": '"v1"'})
        await response.prepare(request)
        await response.write(data[: 160 * KIB])
        if request.transport is not None:
            request.transport.abort()
        return response

    for name in ("part", "note"):
        for share in (0.0, 0.3, 0.99):
            state = tmp_path / f"state-{name}-{share}"
            server.handlers["a"] = half
            async with make_node(state=state, checkpoint_bytes=32 * KIB) as node:
                with pytest.raises(VirtbusError):
                    await node.images.ensure(parse_image_ref(server.url("a")))
                files = sorted((node.state / "images" / "part").iterdir())
            del server.handlers["a"]
            server.files["a"] = data
            for path in files:
                if (path.suffix == ".json") == (name == "note"):
                    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
            async with make_node(state=state) as node:
                await _whole(node, server.url("a"), data)
                assert node.parts() == []
