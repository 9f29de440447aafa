"""`vm nic add`, `vm nic remove` and `vm net`: the update of the spec, and the explanation."""

import json
from typing import Any

import pytest
from cli.tests.fakes import UID, Cli, Script, vm_view

from virtbus.bus.client.ports import Endpoint, Request, ServiceInfo
from virtbus.cli.vm.net_text import explained
from virtbus.schemas.network import InterfaceStatus, PlugState
from virtbus.schemas.network_path import NetworkAsk, NetworkView, NicPath, PathFault
from virtbus.schemas.subjects import rpc
from virtbus.schemas.vm import Devices, Domain, Interface, Network, VmSpec
from virtbus.schemas.wire import validate

pytestmark = pytest.mark.integration

SPEC = VmSpec(
    domain=Domain(devices=Devices(interfaces=(Interface(name="default"),))),
    networks=(Network(name="default"),),
)
OUTSIDE = {"state": "ready", "guest_runs": True, "netns": f"vb-{UID}", "node": "n1"}


async def changed(script: Script, cli: Cli, words: str) -> tuple[list[Any], list[Any]]:
    """Return the interfaces and networks of the update that a command sends."""
    ended = await cli("vm", "nic", *words.split())
    assert ended.code == 0, ended.err
    data = script.data("vm.update")[-1]
    assert (data["uid"], data["revision"]) == (UID, 7)
    spec = data["spec"]
    return spec["domain"]["devices"]["interfaces"], spec["networks"]


async def test_an_interface_is_added_with_its_network_and_removed(script: Script, cli: Cli) -> None:
    script.answer("vm", "get", vm_view(spec=SPEC))
    script.answer("vm", "update", vm_view(spec=SPEC))
    words = "add web --network lan --mac 02:00:5e:10:00:01 --model e1000e --mtu 1400"
    (_, nic), networks = await changed(script, cli, words)
    mac = "02:00:5e:10:00:01"
    assert nic == {"name": "lan", "mac_address": mac, "model": "e1000e", "mtu": 1400}
    assert [(one["name"], one["network"]) for one in networks] == [
        ("default", "default"),
        ("lan", "lan"),
    ]
    (_, second), _ = await changed(script, cli, "add web")
    assert second == {"name": "default-2"}
    assert await changed(script, cli, "remove web default") == ([], [])
    wrong = await cli("vm", "nic", "remove", "web", "lan")
    assert (wrong.code, "its interfaces: default" in wrong.err) == (2, True)
    twice = await cli("vm", "nic", "add", "web", "--name", "default")
    assert (twice.code, "has an interface 'default' already" in twice.err) == (2, True)


def path(**more: Any) -> NicPath:
    mac, address = "02:00:00:00:00:01", "10.127.3.4/16"
    status = InterfaceStatus(name="default", mac=mac, addresses=(address,), tap="tap0", **more)
    outside = {"host_link": "vb0", "host_bridge": "virtbus0"}
    return NicPath(status=status, kind="bridge", bridge="br0", link="eth0", **outside)


@pytest.mark.parametrize(
    ("kind", "gateway", "drawn", "told"),
    [
        ("nat", "10.9.0.1", "virtbus0 (10.9.0.1) -- host", "masquerade"),
        ("routed", "10.9.0.1", "virtbus0 (10.9.0.1) -- host", "needs a route to 10.9.0.0/24"),
        ("overlay", "10.9.0.1", "virtbus0 (10.9.0.1) -- host", "through a tunnel"),
        ("isolated", "", "vb0 -- virtbus0", "Nothing leads further"),
    ],
)
def test_the_explanation_follows_the_kind_of_the_network(
    kind: str, gateway: str, drawn: str, told: str
) -> None:
    lan = {"name": "lan", "network": "lan", "addresses": ["10.9.0.4/24"], "gateway": gateway}
    nic = path().model_dump(mode="json") | {"kind": kind, "status": {"tap": "tap0", **lan}}
    view = {"gateway": "10.127.0.1", "subnet": "10.127.0.0/16", "zone": "vm.virtbus"}
    text = explained({**OUTSIDE, **view, "interfaces": [nic]})
    assert f"{drawn}\n" in text
    assert (told in text, "Guests of 10.9.0.0/24" in text) == (True, True)
    assert ("masquerade" in text, "10.127" in text) == (kind in {"nat", "overlay"}, False)


