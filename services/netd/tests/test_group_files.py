"""Groups of a node from the bus to the files, and back after a restart."""

from pathlib import Path
from typing import Any, cast

import pytest

from virtbus.bus.client.ports import Entry, EntryKind, WatchMark
from virtbus.netd import security_groups
from virtbus.netd.attachments import Attachments
from virtbus.netd.builder import HostPorts
from virtbus.netd.core.node_groups import NodeGroupBook
from virtbus.netd.edge.groups_store import GroupsStore
from virtbus.netd.security_groups import SecurityGroups
from virtbus.schemas.security_group import NodeGroup
from virtbus.schemas.subjects import join_nonce, node_group
from virtbus.schemas.vm import JoinNonce
from virtbus.schemas.wire import encode, validate


class Doors:
    def __init__(self) -> None:
        self.groups = NodeGroupBook()


class NoAttachments:
    def ready(self) -> list[Any]:
        return []

    def begun(self) -> set[str]:
        return set()


class Desk:
    """A netd's groups, with restarts."""

    def __init__(self, folder: Path) -> None:
        self.store = GroupsStore(folder / "groups")
        self.start()

    def start(self) -> None:
        doors, none = cast("HostPorts", Doors()), cast("Attachments", NoAttachments())
        self.groups = SecurityGroups("n1", doors, none, self.store)

    @property
    def names(self) -> list[str]:
        return [group.name for group in self.groups.known().groups.values()]

    async def hear(self, nonce: str, *names: str) -> None:
        """Deliver a complete list of a bus."""
        self.groups.see(WatchMark.RESET)
        for name in names:
            self.put(name)
        joined = encode(JoinNonce(nonce=nonce))
        self.groups.see(entry(join_nonce("n1"), joined))
        self.groups.see(WatchMark.SYNCED)
        await self.groups._write()

    def put(self, name: str, generation: int = 1) -> None:
        group = validate(
            NodeGroup,
            {
                "uid": "0192f0c1-2d3e-7abc-8def-0000000000f1",
                "namespace": "default",
                "name": name,
                "generation": generation,
                "spec": {"selector": {}},
                "peers": {"lb": {"default": ["10.127.0.9"]}},
            },
        )
        self.groups.see(entry(node_group("n1", "default", name), encode(group)))


def entry(key: str, value: bytes, kind: EntryKind = EntryKind.PUT) -> Entry:
    return Entry(key=key, value=value, revision=1, kind=kind, time_ns=0)


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


async def test_groups_survive_a_restart_and_end_with_their_marker(desk: Desk) -> None:
    await desk.hear("bus-1", "web", "db")
    desk.start()
    assert desk.names == ["db", "web"]
    group = desk.groups._book.groups[node_group("n1", "default", "db")]
    assert group.addresses("lb", "default") == ("10.127.0.9",)
    desk.groups.see(entry(node_group("n1", "default", "web"), b"", EntryKind.PURGE))
    await desk.groups._write()
    desk.start()
    assert desk.names == ["db"]


async def test_a_list_of_the_same_bus_ends_groups_and_one_of_another_does_not(desk: Desk) -> None:
    await desk.hear("bus-1", "web", "db")
    desk.start()
    await desk.hear("bus-2", "db")
    assert desk.names == ["db", "web"]
    await desk.hear("bus-2", "db")
    desk.start()
    assert desk.names == ["db", "web"]
    await desk.hear("bus-2")
    assert desk.names == ["web"]  # only the group that this bus has listed once
    await desk.hear("bus-1")
    assert desk.names == []


async def test_unreadable_values_change_nothing(desk: Desk) -> None:
    await desk.hear("bus-1", "web")
    key = node_group("n1", "default", "web")
    desk.groups.see(WatchMark.RESET)
    desk.groups.see(entry(key, b"rubbish"))
    desk.groups.see(entry(join_nonce("n1"), encode(JoinNonce(nonce="bus-1"))))
    desk.groups.see(WatchMark.SYNCED)
    assert desk.names == ["web"]
    foreign = node_group("n1", "default", "other")
    stored = encode(desk.groups.known().groups[key])
    desk.groups.see(entry(foreign, stored))
    assert desk.names == ["web"]
    (file,) = (desk.store._directory).glob("*.json")
    file.write_bytes(b"torn")
    desk.start()
    assert desk.names == []


async def test_a_rebuild_gets_all_groups_in_pages_without_their_peers(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"group-{number}" for number in range(9)]
    await desk.hear("bus-1", *names)
    monkeypatch.setattr(security_groups, "PAGE_BYTES", 400)
    found, after, more = dict[str, NodeGroup](), "", True
    while more:
        page = desk.groups.known(after)
        found |= page.groups
        more, after = page.more, max(page.groups)
    assert sorted(group.name for group in found.values()) == names
    assert not any(group.peers for group in found.values())
