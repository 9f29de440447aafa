"""Measures the data of VMs: clones and snapshots against libvirt alone, pulls against curl."""

import asyncio
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import libvirt
from tests.bench.figures import Figure, ratio_of
from tests.bench.measures import pss_mib
from tests.bench.rawvirt import OVERLAY, RawVirt
from tests.bench.stage import IMAGE, Stage

from virtbus.bus.runtime.ids import uuid7
from virtbus.schemas.errors import VirtbusError

CLONE_BOUND = GAP_BOUND = 1.2
PULL_BOUND = 1.25
"""A rate of 0.8 of curl's is 1.25 times its seconds."""
PULL_BYTES = int(os.environ.get("VIRTBUS_BENCH_PULL_BYTES", str(2 * 1024**3)))
SMALL_BYTES = 64 * 1024**2
GROWTH_MIB = 8
"""Limits the memory that imaged needs for the large image beyond that for the small one."""
LOOK_S = 0.02
"""As often as `virtbus vm clone` looks at first."""
FLAGS = (
    libvirt.VIR_DOMAIN_SNAPSHOT_CREATE_NO_METADATA
    | libvirt.VIR_DOMAIN_SNAPSHOT_CREATE_DISK_ONLY
    | libvirt.VIR_DOMAIN_SNAPSHOT_CREATE_ATOMIC
)
VIRSH = ("virsh", "-q", "-c", "qemu:///system")
_STOPS = re.compile(r"event (STOP|RESUME) at (\d+\.\d+) for")


# --- clones -----------------------------------------------------------------------------------
async def linked_clone(stage: Stage, raw: RawVirt, runs: int) -> list[Figure]:
    """Request a snapshot and a clone of it, until the clone runs; interleaved with raw steps."""
    ours, floor = [], []
    for _ in range(runs):
        floor.append(await asyncio.to_thread(_raw_clone, raw))
        ours.append(await _clone(stage))
    note = "snapshot.create and vm.create; raw: snapshot, qemu-img create, define, start"
    return [ratio_of("linked clone of a running VM", ours, floor, CLONE_BOUND, note)]


async def _clone(stage: Stage) -> float:
    _, source = await stage.create(name=f"s{uuid7()[-12:]}")
    name, clone = f"c{source[-12:]}", uuid7()
    begun = asyncio.get_running_loop().time()
    await _snapshot(stage, source, name)
    running = stage.watch.expect(clone, lambda vm: vm.get("state") == "Running")
    wanted = {"uid": clone, "name": name, "image": IMAGE, "memory": "64MiB", "origin": name}
    await stage.bus.request("virtbus.api.v1.vm.create", wanted, timeout_s=30)
    stage.made.append(clone)
    async with asyncio.timeout(20):
        ended = await running
    for uid in (clone, source):
        await stage.delete(uid)
    await stage.bus.request("virtbus.api.v1.snapshot.delete", {"name": name}, timeout_s=5)
    return ended - begun


async def _snapshot(stage: Stage, source: str, name: str) -> None:
    """Return once the snapshot of a running VM is complete."""
    vm: dict[str, Any] = await _ask(stage, "vm.get", {"uid": source})
    await _ask(stage, "snapshot.create", {"name": name, "vm": vm["name"], "layered": True})
    while (await _ask(stage, "snapshot.get", {"name": name}))["state"] == "Creating":
        await asyncio.sleep(LOOK_S)


