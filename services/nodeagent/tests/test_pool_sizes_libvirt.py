"""Sizes of places by a real QEMU of libvirtd, from real servers and from hostile ones."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path

import libvirt
import pytest
from services.nodeagent.tests.libvirt_host import URI
from services.nodeagent.tests.test_network_disks import REF, TARGET, ceph, greeting, iscsi, san

from virtbus.bus.runtime.pool_settings import ServerPool
from virtbus.nodeagent.edge import libvirt_sizes
from virtbus.nodeagent.edge.hypervisor import LibvirtHypervisor
from virtbus.nodeagent.edge.libvirt_sizes import LibvirtSizes

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

MIB = 1024**2
NODE = "sizes-of-a-test"
NAME = f"virtbus-sizes-{NODE}"
NOISE = bytes(range(256)) * 16
PID = Path(f"/run/libvirt/qemu/{NAME}.pid")


@pytest.fixture
async def sizes() -> AsyncIterator[LibvirtSizes]:
    async with LibvirtHypervisor(URI, starts_at_once=4) as hypervisor:
        yield hypervisor.sizes(NODE)
        await asyncio.to_thread(refuse_leftovers)


def refuse_leftovers() -> None:
    """Fail if libvirt has a machine or a secret of the question."""
    with closing(libvirt.open(URI)) as connection:
        assert NAME not in [one.name() for one in connection.listAllDomains()]
        assert not [one for one in connection.listAllSecrets() if "virtbus" in one.usageID()]
    assert not PID.exists()


@asynccontextmanager
async def exporting(tmp_path: Path, size_bytes: int) -> AsyncIterator[int]:
    """Serve the export `one` by qemu-nbd, and yield the port."""
    disk, ready = tmp_path / "disk", tmp_path / "ready"
    with disk.open("wb") as file:
        file.truncate(size_bytes)
    async with hostile(lambda _: b"") as port:
        pass
    run = ["qemu-nbd", "-f", "raw", "-t", "-e", "4", "-x", "one", "-b", "127.0.0.1"]
    words = [*run, "-p", str(port), f"--pid-file={ready}", str(disk)]
    with subprocess.Popen(words) as serving:
        try:
            async with asyncio.timeout(20):
                while not ready.exists():
                    await asyncio.sleep(0.05)
            yield port
        finally:
            serving.terminate()


@asynccontextmanager
async def hostile(
    answers: Callable[[bytes], bytes], asked: asyncio.Event | None = None
) -> AsyncIterator[int]:
    """Serve with an answer to each message, and yield the port; set `asked` at a connection."""
    held: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        held.append(writer)
        if asked is not None:
            asked.set()
        while message := await reader.read(4096):
            writer.write(answers(message))
            await writer.drain()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield listening.sockets[0].getsockname()[1]
    finally:
        for one in held:
            one.close()
        listening.close()


async def test_qemu_tells_the_size_of_each_place_that_exists(
    sizes: LibvirtSizes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with exporting(tmp_path, 8 * MIB) as port:
        places = {"shop.a": "absent", "shop.b": "one"}
        assert await sizes.asked("san", san(port, volumes=places)) == {"shop.b": 8 * MIB}
    assert "shop.a" in caplog.text
    assert await sizes.asked("san", san(port)) == {}, "the server is away"


@pytest.mark.parametrize(
    ("pool", "answers"),
    [
        (san, lambda _: greeting()[:18] + NOISE),
        (iscsi, lambda _: NOISE),
        (iscsi, lambda _: TARGET),
        (iscsi, lambda asked: asked),
        (ceph, lambda _: b"ceph v2\n\x10\0" + NOISE),
    ],
)
async def test_a_server_that_breaks_its_protocol_tells_no_size(
    sizes: LibvirtSizes,
    pool: Callable[..., ServerPool],
    answers: Callable[[bytes], bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(libvirt_sizes, "ASK_S", 2.0)
    secret = tmp_path / "secret"
    secret.write_text("AQDnotreallyakeyofCephatall00000000000==\n", encoding="utf-8")
    secret.chmod(0o600)
    login = {} if pool is san else {"secret_file": str(secret)}
    async with hostile(answers) as port:
        assert await sizes.asked("san", pool(port, **login)) == {}
    log = Path(f"/var/log/libvirt/qemu/{NAME}.log").read_text(errors="replace")
    assert "notreallyakey" not in log


async def test_a_server_that_hangs_is_left_and_another_is_asked(
    sizes: LibvirtSizes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libvirt_sizes, "ASK_S", 6.0)
    async with hostile(lambda _: b"") as silent, exporting(tmp_path, 8 * MIB) as port:
        async with asyncio.TaskGroup() as group:
            first = group.create_task(sizes.asked("hangs", san(silent)))
            second = group.create_task(sizes.asked("san", san(port)))
        assert (first.result(), second.result()) == ({}, {REF.key: 8 * MIB})


ASKS = """
import asyncio, sys
from virtbus.bus.runtime.pool_settings import NbdPool
from virtbus.nodeagent.edge.hypervisor import LibvirtHypervisor

async def main():
    uri, node, port = sys.argv[1:]
    pool = NbdPool(kind="nbd", host="127.0.0.1", port=port, volumes={"shop.data-1": "one"})
    async with LibvirtHypervisor(uri, starts_at_once=4) as hypervisor:
        await hypervisor.sizes(node).asked("tank", pool)

asyncio.run(main())
"""


async def test_the_machine_has_no_rights_and_the_next_agent_ends_it(sizes: LibvirtSizes) -> None:
    asked = asyncio.Event()
    async with hostile(lambda _: b"", asked) as port:
        with subprocess.Popen([sys.executable, "-c", ASKS, URI, NODE, str(port)]) as agent:
            async with asyncio.timeout(30):
                await asked.wait()
            text = Path(f"/proc/{PID.read_text().strip()}/status").read_text()
            agent.kill()
        await sizes.sweep()
        assert not PID.exists()
    status = dict(line.split(":", 1) for line in text.splitlines())
    assert status["Uid"].split() == ["65534"] * 4
    assert (int(status["NoNewPrivs"]), int(status["Seccomp"])) == (1, 2)
    assert int(status["CapEff"], 16) == int(status["CapPrm"], 16) == 0


async def test_a_machine_that_a_killed_libvirtd_left_is_ended(sizes: LibvirtSizes) -> None:
    with closing(libvirt.open(URI)) as connection:
        system = "<memory unit='MiB'>16</memory><os><type machine='pc'>hvm</type></os>"
        connection.createXML(
            f"<domain type='qemu'><name>{NAME}</name>{system}</domain>",
            libvirt.VIR_DOMAIN_START_PAUSED,
        )
    assert PID.exists()
    await sizes.sweep()
    assert not PID.exists()
    await sizes.sweep()
