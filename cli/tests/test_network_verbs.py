"""Networks against a scripted controller."""

from pathlib import Path
from typing import Any

import pytest
from cli.tests.fakes import UID, Cli, Script

from virtbus.bus.client.ports import Request
from virtbus.schemas.api import NetworkPage
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.network import NetworkInfo
from virtbus.schemas.network_api import (
    NeededRoute,
    NetworkCreated,
    NetworkObjectPage,
    NetworkObjectView,
)
from virtbus.schemas.network_object import NetworkKind, NetworkSpec, NetworkState

pytestmark = pytest.mark.integration


def view(**changes: Any) -> NetworkObjectView:
    known: dict[str, Any] = {
        "uid": UID,
        "namespace": "default",
        "name": "blue",
        "spec": NetworkSpec(kind=NetworkKind.NAT, subnet="10.200.0.0/24"),
        "state": NetworkState.READY,
        "generation": 1,
        "revision": 3,
        "created_ns": 1,
    }
    return NetworkObjectView(**(known | changes))


async def test_create_sends_the_spec_of_each_kind(script: Script, cli: Cli, tmp_path: Path) -> None:
    script.answer("network", "create", NetworkCreated(network=view(), created=True))
    nat = ("--subnet", "10.200.0.0/24", "--mtu", "1400", "--dns", "192.0.2.53", "--protected")
    ended = await cli("network", "create", "blue", *nat, "--label", "a=b")
    assert ended.code == 0, ended.err
    row = ["default", "blue", "nat", "Ready", "10.200.0.0/24", "0", "-"]
    assert ended.out.splitlines()[1].split() == row
    conflist = tmp_path / "lan.conflist"
    conflist.write_text('{"plugins": []}')
    routed = ("--kind", "routed", "--on", "n1=10.1.0.0/24", "--on", "n2=10.2.0.0/24")
    assert (await cli("network", "create", "dmz", *routed, "--all-namespaces")).code == 0
    assert (await cli("network", "create", "lan", "--kind", "cni", "--config", conflist)).code == 0
    bridge = ("--kind", "bridge", "--link", "br-lan", "--vlan", "7")
    assert (await cli("network", "create", "vlan7", *bridge)).code == 0
    macvtap = ("--kind", "macvtap", "--link", "eth1", "--mode", "vepa")
    assert (await cli("network", "create", "wan", *macvtap)).code == 0
    first, second, third, fourth, fifth = script.data("network.create")
    assert fifth["spec"] == {"kind": "macvtap", "link": "eth1", "mode": "vepa"}
    assert fourth["spec"] == {"kind": "bridge", "link": "br-lan", "vlan": 7}
    assert first["labels"] == {"a": "b"}
    assert first["spec"] == {
        "kind": "nat",
        "subnet": "10.200.0.0/24",
        "mtu": 1400,
        "dns": ["192.0.2.53"],
        "protected": True,
    }
    assert second["namespace"] == "_"
    assert second["spec"]["subnets"] == {"n1": "10.1.0.0/24", "n2": "10.2.0.0/24"}
    assert third["spec"] == {"kind": "cni", "config": '{"plugins": []}'}
    wrong = await cli("network", "create", "dmz", "--kind", "routed", "--on", "n1")
    assert (wrong.code, "--on n1=" in wrong.err) == (2, True)
    twice = ("--on", "n1=10.1.0.0/24", "--on", "n1=10.2.0.0/24")
    wrong = await cli("network", "create", "dmz", "--kind", "routed", *twice)
    assert (wrong.code, "n1 has 10.1.0.0/24 already" in wrong.err) == (2, True)
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff")
    wrong = await cli("network", "create", "dmz", "--kind", "cni", "--config", str(binary))
    assert (wrong.code, "no UTF-8 text" in wrong.err) == (2, True)