async def _ask(stage: Stage, verb: str, data: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = await stage.bus.request(f"virtbus.api.v1.{verb}", data, timeout_s=10)
    return found


def _raw_clone(raw: RawVirt) -> float:
    source, clone = raw.prepare(), ET.fromstring(raw.prepare())
    _, domain = raw.start(source)
    disk = _root_of(clone)
    file = disk.find("source")
    assert file is not None
    below = disk.find("backingStore")
    if below is not None:
        disk.remove(below)
    xml, frozen = _raw_snapshot_xml(source)
    begun = time.perf_counter()
    domain.snapshotCreateXML(xml, FLAGS)
    subprocess.run([*OVERLAY, "-F", "qcow2", "-b", frozen, file.get("file", "")], check=True)
    copy = raw.connection.defineXML(ET.tostring(clone, encoding="unicode"))
    copy.create()
    took = time.perf_counter() - begun
    for one in (copy, domain):
        raw.destroy(one)
    return took


def _root_of(domain: ET.Element) -> ET.Element:
    return next(one for one in domain.iter("disk") if one.find("backingStore/source") is not None)


def _raw_snapshot_xml(domain: str) -> tuple[str, str]:
    """Return the XML of a snapshot of the root disk, and the file that it freezes."""
    made = ET.Element("domainsnapshot")
    disks = ET.SubElement(made, "disks")
    tree = ET.fromstring(domain)
    root = _root_of(tree)
    source = root.find("source")
    assert source is not None
    frozen = source.get("file", "")
    for disk in tree.iter("disk"):
        target = disk.find("target")
        assert target is not None
        kind = "external" if disk is root else "no"
        one = ET.SubElement(disks, "disk", name=target.get("dev", ""), snapshot=kind)
        if disk is root:
            ET.SubElement(one, "driver", type="qcow2")
            ET.SubElement(one, "source", file=f"{frozen}-next")
    return ET.tostring(made, encoding="unicode"), frozen


# --- gaps -------------------------------------------------------------------------------------
async def snapshot_gap(stage: Stage, raw: RawVirt, runs: int) -> list[Figure]:
    """Milliseconds between QEMU's STOP and RESUME during a snapshot, against virsh's own."""
    ours, floor = [], []
    for _ in range(runs):
        _, uid = await stage.create(name=f"g{uuid7()[-12:]}")
        name = f"g{uid[-12:]}"
        with _stops(f"vb-{uid}") as gap:
            await _snapshot(stage, uid, name)
            await asyncio.sleep(0.2)
        ours.append(gap())
        await stage.delete(uid)
        await _ask(stage, "snapshot.delete", {"name": name})
        floor.append(await asyncio.to_thread(_raw_gap, raw))
    bound = GAP_BOUND * sum(floor) / runs
    note = f"virsh: {sum(floor) / runs:.2f} ms on average; neither stops a guest without memory"
    return [Figure("a snapshot stops the guest", sum(ours) / runs, "ms", bound, runs, note=note)]


def _raw_gap(raw: RawVirt) -> float:
    source = raw.prepare()
    _, domain = raw.start(source)
    xml, _ = _raw_snapshot_xml(source)
    file = raw.folder / f"{domain.UUIDString()}-snapshot.xml"
    file.write_text(xml)
    options = ("--no-metadata", "--disk-only", "--atomic")
    with _stops(domain.name()) as gap:
        argv = [*VIRSH, "snapshot-create", domain.name(), str(file), *options]
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
        time.sleep(0.2)
    raw.destroy(domain)
    return gap()


@contextmanager
def _stops(domain: str) -> Iterator[Callable[[], float]]:
    """Yield a function: after the context, it returns how many milliseconds the guest stopped."""
    argv = ["stdbuf", "-oL", *VIRSH, "qemu-monitor-event", "--loop", "--domain", domain]
    listening = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    time.sleep(0.5)  # virsh does not say when it listens
    found: list[str] = []
    try:
        yield lambda: _stopped_ms("".join(found))
    finally:
        listening.terminate()
        found.append(listening.communicate(timeout=10)[0])


def _stopped_ms(events: str) -> float:
    signs = {"STOP": -1, "RESUME": 1}
    return sum(signs[kind] * float(at) for kind, at in _STOPS.findall(events)) * 1000


# --- pulls ------------------------------------------------------------------------------------
async def pull(stage: Stage, runs: int) -> list[Figure]:
    """Fetch, hash and store a file over loopback, against curl, tee and sha256sum."""
    file = stage.folder / "large.raw"
    small = await _small_peak_mib(stage, file)
    await asyncio.to_thread(_fill, file, PULL_BYTES)
    ours, floor = [], []
    with _serving(file) as base, _peak_mib(stage.pids()["imaged"]) as peak:
        for number in range(runs):
            floor.append(await asyncio.to_thread(_curl, f"{base}/raw-{number}", file))
            ref = f"{base}/{number}.raw"
            begun = time.perf_counter()
            await _pulled(stage, ref)
            ours.append(time.perf_counter() - begun)
            await _ask(stage, "image.delete", {"ref": ref})
    file.unlink()
    size = f"{PULL_BYTES / 2**20:.0f} MiB"
    raw = f"{size}; the raw side is curl | tee | sha256sum, and sync"
    large, less = peak(), f"{SMALL_BYTES / 2**20:.0f} MiB"
    grown = round(large - small, 1)
    note = f"peak: {large:.1f} MiB in a pull of {size}, {small:.1f} MiB in one of {less}"
    return [
        ratio_of("pull over loopback, hashed and stored", ours, floor, PULL_BOUND, raw),
        Figure("more memory of imaged in a pull", grown, "MiB PSS", GROWTH_MIB, runs, note=note),
    ]


async def _small_peak_mib(stage: Stage, file: Path) -> float:
    """Return imaged's peak while it fetches the small image; the first fetch only warms it up."""
    await asyncio.to_thread(_fill, file, SMALL_BYTES)
    with _serving(file) as base:
        await _pulled(stage, f"{base}/first.raw")
        await _ask(stage, "image.delete", {"ref": f"{base}/first.raw"})
        with _peak_mib(stage.pids()["imaged"]) as peak:
            await _pulled(stage, f"{base}/second.raw")
            await _ask(stage, "image.delete", {"ref": f"{base}/second.raw"})
    return peak()


@contextmanager
def _peak_mib(pid: int) -> Iterator[Callable[[], float]]:
    """Yield a function: after the context, it returns the most memory that the process had."""
    seen, ended = [pss_mib(pid)], threading.Event()

    def look() -> None:
        while not ended.wait(LOOK_S):
            seen.append(pss_mib(pid))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield lambda: max(seen)
    finally:
        ended.set()
        looking.join()


async def _pulled(stage: Stage, ref: str) -> None:
    while True:
        try:
            await _ask(stage, "image.pull", {"ref": ref})
        except VirtbusError as error:
            if error.body.after_ms is None:
                raise
            await asyncio.sleep(min(error.body.after_ms / 1000, LOOK_S))
        else:
            return


def _fill(file: Path, size_bytes: int) -> None:
    """Write random bytes; the first ones are a boot sector, so that it is a raw disk."""
    piece = os.urandom(2**20)
    with file.open("wb") as out:
        out.write(bytes(510) + b"\x55\xaa")
        while out.tell() < size_bytes:
            out.write(piece[: size_bytes - out.tell()])


def _curl(url: str, beside: Path) -> float:
    target = beside.with_name("fetched.raw")
    begun = time.perf_counter()
    command = f"curl -sSf {url} | tee {target} | sha256sum >/dev/null && sync {target}"
    subprocess.run(["bash", "-o", "pipefail", "-c", command], check=True)
    took = time.perf_counter() - begun
    target.unlink()
    return took


@contextmanager
def _serving(file: Path) -> Iterator[str]:
    argv = [sys.executable, "-m", "tests.bench.data", str(file)]
    server = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        yield f"http://127.0.0.1:{int(server.stdout.readline())}"
    finally:
        server.terminate()
        server.wait(10)


async def _serve(file: Path) -> None:
    """Answer each request with the file, by sendfile."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = f"HTTP/1.1 200 OK\r\nContent-Length: {file.stat().st_size}\r\n\r\n"
        writer.write(head.encode())
        await writer.drain()
        with file.open("rb") as source:
            await asyncio.get_running_loop().sendfile(writer.transport, source)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1])))
