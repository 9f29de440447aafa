"""A network that is cancelled or fails half way leaves no socket open."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from unittest.mock import Mock

import pytest

from virtbus.netd.builder import Builder


class Half:
    """A builder with one new socket, which the thread returns after `may_end` is set."""

    def __init__(self) -> None:
        self.doors, self.attachment = Mock(), Mock(nics=(), uid="x")
        self.builder = Builder(self.doors, Mock())
        self.may_end = threading.Event()
        self.packets, self._other = socket.socketpair()
        self.builder.links = Mock()
        self.builder.links.build.side_effect = self._build

    def _build(self, *_arguments: object, **_more: object) -> list[socket.socket]:
        self.may_end.wait(10)
        return [self.packets]

    def close(self) -> None:
        self.packets.close()
        self._other.close()


@pytest.fixture
def half() -> Iterator[Half]:
    one = Half()
    yield one
    one.close()


@pytest.mark.parametrize("way", ["built_in", "adopt"])
async def test_a_cancelled_build_closes_its_sockets(half: Half, way: str) -> None:
    async with asyncio.TaskGroup() as group:
        call = group.create_task(getattr(half.builder, way)(half.attachment))
        await asyncio.sleep(0.01)
        call.cancel()
        await asyncio.sleep(0.01)
        half.may_end.set()
    assert call.cancelled()
    assert half.packets.fileno() == -1


async def test_a_state_file_that_cannot_be_stored_closes_the_new_sockets(half: Half) -> None:
    half.doors.files.sync.side_effect = OSError("disk")
    half.may_end.set()
    with pytest.raises(OSError, match="disk"):
        await half.builder.built_in(half.attachment)
    assert half.packets.fileno() == -1
