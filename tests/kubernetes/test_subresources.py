"""The aggregated API behind a real API server: rights and answers; the guest is a fake one."""

import asyncio
import hashlib
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, NamedTuple

import aiohttp
import pytest
import pytest_asyncio
from services.kubebridge.tests.manifests import SEED
from tests.e2e.platform import until
from tests.kubernetes import virtctl
from tests.kubernetes.aggregated import GROUP, HOST, registered
from tests.kubernetes.certificates import Pair
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.guest_under_test import BANNER, PICTURE, GuestUnderTest
from tests.kubernetes.virtctl import VM, VMI, Virtctl

from virtbus.bus.client.streams import ByteStream
from virtbus.bus.runtime.tasks import background
from virtbus.kubebridge.core.api.discovery import AGGREGATED, KUBEVIRT
from virtbus.kubebridge.edge import cluster as kubernetes
from virtbus.kubebridge.edge.web.application import Application
from virtbus.kubebridge.edge.web.discovery import NO_GUESTFS

pytestmark = [pytest.mark.kubernetes, pytest.mark.asyncio(loop_scope="module")]

NAME = "smoke"
BLOCK = 64 * 1024


class Desk(NamedTuple):
    """The parts of a test."""

    cluster: Cluster
    namespace: str
    guest: GuestUnderTest
    user: Virtctl
    session: aiohttp.ClientSession
    port: int

    async def kubectl(self, *argv: str, stdin: str | None = None) -> str:
        return await asyncio.to_thread(self.cluster.kubectl, *argv, stdin=stdin)

    async def change(self, kind: str, patch: dict[str, Any], *more: str) -> None:
        """Send a merge patch."""
        text = json.dumps(patch)
        await self.kubectl(
            "patch", "-n", self.namespace, kind, NAME, "--type=merge", "-p", text, *more
        )

    async def state(self, phase: str = "Running", **conditions: bool) -> None:
        listed = [{"type": kind, "status": str(on)} for kind, on in conditions.items()]
        await self.change("vmi", {"status": {"phase": phase, "conditions": listed}})

    async def vm(self) -> dict[str, Any]:
        found = await self.kubectl("get", "-n", self.namespace, "vm", NAME, "-o", "json")
        made: dict[str, Any] = json.loads(found)
        return made


def objects(namespace: str) -> str:
    template = SEED["spec"]["template"]
    vm = {**SEED, "metadata": {"name": NAME, "namespace": namespace}}
    vmi = {
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachineInstance",
        "metadata": {"name": NAME, "namespace": namespace},
        "spec": template["spec"],
        "status": {"phase": "Running"},
    }
    return "\n---\n".join(map(json.dumps, (vm, vmi)))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def desk(kubevirt: Cluster) -> AsyncIterator[Desk]:
    """The bridge's port, registered; a VM and its VMI with the status Running."""
    serving = kubevirt.authority.sign("bridge", "bridge", hosts=[HOST])
    admin = virtctl.login(
        kubevirt.authority, kubevirt.authority.sign("root", "root", groups=["system:masters"])
    )
    with kubevirt.namespace("subresources") as namespace:
        await asyncio.to_thread(kubevirt.kubectl, "create", "-f", "-", stdin=objects(namespace))
        vmi = await asyncio.to_thread(kubevirt.get, "-n", namespace, "vmi", NAME)
        guest = GuestUnderTest(vmi["metadata"]["uid"])
        async with (
            guest.running(),
            kubernetes.connect(kubevirt.kubeconfig) as api,
            virtctl.session(admin) as session,
            background() as tasks,
        ):
            site = Application(guest.bus(), api, "127.0.0.1:0")
            site.door.show(*serving)
            tasks.start(site.run(lambda: ""))
            while site.where is None:
                await asyncio.sleep(0.01)
            port = site.where[1]
            async with AsyncExitStack() as stack:
                done = registered(kubevirt, port, "v1", "v1alpha3")
                await asyncio.to_thread(done.__enter__)
                stack.push_async_callback(asyncio.to_thread, done.__exit__, None, None, None)
                user = Virtctl(session, kubevirt.url, namespace)
                yield Desk(kubevirt, namespace, guest, user, session, port)


