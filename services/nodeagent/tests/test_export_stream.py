"""A download: the whole file from any offset, and no file that imaged merely points to."""

import os
from pathlib import Path

import pytest
from services.nodeagent.tests.pretended_node import NODE, uid
from services.nodeagent.tests.test_operations import Site

from virtbus.bus.client.ports import ServiceInfo
from virtbus.bus.client.streams import opening
from virtbus.nodeagent.edge.export_file import CHUNK_BYTES, open_export
from virtbus.nodeagent.export_stream import END_OF_FILE, ExportStreams
from virtbus.schemas import subjects
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.streams import ExportRead

CONTENT = os.urandom(2 * CHUNK_BYTES + 5)


def put(state: Path) -> Path:
    path = state / "disks" / "exports" / uid(10) / "disk.qcow2"
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT)
    return path


async def download(site: Site, state: Path, *, offset: int = 0, number: int = 10) -> bytes:
    streams = ExportStreams(site.bus, NODE, state, site.runner)
    subject = subjects.rpc(NODE, "agent", "export")
    async with site.bus.serve(ServiceInfo("virtbus-nodeagent", "1"), [streams.endpoint()]):
        want, found = ExportRead(uid=uid(number), offset=offset), bytearray()
        async with opening(site.bus, subject, want) as stream:
            while data := await stream.read():
                found += data
        assert stream.closed == END_OF_FILE
    return bytes(found)


@pytest.mark.parametrize("offset", [0, 7, len(CONTENT)])
async def test_the_file_comes_whole_from_any_offset(tmp_path: Path, offset: int) -> None:
    site = Site()
    await site.put()
    put(tmp_path)
    assert await download(site, tmp_path, offset=offset) == CONTENT[offset:]


async def test_an_export_is_sent_if_the_folder_of_disks_is_a_symlink(tmp_path: Path) -> None:
    site = Site()
    await site.put()
    put(tmp_path)
    (tmp_path / "disks").rename(tmp_path / "elsewhere")
    (tmp_path / "disks").symlink_to(tmp_path / "elsewhere")
    assert await download(site, tmp_path) == CONTENT


async def test_only_files_of_known_operations_are_sent(tmp_path: Path) -> None:
    site = Site()
    put(tmp_path)
    with pytest.raises(VirtbusError) as refused:
        await download(site, tmp_path)
    assert refused.value.reason == "export_not_here"
    await site.put(11)
    with pytest.raises(VirtbusError) as refused:
        await download(site, tmp_path, number=11)
    assert refused.value.reason == "export_not_here"


def test_only_a_file_with_one_name_is_sent(tmp_path: Path) -> None:
    path, secret = put(tmp_path), tmp_path / "secret"
    secret.write_bytes(b"canary")
    opened = open_export(tmp_path, uid(10), "qcow2")
    assert opened is not None
    opened.close()
    path.unlink()
    assert open_export(tmp_path, uid(10), "qcow2") is None
    os.link(secret, path)
    assert open_export(tmp_path, uid(10), "qcow2") is None
    path.unlink()
    path.symlink_to(secret)
    assert open_export(tmp_path, uid(10), "qcow2") is None
    path.unlink()
    os.mkfifo(path)
    assert open_export(tmp_path, uid(10), "qcow2") is None
