"""The addresses that are closed to guests, while the bus' names and the bridges change."""

import socket
from ipaddress import IPv4Address, IPv4Interface
from pathlib import Path
from typing import Any, cast
from unittest.mock import AsyncMock, MagicMock

import pytest
from services.netd.tests.pretended_host import make_record
from services.netd.tests.test_network_objects import NET, OTHER, A, target

from virtbus.bus.client.ports import Entry, EntryKind
from virtbus.netd.core.gateways import Gateways
from virtbus.netd.core.plan import plan_of
from virtbus.netd.core.reach import ReachRules
from virtbus.netd.edge.host_bridge import HostBridge
from virtbus.netd.edge.host_bridges import HostBridges
from virtbus.netd.forbidden_addresses import ForbiddenAddresses
from virtbus.netd.names_keeper import NamesKeeper
from virtbus.netd.settings import Settings

SERVER, HOST = IPv4Address("192.0.2.1"), IPv4Address("192.0.2.9")


def bridges_in(state: Path) -> HostBridges:
    gateways = Gateways(IPv4Interface("10.127.0.1/16"))
    return HostBridges(HostBridge("virtbus0", gateways, state / "host.json", state, ReachRules()))


def closing(tmp_path: Path, bridges: HostBridges) -> ForbiddenAddresses:
    settings = MagicMock(state_dir=tmp_path)
    settings.bus().resolved().servers = ["nats://bus.example:4222"]
    settings.reach.return_value = ReachRules()
    resolver = MagicMock(addresses=())
    made = ForbiddenAddresses(
        bridges, cast("Settings", settings), cast("NamesKeeper", resolver), AsyncMock()
    )
    made.see(
        Entry("n1._hosts", f'{{"node": "n1", "fleet": ["{HOST}"]}}'.encode(), 1, EntryKind.PUT)
    )
    return made


def test_the_bus_stays_closed_while_its_name_does_not_resolve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolves(*_: Any, **__: Any) -> list[Any]:
        return [(0, 0, 0, "", (str(SERVER), 0))]

    def fails(*_: Any, **__: Any) -> list[Any]:
        raise socket.gaierror(socket.EAI_AGAIN, "no DNS server answers")

    bridges = bridges_in(tmp_path)
    monkeypatch.setattr(bridges, "addresses", lambda: ())
    (tmp_path / "netd").mkdir()
    first = closing(tmp_path, bridges)
    monkeypatch.setattr(socket, "getaddrinfo", resolves)
    first._apply()
    assert bridges.built_in.reach.hosts == {SERVER, HOST}
    monkeypatch.setattr(socket, "getaddrinfo", fails)
    first._apply()
    assert bridges.built_in.reach.hosts == {SERVER, HOST}
    first._hosts = ("192.0.2.8",)
    first._apply()
    assert bridges.built_in.reach.hosts == {SERVER, IPv4Address("192.0.2.8")}
    bridges.built_in.reach = ReachRules()
    next_netd = closing(tmp_path, bridges)
    next_netd.restore()
    next_netd._apply()
    assert bridges.built_in.reach.hosts == {SERVER, HOST, IPv4Address("192.0.2.8")}


def test_a_network_may_be_added_while_the_reach_of_the_others_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bridges = bridges_in(tmp_path)
    blue, red = (
        plan_of(make_record(A, **target("nat", uid, name))).nics[0]
        for uid, name in ((NET, "blue"), (OTHER, "red"))
    )
    reach = ReachRules(hosts=frozenset({HOST}))
    monkeypatch.setattr(bridges.of(blue), "set_reach", lambda _: bridges.of(red))
    bridges.set_reach(reach)
    assert bridges.of(red).reach == reach