def role_of_starter(namespace: str) -> str:
    """The user `viewer` may start VMs."""
    rbac = "rbac.authorization.k8s.io"
    meta = {"name": "starter", "namespace": namespace}
    rule = {"apiGroups": [GROUP], "resources": [f"{VM}/start"], "verbs": ["update"]}
    role = {"apiVersion": f"{rbac}/v1", "kind": "Role", "metadata": meta, "rules": [rule]}
    binding = {
        "apiVersion": f"{rbac}/v1",
        "kind": "RoleBinding",
        "metadata": meta,
        "roleRef": {"apiGroup": rbac, "kind": "Role", "name": "starter"},
        "subjects": [{"apiGroup": rbac, "kind": "User", "name": "viewer"}],
    }
    return "\n---\n".join(map(json.dumps, (role, binding)))


def _printed(desk: Desk, path: str) -> str:
    """Return the API server's object, or nothing."""
    return desk.cluster.try_kubectl("get", "--raw", path).stdout


# --- kind ----------------------------------------------------------------------------------------
async def test_virtctl_learns_the_api_version(desk: Desk) -> None:
    assert (await desk.user.version())["gitVersion"] == KUBEVIRT
    async with desk.session.get(f"{desk.cluster.url}/apis/{GROUP}/v1/guestfs") as answer:
        assert (answer.status, await answer.text()) == (501, NO_GUESTFS)


async def test_kubectl_finds_the_verbs_and_the_api_server_their_documents(desk: Desk) -> None:
    listed = await desk.kubectl("get", "--raw", f"/apis/{GROUP}/v1alpha3")
    assert "virtualmachineinstances/vnc/screenshot" in listed
    async with desk.session.get(f"{desk.cluster.url}/apis", headers={"Accept": AGGREGATED}) as got:
        assert "APIGroupDiscoveryList" in got.headers["Content-Type"]
        groups = {
            one["metadata"]["name"]: one for one in (await got.json(content_type=None))["items"]
        }
    assert {one["freshness"] for one in groups[GROUP]["versions"]} == {"Current"}
    for version in ("v1", "v1alpha3"):
        path = f"/openapi/v3/apis/{GROUP}/{version}"
        said: str = await asyncio.to_thread(until, partial(_printed, desk, path), path)
        assert f"/apis/{GROUP}/{version}/version" in json.loads(said)["paths"]


async def test_only_the_front_proxy_is_accepted(desk: Desk) -> None:
    ours, proxys = desk.cluster.authority, desk.cluster.front_proxy
    real = proxys.sign("again", "front-proxy")
    claims = {"X-Remote-User": "root", "X-Remote-Group": "system:masters"}

    async def ask(pair: Pair | None, path: str = f"/apis/{GROUP}", **more: str) -> int:
        context = ssl.create_default_context(cafile=str(ours.certificate))
        context.check_hostname = False
        if pair is not None:
            context.load_cert_chain(*pair)
        async with virtctl.session(context) as session:
            url = f"https://127.0.0.1:{desk.port}{path}"
            async with session.get(url, headers={**claims, **more}) as answer:
                return answer.status

    assert await ask(real) == 200
    assert await ask(None) == 401
    assert await ask(proxys.sign("other", "someone")) == 401, (
        "it is not the one it is allowed to be"
    )
    with pytest.raises(aiohttp.ClientError):
        await ask(ours.sign("false-proxy", "front-proxy"))
    assert await ask(real, **{"X-Remote-User": ""}) == 401
    assert [await ask(None, path) for path in ("/healthz", "/readyz")] == [200, 200]


