"""The disk under the bus: the action at each level of free space."""

from itertools import pairwise

import pytest

from virtbus.cli.up.disk_policy import DiskAction, Room, step

MIB = 1024**2
GIB = 1024**3


def room(free_bytes: int, *, total_bytes: int = 100 * GIB, reserved: bool = True) -> Room:
    return Room(free_bytes, total_bytes, reserved)


@pytest.mark.parametrize("total_bytes", [48 * MIB, 8 * GIB, 10_000 * GIB])
def test_sizes_grow_in_this_order_on_any_disk(total_bytes: int) -> None:
    one = room(0, total_bytes=total_bytes)
    sizes = [0, one.needed_bytes, one.reserve_bytes, one.low_bytes, total_bytes]
    assert all(less < more for less, more in pairwise(sizes))
    assert one.low_bytes <= 256 * MIB


def test_stalled_server_is_restarted_only_where_that_helps() -> None:
    assert step(room(16 * MIB), stalled=True) is DiskAction.RESTART
    assert step(room(0), stalled=True) is DiskAction.GIVE
    assert step(room(0, reserved=False), stalled=True) is DiskAction.NOTHING


def test_reserve_is_taken_back_when_creates_work_again_with_it() -> None:
    one = room(0)
    enough = one.low_bytes + one.reserve_bytes
    assert step(room(enough, reserved=False), stalled=False) is DiskAction.TAKE
    assert step(room(enough - 1, reserved=False), stalled=False) is DiskAction.NOTHING
    assert step(room(enough), stalled=False) is DiskAction.NOTHING
    assert not room(enough - one.reserve_bytes).low


def test_room_that_the_reserve_gives_is_enough_to_start_and_too_little_for_creates() -> None:
    given = room(room(0).reserve_bytes, reserved=False)
    assert step(given, stalled=True) is DiskAction.RESTART
    assert given.low