def test_a_guest_behind_nat_is_explained_with_both_addresses_and_its_ports() -> None:
    own = {"binding": "masquerade", "guest_addresses": ["10.0.2.2/24", "fd10:0:2::2/120"]}
    nic = path().model_dump(mode="json")
    nic |= {"ports": ["80/tcp", "53/udp"], "status": nic["status"] | own}
    text = explained({**OUTSIDE, "interfaces": [nic]})
    assert "guest -- [tap0] -- br0 -> eth0 == vb0 -- virtbus0" in text
    assert "with the address 10.0.2.2, fd10:0:2::2." in text
    assert "only these ports lead to the guest: 80/tcp, 53/udp" in text
    without = explained({**OUTSIDE, "interfaces": [nic | {"ports": []}]})
    assert "all ports lead to it" in without


@pytest.mark.parametrize(
    ("kind", "drawn", "told"),
    [
        ("host-bridge", "eth0 == vb0 -- virtbus0 -- segment", "bridge belongs to the host"),
        ("macvtap", "eth0 on virtbus0 -- segment", "eth0 is on virtbus0 of the host"),
    ],
)
def test_a_guest_on_a_segment_is_explained_without_a_gateway(
    kind: str, drawn: str, told: str
) -> None:
    nic = path().model_dump(mode="json") | {"kind": kind, "leased": True}
    text = explained({**OUTSIDE, "interfaces": [nic]})
    assert f"{drawn}\n" in text
    assert (told in text, "masquerade" in text) == (True, False)
    assert "pass IPv4 and ARP from" in text
    assert "The DHCP server of the segment gives the address." in text
    status = nic["status"] | {"addresses": ["2001:db8:5::10/64"]}
    pool = explained({**OUTSIDE, "interfaces": [nic | {"leased": False, "status": status}]})
    assert "pass IPv6 from 02:00:00:00:00:01 with the address 2001:db8:5::10." in pool
    assert "netd answers DHCP on tap0" in pool


async def test_the_network_is_explained_and_checked_on_the_node(script: Script, cli: Cli) -> None:
    lan = InterfaceStatus(
        name="lan", network="lan", mac="02:00:00:00:00:02", plug=PlugState.WAITING
    )
    plugins = NicPath(status=lan, kind="cni", bridge="br1", link="eth1", plugins=("ptp",))
    fault = PathFault(interface="default", what="br0 is gone", next_step="restart it")
    asked: list[bool] = []

    async def network(request: Request) -> NetworkView:
        want = validate(NetworkAsk, request.data)
        asked.append(want.check)
        nics = (path(published=("0.0.0.0:80->80/tcp",)), plugins)
        view = {"subnet": "10.127.0.0/16", "gateway": "10.127.0.1", "interfaces": nics}
        faults = (fault,) if want.check else None
        return NetworkView(uid=want.uid, faults=faults, **OUTSIDE, **view)

    script.answer("vm", "get", vm_view(spec=SPEC))
    endpoint = Endpoint("network", rpc("n1", "agent", "network"), network)
    async with script.node.serve(ServiceInfo("virtbus-nodeagent", "0", "fake"), [endpoint]):
        told = await cli("vm", "net", "web")
        assert told.code == 0, told.err
        drawn = "guest -- [tap0] -- br0 -- eth0 == vb0 -- virtbus0 (10.127.0.1) -- host"
        for text in (drawn, "0.0.0.0:80->80/tcp", "no address yet", "waiting", "plugins ptp"):
            assert text in told.out
        assert "Check:" not in told.out
        broken = await cli("vm", "net", "web", "--check")
        assert broken.code == 1
        assert "default: br0 is gone" in broken.out
        assert "next step: restart it" in broken.out
        plain = await cli("vm", "net", "web", "-o", "json")
        assert json.loads(plain.out)["interfaces"][0]["host_link"] == "vb0"
    assert asked == [False, True, False]