async def test_rights_are_checked_for_each_user(desk: Desk) -> None:
    ours = desk.cluster.authority
    pair = ours.sign("viewer", "viewer")
    start = f"/apis/{GROUP}/v1/namespaces/{desk.namespace}/{VM}/{NAME}/start"
    # Without the API server, which would refuse it itself.
    proxy = virtctl.login(ours, desk.cluster.front_proxy.sign("direct", "front-proxy"))
    proxy.check_hostname = False
    async with virtctl.session(proxy) as session:
        url = f"https://127.0.0.1:{desk.port}{start}"
        headers = {"X-Remote-User": "viewer", "X-Remote-Group": "system:authenticated"}
        async with session.put(url, headers=headers) as answer:
            said = await answer.json()
    assert (answer.status, said["reason"]) == (403, "Forbidden")
    assert said["message"].startswith(
        f'{VM}.{GROUP} "{NAME}" is forbidden: User "viewer" cannot update resource '
        f'"{VM}/start" in API group "{GROUP}" in the namespace "{desk.namespace}"'
    )
    async with virtctl.session(virtctl.login(ours, pair)) as session:
        viewer = Virtctl(session, desk.cluster.url, desk.namespace)
        assert (await viewer.put(VM, NAME, "start"))[0] == 403
        await desk.kubectl("create", "-f", "-", stdin=role_of_starter(desk.namespace))
        async with asyncio.timeout(30):
            while (told := await viewer.put(VM, NAME, "start"))[0] == 403:
                await asyncio.sleep(0.05)
        assert told[0] == 409
        assert told[1]["message"].endswith(f'"{NAME}": VM is already running')
        assert (await viewer.put(VM, NAME, "stop"))[0] == 403


# --- verbs ---------------------------------------------------------------------------------------
async def test_a_power_verb_is_a_patch_of_the_vm(desk: Desk) -> None:
    await desk.state()
    assert await desk.user.put(VM, NAME, "stop", {"dryRun": ["All"]}) == (202, {})
    assert (await desk.vm())["spec"]["running"] is True
    assert await desk.user.put(VM, NAME, "restart", "gracePeriodSeconds: 0") == (202, {})
    vm = await desk.vm()
    uid = desk.guest.uid
    asked = [{"action": "Stop", "uid": uid}, {"action": "Start"}]
    assert vm["status"]["stateChangeRequests"] == asked
    assert (await desk.user.put(VM, NAME, "restart"))[0] == 409
    await desk.change("vm", {"status": None}, "--subresource=status")
    assert await desk.user.put(VM, NAME, "stop") == (202, {})
    assert (await desk.vm())["spec"]["running"] is False
    await desk.state("Succeeded")
    assert await desk.user.put(VM, NAME, "start", {}) == (202, {})
    assert (await desk.vm())["spec"]["running"] is True


async def test_verbs_of_the_guest_go_to_the_bus_and_come_back_refused(desk: Desk) -> None:
    await desk.state()
    desk.guest.asked.clear()
    for verb in ("pause", "reset", "softreboot", "freeze", "unfreeze"):
        assert await desk.user.put(VMI, NAME, verb) == (202, {})
    await desk.state(Paused=True)
    assert await desk.user.put(VMI, NAME, "unpause", {}) == (202, {})
    asked = ["pause", "reset", "soft-reboot", "freeze", "thaw", "unpause"]
    assert desk.guest.asked == asked
    code, said = await desk.user.put(VMI, NAME, "softreboot")
    assert (code, said["kind"], said["details"]["name"]) == (409, "Status", NAME)
    assert (await desk.user.put(VMI, "nobody", "pause"))[0] == 404
    assert (await desk.user.put(VM, NAME, "migrate"))[0] == 501
    assert (await desk.user.get(VM, NAME, "start"))[0] == 405


async def test_guest_agent_data_has_kubevirts_format(desk: Desk) -> None:
    await desk.state()
    code, said = await desk.user.get(VMI, NAME, "guestosinfo")
    assert (code, said["message"].rpartition(": ")[2]) == (
        409,
        "VMI does not have guest agent connected",
    )
    await desk.state(AgentConnected=True)
    _, info = await desk.user.get(VMI, NAME, "guestosinfo")
    assert (info["hostname"], info["timezone"], info["os"]["id"]) == (
        "smoke",
        "CET, 3600",
        "debian",
    )
    _, users = await desk.user.get(VMI, NAME, "userlist")
    assert users["items"] == [{"userName": "admin", "domain": "", "loginTime": 1.5}]
    _, listed = await desk.user.get(VMI, NAME, "filesystemlist")
    assert listed["items"][0]["mountPoint"] == "/"


