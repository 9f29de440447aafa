"""Netlink messages for the token bucket that limits a link (`linux/pkt_sched.h`, sch_tbf).

They are hand-written, because pyroute2's bucket has no rates above 4 GB/s, and its module of
traffic control imports every scheduler.
"""

import errno
import struct
import sys

from virtbus.netd.core.netlink import (
    HEADER_BYTES,
    NLM_F_CREATE,
    NLM_F_DUMP,
    NLM_F_REPLACE,
    NetlinkCall,
    attr,
    find_attr,
    nest,
    text,
)
from virtbus.schemas.nic import NicLimit

_NEW, _DELETE, _GET = 36, 37, 38
_TCMSG = struct.Struct("=B3xiIII")
_ROOT = 0xFFFFFFFF
_HANDLE = 1 << 16
_KIND, _OPTIONS = 1, 2
_PARAMETERS, _RATE64, _BURST = 1, 4, 6
_ETHERNET = 1
"""`TC_LINKLAYER_ETHERNET`. With this value, the kernel needs no table of rates."""
_ETHERNET_HEADER = 18
_MAX_U32 = 2**32 - 1
_DELAY_S = 0.05
"""Time in which the queue, without the burst, is sent at the limit's rate."""
_MIN_QUEUE_BYTES = 16 * 1024
"""Least size of the queue without the burst. At a low rate, frames wait longer than `_DELAY_S`."""


def limited(index: int, limit: NicLimit, mtu: int) -> NetlinkCall:
    """Return the call that limits the traffic out of link `index`, in place of an earlier limit."""
    rate, burst = limit.bytes_per_s, burst_of(limit, mtu)
    queue = min(burst + max(int(rate * _DELAY_S), _MIN_QUEUE_BYTES), _MAX_U32)
    capped = min(rate, _MAX_U32)
    parameters = struct.pack("=BBHhHI", 0, _ETHERNET, 0, 0, 0, capped)
    parameters += bytes(12) + struct.pack("=III", queue, 0, 0)
    options = attr(_PARAMETERS, parameters) + attr(_BURST, struct.pack("=I", burst))
    if rate > _MAX_U32:
        options += attr(_RATE64, struct.pack("=Q", rate))
    body = _TCMSG.pack(0, index, _HANDLE, _ROOT, 0) + text(_KIND, "tbf") + nest(_OPTIONS, options)
    return NetlinkCall(f"limit link {index}", _NEW, NLM_F_CREATE | NLM_F_REPLACE, body)


def burst_of(limit: NicLimit, mtu: int) -> int:
    """Return the size of the bucket in bytes: at least one frame, so that large frames pass."""
    burst = limit.burst_bytes or min(max(limit.bytes_per_s // 100, 16 * 1024), 2**31 - 1)
    return max(burst, mtu + _ETHERNET_HEADER)


def unlimited(index: int) -> NetlinkCall:
    """Return the call that removes the limit of link `index`, if it has one."""
    body = _TCMSG.pack(0, index, 0, _ROOT, 0)
    tolerated = (errno.ENOENT, errno.EINVAL)
    return NetlinkCall(f"no limit of link {index}", _DELETE, 0, body, tolerated=tolerated)


def list_schedulers() -> NetlinkCall:
    """Return the call that lists the schedulers of all links in the namespace."""
    return NetlinkCall("list schedulers", _GET, NLM_F_DUMP, _TCMSG.pack(0, 0, 0, 0, 0), acked=False)


def limited_link(message: bytes) -> tuple[int, int] | None:
    """Return link index and bytes per second of a listed scheduler; None for other schedulers."""
    _family, index, _handle, _parent, _info = _TCMSG.unpack_from(message, HEADER_BYTES)
    start = HEADER_BYTES + _TCMSG.size
    if find_attr(message, start, _KIND) != b"tbf\0":
        return None
    options = find_attr(message, start, _OPTIONS)
    wide = find_attr(options, 0, _RATE64)
    if wide:
        return index, int.from_bytes(wide, sys.byteorder)
    rate: int = struct.unpack_from("=I", find_attr(options, 0, _PARAMETERS), 8)[0]
    return index, rate
