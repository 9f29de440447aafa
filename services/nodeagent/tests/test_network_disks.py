"""Disks on servers: QEMU gets the place in the node's settings, and a probe tells the pool."""

import asyncio
import struct
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from services.nodeagent.tests.pretended_node import record
from services.nodeagent.tests.test_volume_disks import MADE, SPEC

from virtbus.bus.runtime.pool_settings import (
    IscsiPool,
    NbdPool,
    NfsPool,
    PoolSettings,
    RbdPool,
    ServerPool,
)
from virtbus.nodeagent.core.addresses import assigned
from virtbus.nodeagent.core.away_servers import AwayServers
from virtbus.nodeagent.core.disks import hot_disk
from virtbus.nodeagent.core.element import to_text
from virtbus.nodeagent.core.network_disks import NO_ROOM, why_it_waits
from virtbus.nodeagent.edge import pool_servers
from virtbus.nodeagent.edge.disk_files import HostDiskFiles
from virtbus.nodeagent.edge.pool_servers import PoolServers, probed
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.pool import PoolKind, PoolReport, PoolState
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.volume_ref import VolumeRef

ACK, EXPORT, UNSUPPORTED, TLS_REQUIRED, UNKNOWN = 1, 3, 2**31 + 1, 2**31 + 5, 2**31 + 6


def greeting(reply: int = EXPORT) -> bytes:
    """The first words of an NBD server, and the type of its reply to the first option."""
    head = struct.pack(">QIII", 0x3E889045565A9, 6, reply, 0)
    return b"NBDMAGICIHAVEOPT\0\3" + head


REF = VolumeRef(
    uid="0192f0c1-2d3e-7abc-8def-0123456789cc",
    namespace="shop",
    name="data-1",
    size_bytes=2**20,
    pool="san",
    kind=PoolKind.NBD,
)


def san(port: int = 10809, **more: Any) -> NbdPool:
    plain = {"kind": PoolKind.NBD, "host": "127.0.0.1", "port": port, "volumes": {REF.key: "one"}}
    return NbdPool.model_validate(plain | more)


LOGIN = {"user": "virtbus", "secret_file": "/etc/virtbus/san.secret"}


def iscsi(port: int = 3260, **more: Any) -> IscsiPool:
    plain = {"kind": PoolKind.ISCSI, "host": "127.0.0.1", "port": port}
    volumes = {"volumes": {REF.key: "iqn.2026-01.org.example:one/1"}}
    return IscsiPool.model_validate(plain | volumes | LOGIN | more)


def ceph(port: int = 3300, **more: Any) -> RbdPool:
    plain = {"kind": PoolKind.RBD, "monitors": ("127.0.0.2", "127.0.0.1"), "port": port}
    return RbdPool.model_validate(plain | {"volumes": {REF.key: "vms/one"}} | LOGIN | more)


def nfs(**more: Any) -> NfsPool:
    plain = {"kind": PoolKind.NFS, "host": "127.0.0.1", "volumes": {REF.key: "/export/one.raw"}}
    return NfsPool.model_validate(plain | more)


def holding(kind: PoolKind = PoolKind.NBD) -> VmRecord:
    ref = REF.model_copy(update={"kind": kind})
    return record(spec=SPEC).model_copy(update={"volume_refs": {"data": ref}})


async def rendered(tmp_path: Path, pool: ServerPool) -> str:
    of = holding(pool.kind)
    source = (await HostDiskFiles(tmp_path, {"san": pool}).sources(of, MADE))["data"]
    disk = of.spec.domain.devices.disks[0]
    return to_text(hot_disk(disk, source, assigned(of.spec.domain, {})))


async def test_a_disk_on_a_server_pauses_its_guest_at_an_error(tmp_path: Path) -> None:
    text = await rendered(tmp_path, san())
    for part in (
        '<disk type="network" device="disk">',
        '<driver name="qemu" type="raw" discard="unmap" error_policy="stop" rerror_policy="stop"',
        '<source protocol="nbd" name="one" tls="no"><host name="127.0.0.1" port="10809" />',
        '<alias name="ua-volume-data" />',
    ):
        assert part in text, text
    assert 'tls="yes"' in await rendered(tmp_path, san(tls=True))


SECRETS = {
    kind: f'<auth username="virtbus"><secret type="{kind}" uuid="{REF.uid}" /></auth>'
    for kind in ("iscsi", "ceph")
}


@pytest.mark.parametrize(
    ("pool", "source"),
    [
        (
            iscsi(),
            '<source protocol="iscsi" name="iqn.2026-01.org.example:one/1">'
            f'<host name="127.0.0.1" port="3260" />{SECRETS["iscsi"]}</source>',
        ),
        (
            iscsi(user="", secret_file=""),
            '<source protocol="iscsi" name="iqn.2026-01.org.example:one/1">'
            '<host name="127.0.0.1" port="3260" /></source>',
        ),
        (
            ceph(),
            '<source protocol="rbd" name="vms/one"><host name="127.0.0.2" port="3300" />'
            f'<host name="127.0.0.1" port="3300" />{SECRETS["ceph"]}</source>',
        ),
        (
            nfs(user=107, group=108),
            '<source protocol="nfs" name="/export/one.raw"><host name="127.0.0.1" />'
            '<identity user="+107" group="+108" /></source>',
        ),
        (
            nfs(),
            '<source protocol="nfs" name="/export/one.raw"><host name="127.0.0.1" /></source>',
        ),
    ],
)
async def test_each_kind_of_server_has_its_source(
    tmp_path: Path, pool: ServerPool, source: str
) -> None:
    text = await rendered(tmp_path, pool)
    assert source in text
    assert 'error_policy="stop" rerror_policy="stop"' in text


