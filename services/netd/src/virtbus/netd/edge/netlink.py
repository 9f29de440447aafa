"""Sends batches of calls over a netlink socket, and returns the kernel's answers."""

import errno
import os
import socket
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from virtbus.netd.core.netlink import (
    NLM_F_DUMP_INTR,
    NLMSG_DONE,
    NetlinkCall,
    Reply,
    frame,
    replies,
)

NETLINK_ROUTE = 0
NETLINK_NETFILTER = 12
_ANSWER_TIMEOUT_S = 10.0
_RECEIVE_BYTES = 256 * 1024
_PLAIN_CALLS = 64
"""The number of calls whose messages and answers fit into the kernel's default buffers."""
_CALL_BYTES = 4096
"""Buffer bytes for each call of a larger batch."""
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33
_DUMPS = 20
"""Attempts to read a list that changes while the kernel sends the list."""


class NetlinkError(OSError):
    """The kernel refused a call. `errno` has the reason; the text names the call."""

    def __init__(self, code: int, call: str) -> None:
        super().__init__(code, f"{call}: {os.strerror(code)}")


class Netlink:
    """A netlink socket in the namespace of the thread that creates it.

    All methods block. They raise TimeoutError if the kernel sends nothing for 10 s.
    """

    def __init__(self, protocol: int = NETLINK_ROUTE) -> None:
        kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC
        self._socket = socket.socket(socket.AF_NETLINK, kind, protocol)
        self._socket.settimeout(_ANSWER_TIMEOUT_S)
        self._socket.bind((0, 0))
        self._sequence = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """After a removal of rules, the close may wait 8 to 16 ms for RCU."""
        self._socket.close()

    def do(self, calls: Sequence[NetlinkCall]) -> None:
        """Send all calls at once and wait for their acknowledgements.

        Raises:
            NetlinkError: the first refusal whose errno the call does not tolerate. rtnetlink still
                carries out the later calls.
        """
        if not calls:
            return
        sent = self._send(calls)
        waiting = {number for number, call in sent.items() if call.acked}
        first: NetlinkError | None = None
        while waiting:
            for reply in replies(self._socket.recv(_RECEIVE_BYTES)):
                call = sent.get(reply.sequence)
                if call is None or reply.error is None:
                    continue
                waiting.discard(reply.sequence)
                if not call.acked:
                    # nftables refused the whole transaction, and sends no further answer.
                    waiting.clear()
                if reply.error and reply.error not in call.tolerated and first is None:
                    first = NetlinkError(reply.error, call.name)
        if first is not None:
            raise first

    def ask(self, call: NetlinkCall) -> Reply | None:
        """Return the answer to a request for one object; None if the object does not exist.

        Raises:
            NetlinkError: the kernel refused the request.
        """
        waiting = set(self._send([call]))
        answer: Reply | None = None
        while waiting:
            for reply in replies(self._socket.recv(_RECEIVE_BYTES)):
                if reply.sequence not in waiting:
                    continue
                if reply.error is None:
                    answer = reply
                    continue
                if reply.error not in {0, errno.ENODEV, errno.ENOENT}:
                    raise NetlinkError(reply.error, call.name)
                waiting.discard(reply.sequence)
        return answer

    def dump(self, call: NetlinkCall) -> list[Reply]:
        """Return all messages of a list. Repeat the request if the list changed meanwhile.

        Raises:
            NetlinkError: the kernel refused the request, or the list changed in each attempt
                (EAGAIN).
        """
        for _attempt in range(_DUMPS):
            found = self._dump(call)
            if not any(reply.flags & NLM_F_DUMP_INTR for reply in found):
                return found[:-1]
        raise NetlinkError(errno.EAGAIN, call.name)

    def _dump(self, call: NetlinkCall) -> list[Reply]:
        (sequence,) = self._send([call])
        found: list[Reply] = []
        while not found or found[-1].type != NLMSG_DONE:
            for reply in replies(self._socket.recv(_RECEIVE_BYTES)):
                if reply.sequence != sequence:
                    continue
                if reply.error:
                    raise NetlinkError(reply.error, call.name)
                found.append(reply)
        return found

    def _send(self, calls: Sequence[NetlinkCall]) -> dict[int, NetlinkCall]:
        first = self._sequence + 1
        self._sequence += len(calls)
        numbered = dict(enumerate(calls, first))
        data = b"".join(frame(call, number) for number, call in numbered.items())
        if len(calls) > _PLAIN_CALLS:
            size = max(len(data), _CALL_BYTES * len(calls))
            for option in (_SO_SNDBUFFORCE, _SO_RCVBUFFORCE):
                self._socket.setsockopt(socket.SOL_SOCKET, option, size)
        self._socket.send(data)
        return numbered
