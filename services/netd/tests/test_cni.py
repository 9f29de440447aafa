"""CNI with the real plugins, and with plugins that misbehave (NET-10, NET-11)."""

import asyncio
import json
import subprocess
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

import pytest
from services.netd.tests.pretended_host import Node, make_record
from services.netd.tests.test_dhcp import request
from services.netd.tests.test_dhcp_server import reply
from services.netd.tests.test_network_path import world

from virtbus.netd.core.cni_results import remains
from virtbus.netd.core.dhcp import MessageType
from virtbus.schemas.cni_config import plugins_digest
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.node_rpc import NetPhase
from virtbus.schemas.vm import VmRecord

pytestmark = pytest.mark.integration

A = "0192f0c1-2d3e-7abc-8def-00000000000a"
B = "0192f0c1-2d3e-7abc-8def-00000000000b"
GATEWAY = IPv4Address("10.88.0.1")


def conflist(node: Node, name: str, *plugins: dict[str, Any]) -> None:
    text = json.dumps({"cniVersion": "1.0.0", "name": name, "plugins": plugins})
    (node.conf_dir / f"{name}.conflist").write_text(text)


def bridge(node: Node, **more: Any) -> dict[str, Any]:
    ipam = {
        "type": "host-local",
        "ranges": [[{"subnet": "10.88.0.0/24"}]],
        "routes": [{"dst": "0.0.0.0/0"}, {"dst": "192.0.2.0/24", "gw": "10.88.0.9"}],
        "dataDir": str(node.host.tmp / "ipam"),
    }
    common = {"type": "bridge", "bridge": "cnitest0", "isGateway": True, "mtu": 1400}
    return {**common, "ipam": ipam, **more}


def plugin(node: Node, name: str, script: str) -> None:
    """A plugin of our own, which records each of its commands."""
    directory = node.host.tmp / "cni-bin"
    directory.mkdir(exist_ok=True)
    path = directory / name
    path.write_text(f'#!/bin/sh\necho "$CNI_COMMAND" >> {directory}/{name}.log\n{script}\n')
    path.chmod(0o755)


def commands(node: Node, name: str) -> list[str]:
    return (node.host.tmp / "cni-bin" / f"{name}.log").read_text().split()


def leases(node: Node) -> list[str]:
    return sorted(path.name for path in (node.host.tmp / "ipam").glob("*/10.*"))


def without_bridge() -> None:
    """Remains of the bridge plugin by design: its bridge, and enabled forwarding."""
    subprocess.run(["ip", "link", "del", "cnitest0"], check=False)
    Path("/proc/sys/net/ipv4/ip_forward").write_text("0")


async def test_a_conflist_with_other_plugins_than_the_record_names_is_refused(node: Node) -> None:
    conflist(node, "lan", bridge(node))
    record = make_record(A, networks=("lan",))

    def named(digest: str, network: str = "lan") -> VmRecord:
        one = record.spec.networks[0].model_copy(
            update={"plugins_digest": digest, "network": network}
        )
        spec = record.spec.model_copy(update={"networks": (one,)})
        return record.model_copy(update={"spec": spec})

    other = plugins_digest({"type": "macvlan", "master": "eth1"})
    for network, why in (("lan", "another one"), ("default", "it is a bridge network")):
        with pytest.raises(VirtbusError, match=why) as error:
            await node.attachments.ensure(named(other, network))
        assert [one.path for one in error.value.body.details] == ["spec.networks[0].network"]
    assert node.host.census()["netns"] == []
    try:
        ready = await node.attachments.ensure(named(plugins_digest(bridge(node))))
        assert ready.phase is NetPhase.READY
    finally:
        await node.attachments.release(A, 1)
        without_bridge()


async def test_the_guest_takes_address_and_mac_of_the_plugins(node: Node) -> None:
    conflist(node, "lan", bridge(node, capabilities={"mac": True}))
    ready = await node.attach(A, networks=("lan",))
    try:
        (interface,) = ready.interfaces
        assert [told.phase for told in node.begun] == [NetPhase.BEGUN]
        assert node.begun[0].interfaces[0].mac == interface.mac
        assert interface.addresses[0].endswith("/24")
        assert (interface.gateway, interface.mtu) == ("10.88.0.1", 1400)
        assert node.inside(A, "ip -4 -o addr show dev eth0") == ""
        async with node.guest(A) as guest:
            await guest.ping(GATEWAY)
            message = request(MessageType.DISCOVER, mac=guest.mac)
            any_address = IPv4Address("255.255.255.255")
            guest.send(
                guest.udp(b"\xff" * 6, any_address, (68, 67), message, source=IPv4Address(0))
            )
            offer = await reply(guest)
            assert offer[16:20] == guest.ip.packed
            assert bytes([24, 192, 0, 2, 10, 88, 0, 9, 0, 10, 88, 0, 1]) in offer
            assert b"\x1a\x02\x05\x78" in offer
        assert await node.attachments.release(A, 1)
        assert leases(node) == []
    finally:
        without_bridge()