async def test_list_shows_objects_and_what_nodes_offer(script: Script, cli: Cli) -> None:
    used = view(state=NetworkState.IN_USE, user_count=2, namespace="_")
    script.answer("network", "list", NetworkObjectPage(items=(used,)))
    default = NetworkInfo(name="default", kind="built-in", detail={"nodes": "n1"})
    script.answer("network", "offers", NetworkPage(items=(default,)))
    ended = await cli("network", "list")
    rows = [line.split() for line in ended.out.splitlines()[1:]]
    assert rows[0] == ["(all)", "blue", "nat", "InUse", "10.200.0.0/24", "2", "-"]
    assert rows[1][:3] == ["(node)", "default", "built-in"]
    assert (await cli("network", "list", "-n", "shop", "-o", "json")).json["offers"] == []


async def test_get_names_the_needed_routes(script: Script, cli: Cli) -> None:
    routes = (
        NeededRoute(destination="10.1.0.0/24", node="n1", via=("192.0.2.7",)),
        NeededRoute(destination="10.2.0.0/24", node="n2"),
    )
    script.answer("network", "get", view(routes=routes, message="a delete was reverted: x use it"))
    ended = await cli("network", "get", "blue")
    assert "route 10.1.0.0/24 via 192.0.2.7" in ended.err
    assert "route 10.2.0.0/24 via the address of n2" in ended.err
    assert "a delete was reverted" in ended.err


async def test_update_sends_only_what_was_given(script: Script, cli: Cli) -> None:
    script.answer("network", "update", view())
    assert (await cli("network", "update", "blue", "--mtu", "1400", "--no-protected")).code == 0
    asked = {"name": "blue", "namespace": "default", "mtu": 1400, "protected": False}
    assert script.data("network.update") == [asked]
    assert (await cli("network", "update", "blue", "--no-dns")).code == 0
    assert script.data("network.update")[1]["dns"] == []
    both = await cli("network", "update", "blue", "--no-dns", "--dns", "192.0.2.53")
    assert (both.code, "exclude each other" in both.err) == (2, True)
    nothing = await cli("network", "update", "blue")
    assert (nothing.code, "nothing to change" in nothing.err) == (2, True)


async def test_a_network_that_stays_does_not_hide_the_deletes_of_others(
    script: Script, cli: Cli
) -> None:
    async def delete(request: Request) -> NetworkObjectView:
        if request.data["name"] == "used":
            raise VirtbusError(Code.CONFLICT, "network_in_use", "web uses used")
        return view(name=request.data["name"], state=NetworkState.DELETING)

    script.handlers["network", "delete"] = delete
    ended = await cli("network", "delete", "blue", "used", "red", "--no-wait")
    assert (ended.code, ended.out) == (1, "blue deleting\nred deleting\n")
    assert "web uses used" in ended.err


async def test_delete_waits_for_the_end_or_the_reason(script: Script, cli: Cli) -> None:
    answers: list[NetworkObjectView | VirtbusError] = [
        view(state=NetworkState.DELETING),
        VirtbusError(Code.NOT_FOUND, "network_not_found", "gone"),
        view(state=NetworkState.IN_USE, message="a delete was reverted: default/web use it"),
    ]

    async def get(_: Request) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, VirtbusError):
            raise answer
        return answer

    script.answer("network", "delete", view(state=NetworkState.DELETING))
    script.handlers["network", "get"] = get
    ended = await cli("network", "delete", "blue")
    assert (ended.code, ended.out) == (0, "blue deleted\n")
    stays = await cli("network", "delete", "blue")
    assert (stays.code, "default/web use it" in stays.err) == (1, True)


@pytest.mark.parametrize("option", ["--mtu", "--vlan"])
async def test_a_number_below_one_is_refused_before_it_is_sent(
    script: Script, cli: Cli, option: str
) -> None:
    ended = await cli("network", "create", "blue", "--kind", "bridge", option, "0")
    assert ended.code == 2, ended.err
    assert option in ended.err
    assert not script.asked
