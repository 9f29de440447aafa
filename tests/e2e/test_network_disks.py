"""Volumes on servers: a guest waits while its server is away, then continues and has lost nothing.

One body for all kinds of servers. The guests use QEMU's own drivers.
"""

import asyncio
import os
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from tests.e2e import host
from tests.e2e.platform import Platform, standing, until
from tests.e2e.stage import STAGE
from tests.e2e.storage_servers import DISK_BYTES, Iscsi, Nbd, NbdTls, Nfs, Rbd, StorageServer

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(300)]

KINDS: Mapping[str, type[StorageServer]] = {
    "nbd": Nbd,
    "nbd-tls": NbdTls,
    "iscsi": Iscsi,
    "nfs": Nfs,
    "rbd": Rbd,
}
PROBE_S, BUSY_S = 4.0, 6.0
"""The interval of the agent's probes, and what a busy machine adds."""
END_S = 60.0
"""libvirt waits 15 s for a QEMU that does not end, then kills it."""
WRITE = """#!/bin/sh
n=0
while [ $n -lt 2000 ]; do
  n=$((n+1))
  echo line-$n | dd of=/dev/vdb bs=512 seek=$n conv=fsync,sync 2>/dev/null || echo LOST > /dev/ttyS0
  echo "WROTE $n." > /dev/ttyS0
  sleep 0.2
done
"""


def restart_libvirtd() -> None:
    """Restart libvirtd of a host that the tests made, so that it reads qemu.conf."""
    assert host.BOX.exists(), "run these tests by tools/in-own-host"
    os.kill(int(host.LIBVIRTD_PID.read_text()), signal.SIGTERM)
    until(lambda: not host.LIBVIRTD_PID.exists(), "libvirtd has ended")
    host.run("libvirtd", "-d")
    alive = ("virsh", "-q", "-r", "-c", "qemu:///system", "uri")
    until(lambda: host.run(*alive, check=False).strip(), "libvirtd answers")


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, StorageServer]:
    """A server of each kind, none of which runs."""
    base = tmp_path_factory.mktemp("servers")
    conf = Path("/etc/libvirt/qemu.conf")
    assert host.BOX.exists(), "run these tests by tools/in-own-host"
    found = {name: kind(name, base / name) for name, kind in KINDS.items()}
    conf.write_text(f'nbd_tls_x509_cert_dir = "{NbdTls.clients}"\n', encoding="utf-8")
    restart_libvirtd()
    return found


@pytest.fixture(scope="module")
def platform(servers: dict[str, StorageServer]) -> Iterator[Platform]:
    """A platform whose node has a pool on each server."""

    def add_pools(held: Platform) -> None:
        file = held.base / "pools.toml"
        pools = "\n".join(one.pool for one in servers.values())
        file.write_text(f"{file.read_text()}\n{pools}", encoding="utf-8")

    with STAGE.apart({}, add_pools) as held:
        yield held


def written(platform: Platform) -> int:
    """Return the number of the last line that the guest has written."""
    return platform.console_log("web").count("WROTE ")


@pytest.mark.parametrize("name", KINDS)
def test_a_guest_waits_for_its_server_and_continues(
    platform: Platform, servers: dict[str, StorageServer], name: str, tmp_path: Path
) -> None:
    server, script = servers[name], tmp_path / "user-data"
    script.write_text(WRITE)
    with server.running():
        until(lambda: platform.pool(name)["state"] == "Ready", lambda: str(platform.pool(name)))
        until(lambda: platform.pool(name)["place_bytes"], lambda: str(platform.pool(name)))
        pool = platform.pool(name)
        assert pool["place_bytes"] == {f"default.{name}": pool["size_bytes"]}
        assert (pool["size_bytes"], pool["places_confirmed_ns"]) == (DISK_BYTES, 0)
        large = platform.try_cli("volume", "create", name, "--size", "9MiB", "--pool", name)
        assert "has 8MiB, and the volume 9MiB" in large.stderr
        platform.cli("volume", "create", name, "--size", "8MiB", "--pool", name)
        use = ("--image", "tiny", "--memory", "128MiB", "--user-data", str(script))
        platform.create("web", *use, "--volume", name, wait="ready")
        until(lambda: written(platform) > 3, lambda: platform.console_log("web")[-2000:])
        assert platform.pool(name)["state"] == "Ready"
        assert not platform.get("web").get("message")
        refuse_leaks(platform, server.secret)
    began_s = time.monotonic()
    until(lambda: f"the server of the pool {name}" in message(platform), "the guest waits")
    waited_s = time.monotonic() - began_s
    assert waited_s < PROBE_S + BUSY_S, f"it took {waited_s:.1f} s"
    assert platform.get("web")["state"] == ("Running" if server.stalls else "Paused")
    until(lambda: platform.pool(name)["state"] == "Gone", "the pool is gone")
    assert platform.pool(name)["places_confirmed_ns"], "the size is kept with its age"
    assert "start it" in platform.pool(name)["message"]  # it refuses, or a probe was under way
    platform.create("other", "--image", "tiny", "--memory", "128MiB", wait="ready")
    platform.delete("other")

    before = written(platform)
    with server.running():
        until(lambda: written(platform) > before + 3, lambda: str(platform.get("web")))
        assert platform.get("web")["state"] == "Running"
        assert "LOST" not in platform.console_log("web")
        until(lambda: not message(platform), "the status is well again")
        last = written(platform)
        platform.delete("web")
        lines = server.content()
        for number in range(1, last):
            assert lines[number * 512 :].startswith(f"line-{number}\n".encode()), number
        platform.create("web", *use, "--volume", name, wait="ready")
        until(lambda: written(platform) > 3, lambda: platform.console_log("web")[-2000:])
    began_s = time.monotonic()
    platform.delete("web")  # its disk cannot be closed in order
    assert time.monotonic() - began_s < END_S
    platform.cli("volume", "delete", name)
    platform.nothing_left()


def message(platform: Platform) -> str:
    """Return the message of the guest's status."""
    return str(platform.get("web").get("message", ""))


def refuse_leaks(platform: Platform, secret: str) -> None:
    """Fail if the secret of a login is where somebody without rights to it could find it."""
    known = host.run("virsh", "-q", "-c", "qemu:///system", "secret-list")
    assert not known.strip(), "libvirt keeps a secret after the start"
    if not secret:
        return
    uid = platform.get("web")["uid"]
    (pid,) = host.qemu_pids(uid)
    domain = ("virsh", "-c", "qemu:///system", "dumpxml", "--security-info", f"vb-{uid}")
    logs = [platform.log, *Path("/var/log/libvirt/qemu").glob("vb-*.log")]
    logs += Path("/var/log/libvirt/qemu").glob("virtbus-sizes-*.log")
    places = {
        "the arguments": Path(f"/proc/{pid}/cmdline").read_text(errors="replace"),
        "the XML": host.run(*domain),
        **{str(log): log.read_text(errors="replace") for log in logs},
        "the records": asyncio.run(stored(platform)),
    }
    for file in Path("/run/libvirt/qemu").glob(f"*{uid}*.xml"):
        places[str(file)] = file.read_text()
    assert "virtbus" in places["the XML"], "the login is in use"
    assert not [place for place, text in places.items() if secret in text]


async def stored(platform: Platform) -> str:
    """Return all values of the bus as text."""
    async with platform.bus("admin") as admin:
        found = [await standing(admin, f"$KV.{bucket}.>") for bucket in ("vm", "sec", "st", "node")]
    values = (value for held in found for value in held.values())
    return "\n".join(value.decode(errors="replace") for value in values)
