"""Sizes of the places on a server: asked without opening them, and bounded in time and bytes."""

import asyncio
import os
import socket
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from services.nodeagent.tests.test_network_disks import san, server

from virtbus.bus.runtime.pool_settings import BlockPool
from virtbus.nodeagent.edge import nbd_sizes, pool_servers
from virtbus.nodeagent.edge.nbd_sizes import export_sizes
from virtbus.nodeagent.edge.pool_devices import measured
from virtbus.schemas.disk import DISK_MAX
from virtbus.schemas.pool import PoolKind, PoolState

MIB = 1024**2
HELLO = b"NBDMAGICIHAVEOPT" + struct.pack(">H", 3)


def reply(kind: int, body: bytes = b"", option: int = 6, length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    return struct.pack(">QIII", 0x3E889045565A9, option, kind, size) + body


def export(size_bytes: int) -> bytes:
    return reply(3, struct.pack(">HQH", 0, size_bytes, 1)) + reply(1)


@pytest.mark.parametrize(
    ("says", "found"),
    [
        (HELLO + export(5) + export(7), {"one": 5, "two": 7}),
        (HELLO + reply(3, b"\0\1name") + export(5) + reply(2**31 + 6, b"no"), {"one": 5}),
        (HELLO + export(DISK_MAX) + export(DISK_MAX + 1), {"one": DISK_MAX}),
        (HELLO + export(2**63) + export(2**64 - 1), {}),
        (HELLO + reply(2**31 + 5) * 2, {}),
        (HELLO + export(5) + reply(3, length=2**31), {"one": 5}),
        (HELLO + reply(3, b"xx") * 100, {}),
        (HELLO + reply(1, option=3), {}),
        (HELLO[:10], {}),
        (b"SSH-2.0-OpenSSH_9.2\r\n", {}),
    ],
)
async def test_the_sizes_are_those_that_the_server_tells(
    says: bytes, found: dict[str, int]
) -> None:
    async with server(says) as port:
        assert await export_sizes("127.0.0.1", port, ["one", "two"]) == found
    assert await export_sizes("127.0.0.1", port, ["one"]) == {}


async def test_a_silent_server_ends_the_question(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nbd_sizes, "SIZES_S", 0.1)
    async with server(HELLO, silent=True) as port, asyncio.timeout(5):
        assert await export_sizes("127.0.0.1", port, ["one"]) == {}


@pytest.mark.integration
async def test_qemus_server_tells_the_size_of_an_export(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    disk = tmp_path / "disk"
    disk.write_bytes(bytes(8 * MIB))
    run = ["qemu-nbd", "-f", "raw", "-t", "-e", "4", "-x", "one", "-b", "127.0.0.1", "-p"]
    with subprocess.Popen([*run, str(port), str(disk)]) as serving:
        try:
            pool = san(port, volumes={"shop.data-1": "one"})
            found: dict[str, int] = {}
            async with asyncio.timeout(20):
                while not found:
                    await asyncio.sleep(0.1)
                    found = await pool_servers.place_sizes(pool)
            assert found == {"shop.data-1": 8 * MIB}
        finally:
            serving.terminate()


@pytest.mark.parametrize("make", [os.mkfifo, Path.touch])
def test_a_pool_with_a_path_that_is_no_device_is_gone(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    path = tmp_path / "path"
    make(path)
    pool = BlockPool.model_construct(kind=PoolKind.BLOCK, volumes={"shop.data-1": str(path)})
    found = measured("raw", pool)
    assert found.state is PoolState.GONE
    assert found.message.startswith(f"{path} of shop.data-1: ")
