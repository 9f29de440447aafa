"""A Kubernetes user and their guests: real kubectl and virtctl's calls, with real guests."""

import asyncio
import json
import struct
from collections.abc import Iterator
from contextlib import AsyncExitStack, closing
from pathlib import Path

import pytest
from tests.e2e import host
from tests.e2e.bridged import Bridged, bridged, manifest
from tests.e2e.kubectl_rounds import KubectlWeb
from tests.e2e.login import Login
from tests.e2e.platform import address, tiny_image, until
from tests.e2e.stage import STAGE
from tests.e2e.test_passt import greeting, is_refused, passt
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.conftest import cluster, kubevirt
from tests.kubernetes.virtctl import VM, VMI, Socket, Virtctl

__all__ = ["cluster", "kubevirt"]

pytestmark = [pytest.mark.e2e, pytest.mark.kubernetes, pytest.mark.timeout(600)]

READY = "GUEST-NICS "
UID = "jsonpath={.metadata.uid}"
VIEWERS = 10
FIRMWARE = "c3ecdb42-282e-44c3-8266-91b99ac91261"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("registry")


@pytest.fixture(scope="module")
def bridge(kubevirt: Cluster, place: Path) -> Iterator[Bridged]:
    with bridged(STAGE, kubevirt, tiny_image(), place) as running:
        yield running


@pytest.mark.long
async def test_virtctls_calls_reach_a_guest(bridge: Bridged, tmp_path: Path) -> None:
    key = tmp_path / "key"
    host.run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key))
    public = key.with_suffix(".pub").read_text()
    bridge.apply(manifest("one", f"#cloud-config\nssh_authorized_keys: ['{public.strip()}']\n"))
    bridge.wait("vm/one", "--for=condition=Ready")
    bridge.said("one", READY)
    async with bridge.virtctl() as user, asyncio.timeout(300):
        await a_shell_is_typed_at(user)
        await a_display_is_seen(user)
        await many_look_and_one_stalls(user)
        assert await ssh_through_a_port(user, "one", key, "root", "hostname") == "one\n"
        await it_pauses_and_is_reset(user, bridge)
        await it_stops_and_starts(user, bridge)


async def test_one_manifest_under_two_names_is_two_guests_of_one_firmware(bridge: Bridged) -> None:
    """Their disks name no bus, so they are on sata."""
    for name in ("left", "right"):
        made = manifest(name)
        for disk in made["spec"]["template"]["spec"]["domain"]["devices"]["disks"]:
            disk["disk"] = {}
        bridge.apply(made)
    async with bridge.virtctl() as user, asyncio.timeout(300):
        for name in ("left", "right"):
            bridge.wait(f"vm/{name}", "--for=condition=Ready")
            bridge.said(name, READY)
            async with user.stream(VMI, name, "console") as console:
                await console.write(b"\necho uuid-$(cat /sys/class/dmi/id/product_uuid)\n")
                await console.until(f"uuid-{FIRMWARE}".encode())
                await console.write(b"\ncd /sys/block; echo disks: *\n")
                await console.until(b"disks: sda sdb sdc\r\n")


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_ten_rounds_of_an_interface_of_a_definition_by_kubectl(
    bridge: Bridged, tmp_path: Path
) -> None:
    web = KubectlWeb(bridge, Login(tmp_path))
    web.rounds(10)
    web.end()


async def a_shell_is_typed_at(user: Virtctl) -> None:
    async with user.stream(VMI, "one", "console") as console:
        await console.write(b"\necho typed-$((6*7))\n")
        await console.until(b"typed-42")


async def a_display_is_seen(user: Virtctl) -> None:
    code, picture = await user.screenshot("one")
    assert (code, picture[:8]) == (200, b"\x89PNG\r\n\x1a\n")
    async with user.stream(VMI, "one", "vnc") as display:
        assert await rfb_size(display) == struct.unpack(">II", picture[16:24])


async def rfb_size(display: Socket) -> tuple[int, int]:
    """Return the display's size, by RFB's handshake (RFC 6143 §7.1-7.3), and one whole update."""
    assert await display.exactly(12) == b"RFB 003.008\n"
    await display.write(b"RFB 003.008\n")
    assert await display.exactly(2) == b"\x01\x01"  # one security type: None
    await display.write(b"\x01")
    assert await display.exactly(4) == bytes(4)
    await display.write(b"\x01")  # shared
    width, height = struct.unpack(">HH", await display.exactly(4))
    depth = (await display.exactly(16))[0] // 8
    await display.exactly(struct.unpack(">I", await display.exactly(4))[0])
    await display.write(struct.pack(">BBHHHH", 3, 0, 0, 0, width, height))
    _, _, rectangles = struct.unpack(">BBH", await display.exactly(4))
    pixels = 0
    for _ in range(rectangles):
        _, _, w, h, _ = struct.unpack(">HHHHi", await display.exactly(12))
        await display.exactly(w * h * depth)
        pixels += w * h
    assert pixels == width * height
    return width, height