async def test_a_vm_is_expanded_by_name_or_as_it_is_given(desk: Desk) -> None:
    code, found = await desk.user.get(VM, NAME, "expand-spec")
    assert (code, found["spec"]["template"]) == (200, (await desk.vm())["spec"]["template"])
    assert await desk.user.expand(SEED) == (200, SEED)
    code, said = await desk.user.expand({"metadata": {"namespace": "other"}, "spec": {}})
    assert (code, said["message"]) == (400, f"VM namespace must be empty or {desk.namespace}")
    lines = [f"  a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 6)]
    bomb = "\n".join(["spec:", "  a0: &a0 [x]", *lines])
    code, said = await desk.user.expand(bomb)
    assert (code, "Can not unmarshal" in said["message"]) == (400, True), (
        "a megabyte of 300 bytes; each line more makes it nine"
    )


async def test_a_body_that_cannot_be_read_or_is_too_long_is_refused(desk: Desk) -> None:
    merges = "a0: &a0 {k: v}\n" + "".join(
        f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}\n" for n in range(1, 90)
    )
    bodies = {"{": 400, "[" * 4000: 400, "- a": 400, " " * 5000: 413, merges: 400}
    await desk.state("Succeeded")
    for body, code in bodies.items():
        assert (await desk.user.put(VM, NAME, "stop", body))[0] == code, body[:20]


# --- streams -------------------------------------------------------------------------------------
async def test_a_console_is_typed_at_until_the_guest_ends(desk: Desk) -> None:
    await desk.state()
    async with desk.user.stream(VMI, NAME, "console") as socket:
        await socket.until(b"login: ")
        await socket.write(b"quit\n")
        await socket.until(b"quit\n")
        assert await socket.read() == b""
        assert socket.code == 1006, "virtctl tells what that may mean"
    assert desk.guest.opened[-1].owner == "root"
    desk.guest.left.clear()
    async with desk.user.stream(VMI, NAME, "console", protocol="") as socket:
        await socket.until(b"login: ")
    await asyncio.wait_for(desk.guest.left.wait(), 30)


async def test_an_impossible_stream_is_refused_before_it_opens(desk: Desk) -> None:
    async def refusal(resource: str, verb: str) -> int:
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            async with desk.user.stream(resource, NAME, verb):
                pass
        return refused.value.status

    await desk.state("Scheduled")
    assert await refusal(VMI, "console") == 400, "virtctl waits for as long as it hears this"
    await desk.state()
    assert await refusal(VMI, "portforward/1") == 409
    assert await refusal(VM, "portforward/99999/tcp") == 400
    assert await refusal(VMI, "usbredir") == 501
    code, said = await desk.user.get(VMI, NAME, "console")
    assert (code, said["reason"]) == (400, "BadRequest")


async def test_ports_carry_bytes_and_datagrams_of_a_vm_and_a_vmi(desk: Desk) -> None:
    await desk.state()
    block = hashlib.sha256(b"x").digest() * 64 * 1024
    async with desk.user.stream(VM, NAME, "portforward/22") as socket, background() as tasks:
        tasks.start(socket.write(block))
        assert await socket.exactly(len(block)) == block
    async with desk.user.stream(VMI, NAME, "portforward/22/tcp") as socket:
        await socket.write(b"bye")
        assert await socket.read() == b""
        assert socket.code == 1000
    async with desk.user.stream(VMI, NAME, "portforward/53/udp") as socket:
        for datagram in (b"a", b"b" * 20_000):
            await socket.write(datagram)
            assert await socket.read() == datagram
    assert desk.guest.opened[-1].model_dump()["protocol"] == "udp"


async def test_a_display_and_its_picture(desk: Desk) -> None:
    await desk.state()
    async with desk.user.stream(VMI, NAME, "vnc") as socket:
        assert await socket.exactly(len(BANNER)) == BANNER
        await socket.write(BANNER)
        assert await socket.exactly(len(BANNER)) == BANNER
    assert await desk.user.screenshot(NAME) == (200, PICTURE)


async def test_a_stalled_viewer_delays_only_its_own_stream(desk: Desk) -> None:
    await desk.state()
    sent = 0

    async def talk(stream: ByteStream) -> None:
        nonlocal sent
        while True:
            await stream.write(b"x" * BLOCK)
            sent += BLOCK

    desk.guest.says = talk
    try:
        async with desk.user.stream(VMI, NAME, "console"):
            async with asyncio.timeout(30):
                before = -1
                while sent != before or not sent:
                    before = sent
                    await asyncio.sleep(0.3)
            async with desk.user.stream(VMI, NAME, "portforward/22") as other:
                await other.write(b"hello")
                assert await other.exactly(5) == b"hello"
    finally:
        desk.guest.says = None