STATIC = {"type": "static", "addresses": [{"address": "10.88.0.200/24"}]}


@pytest.mark.parametrize("ipam", ["host-local", "static"])
async def test_a_static_address_comes_by_the_capability_ips(node: Node, ipam: str) -> None:
    more = {"ipam": STATIC} if ipam == "static" else {}
    conflist(node, "lan", bridge(node, capabilities={"ips": True}, **more))
    try:
        ready = await node.attach(A, networks=("lan",), nics=({"addresses": ["10.88.0.77"]},))
        assert ready.interfaces[0].addresses == ("10.88.0.77/24",)
        await node.attachments.release(A, 1)
        assert leases(node) == []
    finally:
        without_bridge()


async def test_a_static_address_that_the_plugins_do_not_take_is_refused(node: Node) -> None:
    conflist(node, "lan", bridge(node))
    asked = {"networks": ("lan",), "nics": ({"addresses": ["10.88.0.77"]},)}
    with pytest.raises(VirtbusError, match="add the capability ips") as refused:
        await node.attach(A, **asked)
    assert refused.value.body.details[0].path == "spec.domain.devices.interfaces[0].addresses"
    assert node.host.census()["netns"] == []
    conflist(node, "lan", bridge(node, capabilities={"ips": True}, ipam=STATIC | {"type": "deaf"}))
    result = {"cniVersion": "1.0.0", "ips": [{"address": "10.88.0.200/24"}]}
    plugin(node, "deaf", f"echo '{json.dumps(result)}'")
    try:
        with pytest.raises(VirtbusError, match=r"lacks 10\.88\.0\.77, which was asked"):
            await node.attach(A, **asked)
        assert node.host.census()["netns"] == []
        assert commands(node, "deaf") == ["ADD", "DEL"]
    finally:
        without_bridge()


async def test_a_network_is_closed_to_namespaces_that_its_setting_does_not_name(
    node: Node,
) -> None:
    conflist(node, "team-only", bridge(node))
    with pytest.raises(VirtbusError, match="not open to the namespace 'default'") as refused:
        await node.attach(A, networks=("team-only",))
    assert refused.value.reason == "network_closed"
    assert node.host.census()["netns"] == []
    ready = await node.attach(A, networks=("team-only",), namespace="team")
    assert ready.phase is NetPhase.READY
    await node.attachments.release(A, 1)
    without_bridge()


async def test_a_chain_with_masquerade_portmap_and_firewall_leaves_no_rule(node: Node) -> None:
    chain = (
        bridge(node, ipMasq=True),
        {"type": "portmap", "capabilities": {"portMappings": True}},
        {"type": "firewall"},
    )
    conflist(node, "lan", *chain)
    with world():
        await node.attach(A, networks=("lan",))
        async with node.guest(A) as guest:
            await guest.ping(IPv4Address("198.51.100.2"), via=GATEWAY)
        assert "10.88.0." in rules()
        await node.attachments.release(A, 1)
        assert "10.88.0." not in rules()
    without_bridge()
    forget_rules()


def rules() -> str:
    save = ["iptables-save"]
    return subprocess.run(save, capture_output=True, text=True, check=True).stdout


def forget_rules() -> None:
    """The plugins keep their empty chains; the namespace's census must be as before."""
    subprocess.run(["nft", "flush", "ruleset"], check=True)


async def test_delete_works_when_namespace_and_configuration_are_gone(node: Node) -> None:
    conflist(node, "lan", bridge(node, ipMasq=True))
    ready = await node.attach(A, networks=("lan",))
    (node.conf_dir / "lan.conflist").unlink()
    node.stop()
    node.host.namespaces.remove(ready.interfaces[0].netns)
    await node.start()
    await node.attachments.release(A, 1)
    assert leases(node) == []
    assert "10.88.0." not in rules()
    without_bridge()
    forget_rules()


async def test_a_removed_plugin_does_not_stop_the_release(node: Node) -> None:
    plugin(node, "noop", "cat | sed 's/.*\"prevResult\": //; s/}$//'")
    conflist(node, "lan", bridge(node), {"type": "noop"})
    await node.attach(A, networks=("lan",))
    (node.host.tmp / "cni-bin" / "noop").unlink()
    await node.attachments.release(A, 1)
    assert leases(node) == []
    without_bridge()


