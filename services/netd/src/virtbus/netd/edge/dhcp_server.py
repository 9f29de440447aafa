"""Answers DHCP, DHCPv6 and router solicitations of guests, by one packet socket per tap.

On a segment (a layer-2 network outside of virtbus), another server may answer the guests. The
socket of such an interface only reads that server's answers.

When netd dies, guests keep their addresses. A guest tolerates unanswered renewals until its DHCP
lease ends.
"""

import asyncio
import errno
import fcntl
import logging
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from virtbus.netd.core.dhcp import DhcpLease, MessageType, answer, lease_of, parse
from virtbus.netd.core.dhcp6 import Offer6, answer6, parse6
from virtbus.netd.core.dhcp_frame import CLIENT_PORT, payload, reply_frame
from virtbus.netd.core.dhcp_offer import Offers
from virtbus.netd.core.ipv6_frame import advertisement_frame, dhcp6_frame, heard
from virtbus.netd.core.router_advertisement import EVERY_S, advertisement
from virtbus.netd.core.token_bucket import TokenBucket
from virtbus.schemas.counters import Counters

log = logging.getLogger(__name__)

RATE_HZ = 20.0
BURST = 20
"""Frames that netd reads from one interface: per second, and at once. A flood fills the socket's 32
KiB buffer; the kernel drops and counts further frames.
"""
FLOOD = "dhcp_flood"
"""The label of the counter of lost requests."""

CLOSERS = 32
"""Number of threads that close sockets at the end: 300 sockets in sequence would take 4 s."""

_MAX_FRAME_BYTES = 2048
_ETHERTYPE_IPV6 = b"\x86\xdd"
_SIOCGSKNS = 0x894C
_SOL_PACKET, _PACKET_STATISTICS = 263, 6
_STATISTICS = struct.Struct("=II")
"""Packets of a socket since the last reading: all, and those dropped because its buffer was full.
"""

_PASSING = frozenset({errno.EAGAIN, errno.ENETDOWN, errno.ENOBUFS, errno.ENETUNREACH})
"""Errors after which netd still reads the socket: the link was down, or the guest reads too slowly.
"""


@dataclass(frozen=True, slots=True)
class Foreign:
    """Replaces the offers for interface `index` if another server answers its guest."""

    index: int
    mac: bytes


Leased = Callable[[str, int, DhcpLease], None]
"""Called with a uid, the index of an interface, and its DHCP lease from another server."""


def _ignore(_uid: str, _index: int, _lease: DhcpLease) -> None:
    return


