"""Records: the contract of every bus. Runs against the fake and a real server."""

import asyncio

import pytest

from virtbus.bus.client.ports import Bus, Entry, EntryKind, Watch, WatchMark, Write
from virtbus.bus.errors import ConflictError, FullError

UID = "0192f0c1-2d3e-7abc-8def-0123456789ab"
KEY = f"$KV.vm.n1.{UID}"
ANYWHERE = f"$KV.vm.*.{UID}"


async def until_synced(watch: Watch) -> list[Entry]:
    """Return the list of a watch whose next item is RESET."""
    items = aiter(watch)
    assert await anext(items) is WatchMark.RESET
    entries: list[Entry] = []
    while (item := await anext(items)) is not WatchMark.SYNCED:
        assert isinstance(item, Entry)
        entries.append(item)
    return [entry for entry in entries if not entry.key.endswith("._join")]


async def test_get_of_a_key_that_never_was_is_none(bus: Bus) -> None:
    assert await bus.get(KEY) is None


async def test_a_put_is_read_back_with_its_revision(bus: Bus, other: Bus) -> None:
    revision = await bus.put(KEY, b"one")
    entry = await other.get(KEY)
    assert entry is not None
    assert (entry.key, entry.value, entry.revision) == (KEY, b"one", revision)
    assert entry.kind is EntryKind.PUT
    assert entry.time_ns > 1_600_000_000_000_000_000


async def test_get_takes_a_wildcard_for_the_node(bus: Bus) -> None:
    await bus.put(KEY, b"one")
    entry = await bus.get(ANYWHERE)
    assert entry is not None
    assert entry.key == KEY


async def test_compare_and_set_refuses_an_unread_revision(bus: Bus) -> None:
    first = await bus.put(KEY, b"one", expect=0)
    with pytest.raises(ConflictError):
        await bus.put(KEY, b"again", expect=0)
    second = await bus.put(KEY, b"two", expect=first)
    with pytest.raises(ConflictError, match=f"^wrong last sequence: {second}$"):
        await bus.put(KEY, b"late", expect=first)
    assert second > first


async def test_purge_leaves_a_marker_that_is_the_last_message(bus: Bus) -> None:
    first = await bus.put(KEY, b"one")
    marker = await bus.purge(KEY, expect=first, marker_ttl_s=86_400)
    entry = await bus.get(ANYWHERE)
    assert entry == Entry(KEY, b"", marker, EntryKind.PURGE, entry.time_ns if entry else 0)
    with pytest.raises(ConflictError):
        await bus.put(KEY, b"two", expect=0)
    await bus.put(KEY, b"two", expect=marker)


async def test_a_purge_marker_gives_its_reason_to_readers_and_watchers(bus: Bus) -> None:
    """The marker of a delete has a body, that of a move is empty (ADR 0033)."""
    await bus.put(KEY, b"a")
    await bus.purge(KEY, why=b"deleted")
    moved, there = f"{KEY}x", f"{KEY}y"
    old = await bus.put(moved, b"b")
    await bus.batch([Write(moved, None, old, why=b"so"), Write(there, b"c", 0, why=b"no purge")])
    found = [await bus.get(key) for key in (KEY, moved, there)]
    assert [(one.value, one.why) for one in found if one is not None] == [
        (b"", b"deleted"),
        (b"", b"so"),
        (b"c", b""),
    ]
    async with bus.watch("$KV.vm.n1.>") as watch:
        seen = {entry.key: entry.why for entry in await until_synced(watch)}
    assert seen == {KEY: b"deleted", moved: b"so", there: b""}


async def test_a_purge_at_an_old_revision_is_refused(bus: Bus) -> None:
    first = await bus.put(KEY, b"one")
    await bus.put(KEY, b"two")
    with pytest.raises(ConflictError):
        await bus.purge(KEY, expect=first)


async def test_one_of_eight_writers_over_all_nodes_wins(bus: Bus, other: Bus) -> None:
    outcomes: list[str] = []

    async def commit(node: int) -> None:
        writer = bus if node % 2 else other
        try:
            await writer.put(f"$KV.vm.n{node}.{UID}", b"x", expect=0, expect_over=ANYWHERE)
        except ConflictError:
            outcomes.append("lost")
        else:
            outcomes.append("won")

    async with asyncio.TaskGroup() as group:
        for node in range(8):
            group.create_task(commit(node))
    assert sorted(outcomes) == ["lost"] * 7 + ["won"]


async def test_a_tombstone_stops_a_paused_commit_and_a_move_replaces_it(bus: Bus) -> None:
    tombstone = f"$KV.vm._.{UID}"
    stone = await bus.put(tombstone, b"t", expect=0, expect_over=ANYWHERE)
    with pytest.raises(ConflictError):
        await bus.put(KEY, b"late", expect=0, expect_over=ANYWHERE)
    await bus.batch([Write(tombstone, None, stone), Write(KEY, b"vm", 0)])
    moved = await bus.get(KEY)
    assert moved is not None
    assert moved.value == b"vm"
    left = await bus.get(tombstone)
    assert left is not None
    assert left.kind is EntryKind.PURGE


async def test_a_batch_with_one_stale_write_changes_nothing(bus: Bus) -> None:
    first = await bus.put(KEY, b"one")
    with pytest.raises(ConflictError):
        await bus.batch([Write(KEY, None, first), Write(f"$KV.vm.n2.{UID}", b"x", 99)])
    entry = await bus.get(KEY)
    assert entry is not None
    assert entry.revision == first
    assert await bus.get(f"$KV.vm.n2.{UID}") is None


