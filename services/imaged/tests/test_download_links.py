"""A link gives one file to those who have it, until its end; a bad reader costs only itself."""

import asyncio
import hashlib
import os
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest
from pydantic import ValidationError
from services.imaged.tests.records import uid

from virtbus.bus.runtime.sources import Sources
from virtbus.bus.runtime.tasks import background
from virtbus.imaged.core import download_requests as requests
from virtbus.imaged.core.limits import DownloadLimits, SpaceLimits, TransferLimits
from virtbus.imaged.device_volumes import DeviceVolumes
from virtbus.imaged.disk_jobs import DiskJobs
from virtbus.imaged.disk_locks import DiskLocks
from virtbus.imaged.edge.disk_files import DiskFolders
from virtbus.imaged.edge.disk_places import DiskPlaces
from virtbus.imaged.edge.disk_space import DiskSpace
from virtbus.imaged.edge.disk_threads import DiskThreads
from virtbus.imaged.edge.download_server import DownloadServer
from virtbus.imaged.edge.export_files import ExportFiles
from virtbus.imaged.edge.pools import Pools
from virtbus.imaged.edge.store import ImageStore
from virtbus.imaged.exports import ExportParts, Exports
from virtbus.imaged.settings import Settings
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.export_link import ExportLinkAsk
from virtbus.schemas.node_rpc import ExportWork
from virtbus.schemas.operation import ExportResult

ID, OTHER = uid(90), uid(91)
CONTENT = bytes(range(256)) * 16 * 1024  # 4 MiB: more than the buffers of a connection
DIGEST = f"sha256:{hashlib.sha256(CONTENT).hexdigest()}"
NOW_NS = 1_700_000_000 * 10**9
LIMITS = DownloadLimits(("127.0.0.1", 0), "http://node", head_s=0.5, stall_s=0.5)


class Answer(NamedTuple):
    status: int
    fields: dict[str, str]
    body: bytes