class DhcpServer:
    """Answers DHCP for each VM from `serve` to `stop`, and owns the sockets passed to `serve`."""

    def __init__(self) -> None:
        self._interfaces: dict[str, list[_Interface]] = {}
        self.leased: Leased = _ignore

    def serve(self, uid: str, sockets: list[socket.socket], offers: list[Offers | Foreign]) -> None:
        """Serve each socket with the offers at its position. Close earlier sockets of `uid`."""
        self.stop(uid)
        self._interfaces[uid] = [
            _Interface(uid, packets, offer, self._tell)
            for packets, offer in zip(sockets, offers, strict=True)
        ]

    def _tell(self, uid: str, index: int, lease: DhcpLease) -> None:
        self.leased(uid, index, lease)

    def stop(self, uid: str) -> None:
        sockets = [interface.silence() for interface in self._interfaces.pop(uid, ())]
        if sockets:
            _closing(sockets).start()

    def close(self) -> None:
        sockets = [each.silence() for found in self._interfaces.values() for each in found]
        self._interfaces.clear()
        threads = [_closing(sockets[at::CLOSERS]) for at in range(min(CLOSERS, len(sockets)))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def namespace(self, uid: str) -> int | None:
        """Return a descriptor of the namespace of `uid`; None if `uid` is not served.

        The caller closes the descriptor.
        """
        for interface in self._interfaces.get(uid, ()):
            return fcntl.ioctl(interface.socket, _SIOCGSKNS)
        return None

    def with_floods(self, counted: Counters) -> Counters:
        """Add the guest's lost requests since `serve` to the counters of its VM."""
        found = self._interfaces.get(counted.uid, [])
        if len(found) != len(counted.interfaces):
            return counted  # an interface is being plugged
        pairs = zip(counted.interfaces, (one.lost() for one in found), strict=True)
        return counted.model_copy(
            update={
                "interfaces": tuple(
                    nic.model_copy(update={"refused": nic.refused | {FLOOD: lost}}) if lost else nic
                    for nic, lost in pairs
                )
            }
        )

    def counts(self, uid: str) -> Counter[MessageType]:
        """Return the number of requests of each kind since `serve`.

        For an interface that another server answers, count that server's acknowledgements instead.
        """
        total: Counter[MessageType] = Counter()
        for interface in self._interfaces.get(uid, ()):
            total += interface.seen
        return total


def _closing(sockets: list[socket.socket]) -> threading.Thread:
    """Return a thread, because each close waits up to 14 ms for an RCU grace period."""

    def close() -> None:
        for each in sockets:
            each.close()

    return threading.Thread(target=close, name="closing")


class _Interface:
    def __init__(
        self, uid: str, packets: socket.socket, offers: Offers | Foreign, leased: Leased
    ) -> None:
        self._uid = uid
        self._leased = leased
        self.socket = packets
        self._offer = offers if isinstance(offers, Foreign) else offers.four
        self._offer6 = None if isinstance(offers, Foreign) else offers.six
        self._bucket = TokenBucket(RATE_HZ, BURST)
        self._loop = asyncio.get_running_loop()
        self._resume: asyncio.TimerHandle | None = None
        self._next_advertisement: asyncio.TimerHandle | None = None
        self.seen: Counter[MessageType] = Counter()
        self._lost = 0
        self._listen()
        if self._offer6 is not None:
            self._advertise_regularly(self._offer6)

    def _listen(self) -> None:
        self._resume = None
        self._loop.add_reader(self.socket, self._readable)

    def lost(self) -> int:
        """Return the number of the guest's requests that did not fit into the socket's buffer."""
        if isinstance(self._offer, Foreign):
            return 0  # the socket reads another server's answers
        raw = self.socket.getsockopt(_SOL_PACKET, _PACKET_STATISTICS, _STATISTICS.size)
        self._lost += _STATISTICS.unpack(raw)[1]
        return self._lost

    def silence(self) -> socket.socket:
        for timer in (self._resume, self._next_advertisement):
            if timer is not None:
                timer.cancel()
        self._loop.remove_reader(self.socket)
        return self.socket

    def _readable(self) -> None:
        wait_s = self._bucket.take(self._loop.time())
        if wait_s:
            # While this process does not read, the kernel drops the flood at no cost to it.
            self._loop.remove_reader(self.socket)
            self._resume = self._loop.call_later(wait_s, self._listen)
            return
        try:
            frame = self.socket.recv(_MAX_FRAME_BYTES)
            if frame[12:14] == _ETHERTYPE_IPV6:
                self._answer6(frame)
            else:
                self._answer(frame)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._failed(error)

    def _failed(self, error: OSError) -> None:
        extra = {"code": "dhcp_socket", "uid": self._uid}
        log.warning("DHCP socket: %s", error, extra=extra)
        if error.errno not in _PASSING:
            self._loop.remove_reader(self.socket)

    def _advertise_regularly(self, offer: Offer6) -> None:
        self._next_advertisement = self._loop.call_later(EVERY_S, self._advertise_regularly, offer)
        try:
            self.socket.send(advertisement_frame(advertisement(offer), offer))
        except OSError as error:
            if error.errno not in _PASSING:
                self._failed(error)

    def _answer6(self, frame: bytes) -> None:
        offer, message = self._offer6, heard(frame)
        if offer is None or message is None:
            return
        if message.dhcp is None:
            self.socket.send(advertisement_frame(advertisement(offer), offer))
            return
        request = parse6(message.dhcp)
        reply = answer6(request, offer) if request is not None else None
        if reply is not None:
            self.socket.send(dhcp6_frame(reply, message.source, offer))

    def _answer(self, frame: bytes) -> None:
        offer = self._offer
        if isinstance(offer, Foreign):
            self._overhear(frame, offer)
            return
        message = payload(frame)
        request = parse(message) if message is not None else None
        if request is None or offer is None:
            return
        if request.kind in set(MessageType):
            self.seen[MessageType(request.kind)] += 1
        if request.kind == MessageType.DECLINE:
            extra = {"code": "address_declined", "uid": self._uid}
            log.warning("the guest reports that %s is in use", offer.address, extra=extra)
        reply = answer(request, offer)
        if reply is None:
            return
        frame = reply_frame(reply, offer.server, offer.server_mac, offer.mac)
        self.socket.send(frame)

    def _overhear(self, frame: bytes, foreign: Foreign) -> None:
        message = payload(frame, CLIENT_PORT)
        lease = lease_of(message, foreign.mac) if message is not None else None
        if lease is not None:
            self.seen[MessageType.ACK] += 1
            self._leased(self._uid, foreign.index, lease)
