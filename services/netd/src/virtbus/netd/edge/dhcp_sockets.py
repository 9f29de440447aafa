"""Opens the packet sockets on taps, for netd's DHCP answers or to read another server's answers."""

import socket
import struct
from collections.abc import Sequence
from contextlib import ExitStack
from ctypes import addressof, create_string_buffer

from virtbus.netd.core import names
from virtbus.netd.core.attachment import Nic
from virtbus.netd.core.dhcp_frame import reply_filter, request_filter

_ETH_P_ALL = 0x0003
_SO_ATTACH_FILTER = 26
_SOL_PACKET, _PACKET_IGNORE_OUTGOING = 263, 23
_DHCP_BUFFER_BYTES = 32 * 1024


def dhcp_sockets(nics: Sequence[Nic]) -> list[socket.socket]:
    """Return a socket on the tap of each interface. The thread must be in the VM's namespace."""
    with ExitStack() as on_failure:
        opened = [on_failure.enter_context(_dhcp_socket(nic)) for nic in nics]
        on_failure.pop_all()
    return opened


def _dhcp_socket(nic: Nic) -> socket.socket:
    """Return a packet socket that receives the guest's DHCP requests and router solicitations.

    If another server answers (`on_segment`), the socket receives that server's DHCP answers
    instead. The filter precedes the bind, so no unwanted frame is ever queued.
    """
    steps = reply_filter() if nic.on_segment else request_filter(names.mac_bytes(nic.mac))
    program = b"".join(struct.pack("=HBBI", *step) for step in steps)
    buffer = create_string_buffer(program, len(program))
    kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
    packets = socket.socket(socket.AF_PACKET, kind, 0)
    try:
        packets.setsockopt(
            socket.SOL_SOCKET,
            _SO_ATTACH_FILTER,
            struct.pack("@HP", len(program) // 8, addressof(buffer)),
        )
        if not nic.on_segment:
            packets.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
        packets.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _DHCP_BUFFER_BYTES)
        packets.bind((nic.tap, _ETH_P_ALL))
    except BaseException:
        packets.close()
        raise
    return packets