class Site:
    """A node with one export and its HTTP server; `now_ns` is its clock."""

    def __init__(self, root: Path, threads: DiskThreads, limits: DownloadLimits) -> None:
        self.now_ns = NOW_NS
        self.root = root
        self.files = ExportFiles(root, DiskSpace(root, SpaceLimits(0, 0.0)))
        for export in (ID, OTHER):
            part = self.files.begin(export)
            os.write(part.descriptor, CONTENT)
            path = str(self.files.path(export, "raw"))
            result = ExportResult(path=path, size_bytes=len(CONTENT), digest=DIGEST)
            self.files.publish(export, "part", part, result)
            part.close()
        self.server = DownloadServer(self.files, threads, limits, lambda: self.now_ns)
        pools = Pools(DiskFolders(root))
        places = DiskPlaces(pools, ImageStore(root / "i", SpaceLimits(0, 0.0)))
        devices = DeviceVolumes(pools.devices, threads, root)
        self.exports = Exports(
            DiskJobs(asyncio.TaskGroup()),
            ExportParts(
                *(DiskLocks(), places, self.files, threads, TransferLimits(), devices, limits),
                Sources(time_ns=lambda: self.now_ns),
            ),
        )

    async def link(self, export: str = ID, valid_s: int = 60) -> str:
        made = await self.exports.link(ExportLinkAsk(id=export, valid_s=valid_s))
        assert (made.size_bytes, made.digest) == (len(CONTENT), DIGEST)
        assert made.expires_ns == self.now_ns + valid_s * 10**9
        url = urlsplit(made.url)
        assert url.netloc == "node"
        return f"{url.path}?{url.query}"

    async def send(self, data: bytes, context: ssl.SSLContext | None = None) -> Answer | None:
        """Return the answer to raw bytes; None if the connection ends without one."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port, ssl=context)
        try:
            writer.write(data)
            head, _, body = (await reader.read(-1)).partition(b"\r\n\r\n")
        except ConnectionError:
            return None
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()
        if not head:
            return None
        first, *lines = head.decode().split("\r\n")
        return Answer(int(first.split()[1]), dict(one.split(": ", 1) for one in lines), body)

    async def get(self, path: str, **fields: str) -> Answer:
        lines = [f"{name.replace('_', '-')}: {value}" for name, value in fields.items()]
        answer = await self.send("\r\n".join([f"GET {path} HTTP/1.1", *lines, "", ""]).encode())
        assert answer is not None
        return answer


@asynccontextmanager
async def serving(
    root: Path, threads: DiskThreads, limits: DownloadLimits = LIMITS
) -> AsyncIterator[Site]:
    site = Site(root, threads, limits)
    async with background() as tasks:
        tasks.start(site.server.run())
        while not site.server.port:
            await asyncio.sleep(0.01)
        yield site


async def test_a_file_is_read_in_whole_and_in_ranges(tmp_path: Path, threads: DiskThreads) -> None:
    async with serving(tmp_path, threads) as site:
        path = await site.link()
        whole = await site.get(path)
        assert (whole.status, whole.body) == (200, CONTENT)
        assert whole.fields["Content-Length"] == str(len(CONTENT))
        assert whole.fields["Accept-Ranges"] == "bytes"
        etag = whole.fields["ETag"]
        size = len(CONTENT)
        for asked, start, end in (
            ("bytes=5-9", 5, 10),
            (f"bytes={size - 3}-", size - 3, size),
            ("bytes=-4", size - 4, size),
            (f"bytes=10-{size * 9}", 10, size),
        ):
            part = await site.get(path, Range=asked, If_Range=etag)
            assert (part.status, part.body) == (206, CONTENT[start:end])
            assert part.fields["Content-Range"] == f"bytes {start}-{end - 1}/{size}"
        past = await site.get(path, Range=f"bytes={size}-")
        assert (past.status, past.body) == (416, b"")
        assert past.fields["Content-Range"] == f"bytes */{size}"
        for ignored in ("bytes=1-2,5-6", "bytes=-", "bytes=9-3", "lines=1-2", "bytes=x-"):
            assert (await site.get(path, Range=ignored)).body == CONTENT
        assert (await site.get(path, Range="bytes=1-2", If_Range='"old"')).body == CONTENT
        head = await site.send(f"HEAD {path} HTTP/1.0\r\n\r\n".encode())
        assert head is not None
        assert (head.status, head.body, head.fields["ETag"]) == (200, b"", etag)


async def test_a_link_is_for_one_export_until_its_time(
    tmp_path: Path, threads: DiskThreads
) -> None:
    async with serving(tmp_path, threads) as site:
        path, other = await site.link(valid_s=60), await site.link(OTHER, 600)
        assert (await site.get(path.replace(ID, OTHER))).status == 403
        assert (await site.get(path.replace("expires=17", "expires=18"))).status == 403
        assert (await site.get(path.replace(ID, uid(92)))).status == 403
        assert (await site.get(path.replace("disk.raw?", "disk.qcow2?"))).status == 403
        assert (await site.get(path[:-1] + ("0" if path[-1] != "0" else "1"))).status == 403
        site.now_ns += 59 * 10**9
        assert (await site.get(path)).status == 200
        site.now_ns += 10**9
        gone = await site.get(path)
        assert (gone.status, b"expired" in gone.body) == (410, True)
        again = await site.link()
        assert (await site.get(again)).status == 200
        await site.exports.do(ExportWork(id=ID, do="remove", uid=ID))
        assert (await site.get(again)).status == 403
        assert (await site.get(other)).status == 200
        with pytest.raises(VirtbusError) as refused:
            await site.link()
        assert refused.value.reason == "export_not_here"


async def test_links_outlive_the_service(tmp_path: Path, threads: DiskThreads) -> None:
    async with serving(tmp_path, threads) as site:
        path = await site.link()
        key = tmp_path / "exports" / ID / "link-key"
        assert key.stat().st_mode & 0o077 == 0
        known = key.read_bytes()
    async with serving(tmp_path / "2", threads) as site:
        (tmp_path / "2" / "exports" / ID / "link-key").write_bytes(known)
        assert (await site.get(path)).status == 200


async def test_what_is_no_request_for_a_file_is_refused(
    tmp_path: Path, threads: DiskThreads
) -> None:
    async with serving(tmp_path, threads) as site:
        path = (await site.link()).encode()
        for bad in (
            b"GET / HTTP/1.1\r\n\r\n",
            b"POST " + path + b" HTTP/1.1\r\n\r\n",
            b"GET " + path + b"\r\n\r\n",
            b"GET " + path + b"&x=1 HTTP/1.1\r\n\r\n",
            b"GET /exports/../../etc/passwd HTTP/1.1\r\n\r\n",
            b"GET " + path.replace(b"disk.raw", b"link-key") + b" HTTP/1.1\r\n\r\n",
            b"\xff\x00\r\n\r\n",
        ):
            answer = await site.send(bad)
            assert answer is not None
            assert answer.status == 400, bad
        assert await site.send(b"GET /" + b"a" * 20_000 + b"\r\n\r\n") is None
        assert await site.send(b"GET ") is None  # it never ends its head
        assert (await site.get(path.decode())).status == 200


async def test_a_stalled_reader_delays_nobody_and_is_disconnected(
    tmp_path: Path, threads: DiskThreads
) -> None:
    async with serving(tmp_path, threads, replace(LIMITS, at_once=4, stall_s=3.0)) as site:
        path = await site.link()
        stalled = []
        for _ in range(3):  # three quarters of the connections
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", site.server.port, limit=1024
            )
            writer.write(f"GET {path} HTTP/1.1\r\n\r\n".encode())
            await reader.readexactly(12)
            stalled.append((reader, writer))
        assert await site.send(f"GET {path} HTTP/1.1\r\n\r\n".encode()) is None
        await asyncio.sleep(3.5)
        assert (await site.get(path)).body == CONTENT
        for reader, writer in stalled:
            with suppress(ConnectionError):
                assert len(await reader.read(-1)) < len(CONTENT)
            writer.close()


async def test_a_download_of_a_removed_export_ends(tmp_path: Path, threads: DiskThreads) -> None:
    async with serving(tmp_path, threads) as site:
        path = await site.link()
        reader, writer = await asyncio.open_connection("127.0.0.1", site.server.port, limit=1024)
        writer.write(f"GET {path} HTTP/1.1\r\n\r\n".encode())
        await reader.readexactly(12)
        await site.exports.do(ExportWork(id=ID, do="remove", uid=ID))
        with suppress(ConnectionError):
            assert len(await reader.read(-1)) < len(CONTENT)
        writer.close()


async def test_the_rate_is_shared_by_all_downloads(tmp_path: Path, threads: DiskThreads) -> None:
    limits = replace(LIMITS, bytes_per_s=16 * 1024**2)
    async with serving(tmp_path, threads, limits) as site:
        path, loop = await site.link(), asyncio.get_running_loop()
        begun_s = loop.time()
        async with asyncio.TaskGroup() as group:
            both = [group.create_task(site.get(path)) for _ in range(2)]
        assert [len(each.result().body) for each in both] == [len(CONTENT)] * 2
        assert loop.time() - begun_s > 0.4


async def test_a_certificate_makes_it_https(tmp_path: Path, threads: DiskThreads) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-subj", "/CN=node", "-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    limits = replace(LIMITS, certificate=(certificate, key))
    async with serving(tmp_path / "disks", threads, limits) as site:
        context = ssl.create_default_context(cafile=str(certificate))
        context.check_hostname = False
        data = f"GET {await site.link()} HTTP/1.1\r\n\r\n".encode()
        answer = await site.send(data, context)
        assert answer is not None
        assert answer.body == CONTENT
        assert await site.send(data) is None


async def test_a_certificate_that_cannot_be_read_is_logged_once_for_each_reason(
    tmp_path: Path, threads: DiskThreads, caplog: pytest.LogCaptureFixture
) -> None:
    certificate = tmp_path / "cert.pem"
    limits = replace(LIMITS, certificate=(certificate, tmp_path / "key.pem"))
    async with serving(tmp_path / "disks", threads, limits) as site:
        (first,) = caplog.messages  # before any client
        assert f"no downloads: cannot read the certificate {certificate}" in first
        assert "No such file" in first
        certificate.write_text("no PEM")
        for _ in range(2):
            assert await site.send(b"GET / HTTP/1.1\r\n\r\n") is None
        assert len(caplog.messages) == 2


def test_settings_that_give_no_link_are_refused() -> None:
    assert Settings(node="n1").downloads is None
    served = Settings(node="n1", download_address="[fd00::5]:8480").downloads
    assert served is not None
    assert (served.address, served.url) == (("fd00::5", 8480), "http://[fd00::5]:8480")
    for wrong in (
        {"download_address": "node:80"},
        {"download_address": "10.0.0.5"},
        {"download_address": "fd00::5:80"},
        {"download_address": "0.0.0.0:80"},
        {"download_address": "10.0.0.5:80", "download_key": Path("/key")},
        {"download_url": "ftp://node"},
        {"download_url": "http://node/"},
    ):
        with pytest.raises(ValidationError):
            Settings.model_validate({"node": "n1"} | wrong)


def test_a_head_with_repeated_fields_counts_the_first() -> None:
    target = f"/exports/{ID}/disk.raw?expires=1&token={'0' * 64}"
    head = f"GET {target} HTTP/1.1\r\nRange: bytes=0-1\r\nRANGE: bytes=5-\r\nx\r\n\r\n"
    want = requests.asked(head.encode())
    assert want is not None
    assert want.range == "bytes=0-1"