async def test_a_move_between_nodes_leaves_a_marker_that_ends_by_itself(bus: Bus) -> None:
    """The desired state of a node is a third write, which fences the move (ADR 0014)."""
    there, node_spec = f"$KV.vm.n2.{UID}", "$KV.vm.n1._spec"
    old, fence = await bus.put(KEY, b"one"), await bus.put(node_spec, b"w")
    revision = await bus.batch(
        [Write(node_spec, b"w", fence), Write(KEY, None, old, ttl_s=2), Write(there, b"two", 0)]
    )
    last = await bus.get(ANYWHERE)
    assert last is not None
    assert (last.key, last.revision) == (there, revision)
    marker, fenced = await bus.get(KEY), await bus.get(node_spec)
    assert marker is not None
    assert fenced is not None
    assert (marker.kind, fenced.revision) == (EntryKind.PURGE, revision - 2)
    async with asyncio.timeout(15):
        while await bus.get(KEY) is not None:
            await asyncio.sleep(0.1)
    back = [Write(there, None, revision), Write(KEY, b"three", 0)]
    assert await bus.batch(back) > revision


async def test_a_batch_may_expect_nothing_over_a_filter(bus: Bus) -> None:
    """A VM's first record and the reservation on its node: both, and only without a record."""
    total = "$KV.vm._reserved.node.n1"

    def writes(node: str, expect: int) -> list[Write]:
        key = f"$KV.vm.{node}.{UID}"
        return [
            Write(total, b"sum", expect=expect),
            Write(key, b"record", expect=0, expect_over=ANYWHERE),
        ]

    revision = await bus.batch(writes("n1", 0))
    last = await bus.get(ANYWHERE)
    assert last is not None
    assert last.revision == revision
    with pytest.raises(ConflictError):
        await bus.batch(writes("n2", revision - 1))
    with pytest.raises(ConflictError):
        await bus.batch([Write(total, b"late", expect=0)])
    entry = await bus.get(total)
    assert entry is not None
    assert entry.value == b"sum"


async def test_three_mebibytes_are_refused_as_full(bus: Bus) -> None:
    with pytest.raises(FullError):
        await bus.put(KEY, b"x" * (3 * 1024 * 1024))
    assert await bus.get(KEY) is None


async def test_a_watch_of_nothing_is_synced_at_once(bus: Bus) -> None:
    async with bus.watch("$KV.st.>") as watch:
        assert await until_synced(watch) == []


async def test_a_watch_lists_then_follows_in_order_up_to_the_last(bus: Bus, other: Bus) -> None:
    """A value that is overwritten at once may be skipped: buckets keep only the last one."""
    await bus.put(KEY, b"one")
    async with other.watch("$KV.vm.>") as watch:
        assert [entry.value for entry in await until_synced(watch)] == [b"one"]
        last = [await bus.put(KEY, b"%d" % number) for number in range(20)][-1]
        seen: list[int] = []
        items = aiter(watch)
        while not seen or seen[-1] != last:
            item = await anext(items)
            assert isinstance(item, Entry)
            seen.append(item.revision)
    assert seen == sorted(set(seen))


async def test_a_watch_shows_a_purge_marker_in_its_list_and_after_it(bus: Bus) -> None:
    second = f"$KV.vm.n1.{UID[:-1]}f"
    await bus.put(KEY, b"one")
    await bus.put(second, b"two")
    await bus.purge(KEY)
    async with bus.watch("$KV.vm.n1.>") as watch:
        kinds = {entry.key: entry.kind for entry in await until_synced(watch)}
        assert kinds == {KEY: EntryKind.PURGE, second: EntryKind.PUT}
        await bus.purge(second)
        item = await anext(aiter(watch))
        assert isinstance(item, Entry)
        assert (item.key, item.kind, item.value) == (second, EntryKind.PURGE, b"")


async def test_a_watch_takes_several_filters_of_a_bucket(bus: Bus) -> None:
    await bus.put(KEY, b"one")
    await bus.put(f"$KV.vm.n3.{UID}", b"three")
    async with bus.watch("$KV.vm.n1.>", "$KV.vm.n2.>") as watch:
        assert [entry.key for entry in await until_synced(watch)] == [KEY]


async def test_relist_sends_the_whole_list_again(bus: Bus) -> None:
    await bus.put(KEY, b"one")
    async with bus.watch("$KV.vm.n1.>") as watch:
        before = await until_synced(watch)
        watch.relist()
        assert await until_synced(watch) == before


async def test_a_node_watch_sees_its_own_subtree_only(bus: Bus) -> None:
    await bus.put(f"$KV.vm.n2.{UID}", b"other")
    await bus.put(KEY, b"one")
    async with bus.node_watch("n1", "agent") as watch:
        assert [entry.key for entry in await until_synced(watch)] == [KEY]
        watch.relist()
        assert [entry.key for entry in await until_synced(watch)] == [KEY]


async def test_a_lease_expires_into_a_marker_that_can_be_taken_over(bus: Bus) -> None:
    lease = "$KV.lease.gc"
    async with bus.watch(lease) as watch:
        await until_synced(watch)
        held = await bus.put(lease, b"a", expect=0, ttl_s=1)
        items = aiter(watch)
        assert isinstance(await anext(items), Entry)
        async with asyncio.timeout(10):
            marker = await anext(items)
    assert isinstance(marker, Entry)
    assert marker.kind is EntryKind.PURGE
    assert marker.revision > held
    with pytest.raises(ConflictError):
        await bus.put(lease, b"a", expect=held, ttl_s=1)
    assert await bus.put(lease, b"b", expect=marker.revision, ttl_s=1) > marker.revision


async def test_fill_and_report_name_the_buckets(bus: Bus) -> None:
    await bus.put(KEY, b"x" * 1000)
    assert 0.0 <= await bus.fill("vm") < 0.5
    reports = {report.name: report for report in await bus.report()}
    assert reports["KV_vm"].messages >= 1