async def test_a_volume_without_an_export_on_this_node_is_refused(tmp_path: Path) -> None:
    lacking: tuple[dict[str, PoolSettings], ...] = ({}, {"san": san(volumes={})})
    for pools in lacking:
        with pytest.raises(VirtbusError, match=r"nothing for shop\.data-1") as refused:
            await HostDiskFiles(tmp_path, pools).sources(holding(), MADE)
        assert refused.value.reason == "pool_unknown"


def test_a_guest_that_waits_is_told_which_server_it_may_wait_for() -> None:
    assert "server of the pool san" in why_it_waits(holding())
    without = holding().model_copy(update={"volume_refs": {}})
    assert why_it_waits(without) == NO_ROOM


@asynccontextmanager
async def server(says: bytes, *, silent: bool = False) -> AsyncIterator[int]:
    held: list[asyncio.StreamWriter] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        held.append(writer)
        writer.write(says)
        await reader.read(1024)
        if not silent:
            writer.close()

    listening = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield listening.sockets[0].getsockname()[1]
    finally:
        for one in held:
            one.close()
        listening.close()


@pytest.mark.parametrize(
    ("says", "state", "why"),
    [
        (greeting(), PoolState.READY, ""),
        (greeting(UNSUPPORTED), PoolState.READY, ""),
        (greeting(TLS_REQUIRED), PoolState.GONE, "set `tls = true`"),
        (greeting(UNKNOWN), PoolState.GONE, "has no export 'one'; make it"),
        (greeting()[:18], PoolState.GONE, "closes the connection"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", PoolState.GONE, "is no server of kind nbd"),
        (b"", PoolState.GONE, "closes the connection"),
    ],
)
async def test_a_probe_reads_the_first_words_of_a_server(
    says: bytes, state: PoolState, why: str
) -> None:
    async with server(says) as port:
        found, message = await probed(san(port))
    assert (found, why in message) == (state, True), message
    assert (await probed(san(port)))[0] is PoolState.GONE


@pytest.mark.parametrize("host", ["a..b", "a" * 64])
async def test_a_pool_whose_host_is_no_name_is_gone(host: str) -> None:
    found, message = await probed(san(host=host))
    assert (found, "correct pools.toml" in message) == (PoolState.GONE, True), message


@pytest.mark.parametrize(
    ("reply", "state"), [(ACK, PoolState.READY), (UNSUPPORTED, PoolState.GONE)]
)
async def test_a_pool_with_tls_has_a_server_that_offers_it(reply: int, state: PoolState) -> None:
    async with server(greeting(reply)) as port:
        found, message = await probed(san(port, tls=True))
    assert (found, "offers no TLS" in message) == (state, state is PoolState.GONE)


TARGET = bytes([0x23, 0x80]) + bytes(46)
BUSY_TARGET = bytes([0x23, 0x00]) + bytes(34) + b"\x02\x01" + bytes(10)
"""A target that requires a login, also for a discovery."""


def nfs_reply(accepted: int = 0, result: int = 0) -> bytes:
    return struct.pack(">7I", 2**31 + 24, 1, 1, accepted, 0, 0, result)


@pytest.mark.parametrize(
    ("kind", "says", "why"),
    [
        (iscsi, TARGET, ""),
        (iscsi, BUSY_TARGET, ""),
        (iscsi, b"HTTP/1.1 400 Bad Request\r\n" + bytes(48), "is no server of kind iscsi"),
        (ceph, b"ceph v2\n\x10\0", ""),
        (ceph, b"ceph v027", ""),
        (ceph, b"220 smtp.", "is no server of kind rbd"),
        (nfs, nfs_reply(), ""),
        (nfs, nfs_reply(result=2), "does not serve version 3"),
        (nfs, greeting(), "is no server of kind nfs"),
    ],
)
async def test_each_kind_of_server_answers_a_probe_in_its_protocol(
    kind: Callable[..., ServerPool], says: bytes, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with server(says) as port:
        if kind is nfs:
            monkeypatch.setattr(NfsPool, "port", port)
        found, message = await probed(kind() if kind is nfs else kind(port))
    wanted = PoolState.GONE if why else PoolState.READY
    assert (found, why in message) == (wanted, True), message


def test_a_guest_stalls_only_for_servers_of_its_own_volumes() -> None:
    servers, record_, changes = AwayServers(), holding(PoolKind.ISCSI), list[str]()
    servers.changed = lambda: changes.append("changed")
    servers.set("other", away=True)
    assert not servers.why_it_stalls(record_)
    servers.set("other", away=True)
    assert len(changes) == 1
    servers.set("san", away=True)
    assert len(changes) == 2
    assert "the server of the pool san does not answer" in servers.why_it_stalls(record_)
    servers.set("san", away=False)
    assert not servers.why_it_stalls(record_)


async def asks_nobody(_name: str, _pool: ServerPool) -> dict[str, int]:
    pytest.fail("the server tells the sizes without a login")


async def test_a_silent_server_delays_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_servers, "GONE_S", 0.5)
    told: dict[str, PoolState] = {}

    def tell(_source: str, pools: Any) -> None:
        reports: list[PoolReport] = list(pools)
        told.update({one.name: one.state for one in reports})

    async with server(greeting()) as port, server(b"", silent=True) as silent:
        pools: dict[str, PoolSettings] = {"a": san(silent), "b": san(port)}
        async with asyncio.TaskGroup() as group:
            servers = PoolServers(pools, tell, AwayServers(), asks_nobody, time.time_ns, 0.05)
            running = group.create_task(servers.run())
            async with asyncio.timeout(10):
                while told.get("b") is not PoolState.READY:
                    await asyncio.sleep(0.01)
                assert "a" not in told
                while told.get("a") is not PoolState.GONE:
                    await asyncio.sleep(0.01)
            running.cancel()