async def test_after_a_reboot_the_plugins_run_again(node: Node) -> None:
    conflist(node, "lan", bridge(node))
    ready = await node.attach(A, networks=("lan",))
    node.stop()
    node.host.namespaces.remove(ready.interfaces[0].netns)
    await node.start()
    again = await node.attach(A, networks=("lan",))
    assert again.interfaces[0].mac == ready.interfaces[0].mac
    assert len(leases(node)) == 1
    async with node.guest(A) as guest:
        await guest.ping(GATEWAY)
    without_bridge()


async def test_a_restart_keeps_the_attachment(node: Node) -> None:
    conflist(node, "lan", bridge(node))
    await node.attach(A, networks=("lan", "default"))
    async with node.guest(A) as guest:
        await node.restart()
        await guest.ping(GATEWAY)
        ready = await node.attach(A, networks=("lan", "default"))
        assert ready.phase is NetPhase.READY
    await node.attachments.release(A, 1)
    without_bridge()


async def test_plugins_that_choose_the_mac_are_attached_before_the_start_next_time(
    node: Node,
) -> None:
    insist = "ip netns exec $(basename $CNI_NETNS) true; nsenter --net=$CNI_NETNS ip link set"
    plugin(
        node,
        "own-mac",
        'if [ "$CNI_COMMAND" = ADD ]; then\n'
        "sed 's/.*\"prevResult\": //; s/}$//' > $0.result\n"
        f"{insist.split('; ')[1]} $CNI_IFNAME address 02:00:00:00:00:42\n"
        'sed -E "s/(\\"mac\\": \\")[^\\"]*(\\", \\"sandbox\\": \\"\\/)'
        '/\\102:00:00:00:00:42\\2/" $0.result\nfi',
    )
    conflist(node, "lan", bridge(node), {"type": "own-mac"})
    with pytest.raises(VirtbusError, match="02:00:00:00:00:42") as refused:
        await node.attach(A, networks=("lan",))
    assert refused.value.reason == "cni_mac"
    (detail,) = refused.value.body.details
    assert detail.path == "spec.domain.devices.interfaces[0].mac_address"
    assert leases(node) == []
    node.begun.clear()
    ready = await node.attach(A, networks=("lan",))
    assert node.begun == []
    assert ready.interfaces[0].mac == "02:00:00:00:00:42"
    async with node.guest(A) as guest:
        await guest.ping(GATEWAY)
    await node.attachments.release(A, 1)
    without_bridge()


@pytest.mark.parametrize(
    ("script", "reason", "words"),
    [
        ("sleep 60 & echo $! > $0.child; sleep 60", "cni_failed", "no answer in 2 s"),
        ("sleep 60 & echo $! > $0.child", "cni_failed", "no answer in 2 s"),
        ("exit 0", "cni_result", "printed no result"),
        ("echo '[]'", "cni_result", "printed no result"),
        ('echo \'{"ips": [{"address": "10.88"}]}\'', "cni_result", "cannot be used"),
        ("yes | head -c 100000000", "cni_failed", "printed more than"),
        ('echo \'{"code": 7, "msg": "no leases"}\'; exit 1', "cni_failed", "no leases"),
        ("echo oops >&2; exit 3", "cni_failed", "oops"),
    ],
)
async def test_the_effects_of_a_misbehaving_plugin_are_reverted(
    node: Node, script: str, reason: str, words: str
) -> None:
    plugin(node, "bad", f'[ "$CNI_COMMAND" = DEL ] && exit 0\n{script}')
    conflist(node, "lan", bridge(node), {"type": "bad"})
    with pytest.raises(VirtbusError, match=words) as refused:
        await node.attach(A, networks=("lan",))
    assert refused.value.reason == reason
    assert [one.path for one in refused.value.body.details] == ["spec.networks[0].network"]
    assert leases(node) == []
    assert commands(node, "bad") == ["ADD", "DEL"]
    assert node.host.census()["netns"] == []
    child = node.host.tmp / "cni-bin" / "bad.child"
    assert not (child.exists() and runs(child.read_text().strip()))
    without_bridge()


LEAKING = """
if [ "$CNI_COMMAND" = ADD ]; then
    ip link add leak0 type veth peer name leak1
    ip link add leak2 type veth peer name leak3 netns $CNI_NETNS
    ip link add leak4 type bridge
fi
[ "$CNI_COMMAND" = DEL ] && exit 0
echo no more >&2
exit 1
"""


