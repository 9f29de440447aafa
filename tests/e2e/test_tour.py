"""KubeVirt's unchanged smoke manifest with a whole Debian, and virtctl's actions on it."""

import asyncio
from pathlib import Path

import pytest
from tests.e2e import host
from tests.e2e.bridged import SEED, Bridged, bridged
from tests.e2e.login import MIRROR, MIRROR_PORT
from tests.e2e.stage import STAGE
from tests.e2e.test_debian import BOOT_S, debian_image
from tests.e2e.test_kubernetes import READY, rfb_size, ssh_through_a_port
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.conftest import cluster, kubevirt
from tests.kubernetes.virtctl import VM, VMI, Virtctl

__all__ = ["cluster", "kubevirt"]

pytestmark = [pytest.mark.e2e, pytest.mark.kubernetes, pytest.mark.long, pytest.mark.timeout(1800)]

NAME = "kubevirt-smoke-fedora"


def test_the_smoke_manifest_becomes_a_guest_that_is_logged_in_to(
    kubevirt: Cluster, tmp_path: Path
) -> None:
    with bridged(STAGE, kubevirt, debian_image(), tmp_path) as bridge:
        bridge.kubectl("apply", "-f", str(SEED))
        bridge.wait(f"vm/{NAME}", "--for=condition=Ready")
        assert "unchanged" in bridge.kubectl("apply", "-f", str(SEED))
        bridge.kubectl("diff", "-f", str(SEED))
        bridge.said(NAME, READY, within_s=BOOT_S)  # once it prints, it has its password
        asyncio.run(tour(bridge, tmp_path))


async def tour(bridge: Bridged, folder: Path) -> None:
    async with bridge.virtctl() as user, asyncio.timeout(BOOT_S):
        await it_is_logged_in_to(user, public_key(folder))
        key = folder / "key"
        assert await ssh_through_a_port(user, NAME, key, "debian", "hostname") == f"{NAME}\n"
        await ssh_through_a_port(user, NAME, key, "debian", MIRROR)
        await its_datagrams_come_and_go(user)
        bridge.wait(f"vmi/{NAME}", "--for=condition=AgentConnected")
        await the_guest_tells_of_itself(user)
        async with user.stream(VMI, NAME, "vnc") as display:
            assert min(await rfb_size(display)) > 0
        await it_reboots(user)
        await it_shuts_down_and_starts(user, bridge)


def public_key(folder: Path) -> str:
    host.run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "key"))
    return (folder / "key.pub").read_text().strip()


async def it_is_logged_in_to(user: Virtctl, key: str) -> None:
    """Log in with the password of the manifest."""
    async with user.stream(VMI, NAME, "console") as console:
        await console.write(b"\n")
        await console.until(b"login: ")
        await console.write(b"debian\n")
        await console.until(b"Password: ")
        await console.write(b"changeme\n")
        await console.until(b"debian@")
        await console.write(f"mkdir -p .ssh; echo '{key}' >.ssh/authorized_keys\n".encode())
        await console.write(b"echo typed-$((6*7))\n")
        await console.until(b"typed-42")


async def its_datagrams_come_and_go(user: Virtctl) -> None:
    async with user.stream(VM, NAME, f"portforward/{MIRROR_PORT}/udp") as port:
        await port.write(b"ping")
        assert await port.read() == b"gnip"
        await port.write(b"x" * 1400)
        assert await port.read() == b"x" * 1400


async def the_guest_tells_of_itself(user: Virtctl) -> None:
    _, info = await user.get(VMI, NAME, "guestosinfo")
    assert (info["hostname"], info["os"]["id"]) == (NAME, "debian")
    _, users = await user.get(VMI, NAME, "userlist")
    assert "debian" in {one["userName"] for one in users["items"]}
    _, listed = await user.get(VMI, NAME, "filesystemlist")
    assert "/" in {one["mountPoint"] for one in listed["items"]}


async def it_reboots(user: Virtctl) -> None:
    async with user.stream(VMI, NAME, "console") as console:
        assert await user.put(VMI, NAME, "softreboot") == (202, {})
        await console.until(b"reboot: ")
        await console.until(b"login: ")


async def it_shuts_down_and_starts(user: Virtctl, bridge: Bridged) -> None:
    assert (await user.get(VM, NAME, "expand-spec"))[0] == 200
    assert await user.put(VM, NAME, "stop") == (202, {})
    bridge.wait(f"vmi/{NAME}", "--for=delete", within_s=BOOT_S)
    assert await user.put(VM, NAME, "start") == (202, {})
    bridge.wait(f"vm/{NAME}", "--for=condition=Ready")