async def many_look_and_one_stalls(user: Virtctl) -> None:
    """Ten viewers, one of whom never reads: nine see every byte."""
    # less than the 64 KiB of the log that other tests read
    many = b"for i in $(seq 2000); do echo line-$i-of-many; done; echo the-$((1+1))nd-end\n"
    async with AsyncExitStack() as stack:
        opened = [
            await stack.enter_async_context(user.stream(VMI, "one", "console"))
            for _ in range(VIEWERS)
        ]
        stalled, *viewers = opened
        del stalled
        await viewers[-1].write(many)
        async with asyncio.TaskGroup() as group:
            seen = [group.create_task(viewer.until(b"the-2nd-end")) for viewer in viewers]
    wanted = b"".join(b"line-%d-of-many\r\n" % i for i in range(1, 2001))
    assert all(wanted in task.result() for task in seen)


async def ssh_through_a_port(user: Virtctl, name: str, key: Path, login: str, command: str) -> str:
    """Do the same as `virtctl ssh`; return the output of the command."""

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with user.stream(VM, name, "portforward/22/tcp") as port:

            async def back() -> None:
                while data := await port.read():
                    writer.write(data)
                    await writer.drain()
                writer.close()

            with closing(writer):
                async with asyncio.TaskGroup() as group:
                    group.create_task(back())
                    while data := await reader.read(65536):
                        await port.write(data)
                    await port.close()

    server = await asyncio.start_server(carry, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        return await asyncio.to_thread(
            host.run,
            *("ssh", "-p", str(port), "-i", str(key), "-o", "StrictHostKeyChecking=no"),
            *("-o", "UserKnownHostsFile=/dev/null", "-o", "BatchMode=yes", "-o", "LogLevel=ERROR"),
            *(f"{login}@127.0.0.1", command),
        )


async def it_pauses_and_is_reset(user: Virtctl, bridge: Bridged) -> None:
    assert await user.put(VMI, "one", "pause", {}) == (202, {})
    bridge.wait("vmi/one", "--for=condition=Paused")
    assert (await user.put(VMI, "one", "softreboot"))[0] == 409
    assert await user.put(VMI, "one", "unpause", {}) == (202, {})
    bridge.wait("vmi/one", "--for=condition=Ready")
    assert await user.put(VMI, "one", "reset") == (202, {})
    bridge.said("one", READY, times=2)


async def it_stops_and_starts(user: Virtctl, bridge: Bridged) -> None:
    def is_another() -> bool:
        found = bridge.cluster.try_kubectl("get", "vmi", "one", "-n", bridge.namespace, "-o", UID)
        return found.returncode == 0 and found.stdout != before

    before = bridge.kubectl("get", "vmi", "one", "-o", UID)
    assert await user.put(VM, "one", "restart", {"gracePeriodSeconds": 0}) == (202, {})
    until(is_another, "another VMI")
    bridge.said("one", READY)  # before that it would miss the power button
    assert await user.put(VM, "one", "stop") == (202, {})
    bridge.wait("vmi/one", "--for=delete")
    assert await user.put(VM, "one", "start", {"paused": True}) == (202, {})
    until(is_another, "a VMI")
    bridge.wait("vmi/one", "--for=condition=Paused")
    assert await user.put(VMI, "one", "unpause") == (202, {})
    bridge.said("one", READY)


@pytest.mark.parametrize("binding", ["masquerade", "passtBinding"])
def test_only_declared_ports_of_an_instance_are_reached(
    bridge: Bridged, tmp_path: Path, binding: str
) -> None:
    login = Login(tmp_path)
    name = f"declared-{binding.lower()}"
    key = Path(login.public_key).read_text(encoding="utf-8").strip()
    nic = {"name": "default", binding: {}, "ports": [{"name": "ssh", "port": 22}]}
    made = manifest(name, f"#cloud-config\nssh_authorized_keys: ['{key}']\n")
    spec = made["spec"]["template"]["spec"]
    spec["domain"]["devices"]["interfaces"] = [nic]
    spec["networks"] = [{"name": "default", "pod": {}}]
    instance = {"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance"}
    bridge.apply({**instance, "metadata": {"name": name}, "spec": spec})
    bridge.wait(f"vmi/{name}", "--for=jsonpath={.status.phase}=Running")
    bridge.said(name, READY)
    (status,) = bridge.get("vmi", name)["status"]["interfaces"]
    view = json.loads(bridge.platform.cli("vm", "get", name, "-n", bridge.namespace, "-o", "json"))
    own = address(view)
    assert (status["name"], status["ipAddress"], status["ipAddresses"]) == ("default", own, [own])
    until(lambda: greeting(own) == b"SSH-", "the declared port is reached")
    inner = "10.0.2.2" if binding == "masquerade" else own
    assert inner in login(view, "ip -4 addr show dev eth0")
    login(view, "(while true; do echo hello | nc -l -p 8080; done) >/dev/null 2>&1 </dev/null &")
    assert "hello" in login(view, "sleep 1; nc 127.0.0.1 8080 </dev/null")
    assert is_refused(own, 8080), "it is not declared"
    bridge.kubectl("delete", "vmi", name)
    until(lambda: not passt(view["uid"]), "its processes end")