async def test_links_that_plugins_leave_on_the_host_are_named_and_stay(node: Node) -> None:
    plugin(node, "leaks", LEAKING)
    conflist(node, "lan", bridge(node), {"type": "leaks"})
    await node.attach(B)
    try:
        with pytest.raises(VirtbusError, match="no more") as refused:
            await node.attach(A, networks=("lan",))
        message = "the plugins left links on this host: leak0, leak1; remove them: ip link delete"
        assert str(refused.value).endswith(message)
        assert refused.value.body.details[0].path == "spec.networks[0].network"
        assert {"leak0", "leak1"} <= node.host.census()["links"]
    finally:
        subprocess.run(["ip", "link", "del", "leak0"], check=False)
        subprocess.run(["ip", "link", "del", "leak4"], check=False)
        without_bridge()


def runs(pid: str) -> bool:
    """Return False for a zombie, which has no command line: PID 1 may reap it late."""
    cmdline = Path("/proc", pid, "cmdline")
    return cmdline.exists() and cmdline.read_bytes() != b""


def stubborn(node: Node) -> None:
    """A network with a plugin whose DEL fails until there is a file."""
    plugin(
        node,
        "stubborn",
        'if [ "$CNI_COMMAND" = DEL ]; then [ -e $0.ok ] || { echo busy >&2; exit 1; }; '
        "else sed 's/.*\"prevResult\": //; s/}$//'; fi",
    )
    conflist(node, "lan", bridge(node), {"type": "stubborn"})


async def test_a_release_that_a_plugin_refuses_can_be_repeated(node: Node) -> None:
    stubborn(node)
    await node.attach(A, networks=("lan",))
    with pytest.raises(VirtbusError, match="busy"):
        await node.attachments.release(A, 1)
    assert A in node.attachments.resources()
    (node.host.tmp / "cni-bin" / "stubborn.ok").touch()
    await node.attachments.release(A, 1)
    assert A not in node.attachments.resources()
    assert leases(node) == []
    without_bridge()


async def test_a_forced_release_gives_up_what_a_plugin_does_not_undo(node: Node) -> None:
    stubborn(node)
    await node.attach(A, networks=("lan",))
    told: list[tuple[str, str]] = []
    node.attachments.given_up = lambda vm, error: told.append((remains(vm.nics), str(error)))
    for forced in (True, True, False):
        with pytest.raises(VirtbusError, match=r"busy; it is run again.*vm delete --force"):
            await node.attachments.release(A, 1, forced=forced)
    assert await node.attachments.release(A, 1, forced=True)
    assert A not in node.attachments.resources()
    ((left, why),) = told
    assert ("cnitest0, veth" in left, "10.88.0." in left, "busy" in why) == (True, True, True)
    assert leases(node) == [], "the other plugins were run"
    without_bridge()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "it is not JSON"),
        ("[]", "it is not a JSON object"),
        ('{"name": "lan", "cniVersion": "1.0.0", "plugins": []}', "at least one plugin"),
        ('{"name": "lan", "type": "../../bin/sh"}', "must be the file name of a plugin"),
        ('{"name": "../lan", "type": "bridge"}', "`name` must be a word"),
        ('{"name": "lan", "type": "bridge", "cniVersion": 1}', "`cniVersion` must be"),
        ('{"name": "lan", "type": "nonesuch"}', "no CNI plugin 'nonesuch'"),
        ('{"name": "lan", "type": "bridge", "cniVersion": 2}', "correct it, and create"),
        ('{"name": "other", "type": "bridge"}', "no network 'lan' on this node; known: default, o"),
    ],
)
async def test_an_impossible_configuration_names_the_cause(
    node: Node, text: str, words: str
) -> None:
    (node.conf_dir / "10-lan.conf").write_text(text)
    with pytest.raises(VirtbusError, match=words.replace("../", r"\.\./")) as refused:
        await node.attach(A, networks=("lan",))
    assert refused.value.body.details[0].path == "spec.networks[0].network"
    assert node.host.census()["netns"] == []


async def test_a_file_that_cannot_be_read_refuses_only_its_own_network(node: Node) -> None:
    (node.conf_dir / "00-gone.conf").symlink_to("nowhere")
    (node.conf_dir / "01-folder.conflist").mkdir()
    conflist(node, "lan", bridge(node))
    for name in ("gone", "folder"):
        with pytest.raises(VirtbusError, match="cannot be read") as refused:
            await node.attach(B, networks=(name,))
        assert refused.value.body.reason == "cni_config"
    await node.attach(A, networks=("lan",))
    await node.attachments.release(A, 1)
    without_bridge()


async def test_two_vms_share_a_cni_network_and_reach_each_other(node: Node) -> None:
    conflist(node, "lan", bridge(node))
    async with asyncio.TaskGroup() as group:
        group.create_task(node.attach(A, networks=("lan",)))
        group.create_task(node.attach(B, networks=("lan",)))
    async with node.guest(A) as one, node.guest(B) as other:
        await one.ping(other.ip)
    await node.attachments.release(A, 1)
    await node.attachments.release(B, 1)
    without_bridge()
