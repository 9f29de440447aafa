"""Connects a guest's link with passt: `python -I -S passt_relay.py NAME MAC PROGRAM OPTIONS…`.

netd starts this process with two descriptors: a channel, and a tap in the VM's namespace. The
process makes a network namespace for passt, and netd connects this namespace with the network. Then
the process gives up all rights, starts passt in the namespace, and copies frames between the tap
and passt. If either process ends, both end, and the kernel removes the tap and the namespace.

passt carries echo requests only from the guest, so this process carries echo requests to the guest.
If passt's namespace answered, a guest that has not booted would seem to be up. This file imports
nothing of virtbus, so that it starts in 20 ms (ADR 0082).
"""

import contextlib
import ctypes
import fcntl
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

CHANNEL, TAP = 3, 4
"""The descriptors that netd gives this process."""
NOBODY = 65534
START_S = 20.0
_CLONE_NEWNET = 0x40000000
_PR_SET_NO_NEW_PRIVS = 38
_SIOCOUTQ, _ATTEMPTS, _TURN_S = 0x5411, 50, 0.0001
_SO_SNDBUFFORCE, _BUFFER = 32, 4 << 20
"""Socket option and size in bytes for passt's send buffer. passt drops frames when this buffer is
full, and its connections may then hang for ever.
"""
_SOL_RAW, _ICMP_FILTER = 255, 1
_ONLY_ECHO_REQUESTS = (~(1 << 8) & 0xFFFFFFFF).to_bytes(4, sys.byteorder)
_IP, _IPV6, _ICMP_AT = b"\x08\x00", b"\x86\xdd", 34
"""The types of frames with IP packets, and the offset of the data behind an IPv4 header."""
_TCP, _SYN_ACK = 6, 0x12
_LENGTH = 4
"""The size of the length in bytes that precedes each frame in passt's stream, in network order."""
_MOST, _READ = 65_536, 262_144
_SYSCTLS = {
    "net/ipv4/ip_unprivileged_port_start": "0",
    "net/ipv4/ping_group_range": "0 2147483647",
    "net/ipv4/icmp_echo_ignore_all": "1",
    "net/ipv6/icmp/echo_ignore_all": "1",
    "net/ipv6/conf/all/accept_dad": "0",
    "net/ipv6/conf/default/accept_dad": "0",
}
"""These settings let passt open low ports and echo sockets without rights. They also stop the
kernel's answers to echo requests, and its check for duplicate addresses: the guest does the check.
"""
_LIBC = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Run until passt or the tap ends."""
    name, mac, program, *options = sys.argv[1:]
    with socket.socket(fileno=CHANNEL) as channel:
        _enter_new_namespace()
        with Path("/proc/self/ns/net").open("rb") as namespace:
            socket.send_fds(channel, [b"made"], [namespace.fileno()])
        if not channel.recv(1):
            return  # netd has ended, or cannot connect the namespace
        echo = _echo_socket()
        stream, theirs = socket.socketpair()
        theirs.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, _BUFFER)
        _give_up_rights()
        guest = bytes.fromhex(mac.replace(":", ""))
        router = bytes.fromhex(_value(options, "-M").replace(":", ""))
        _send(stream, _announcement(guest, router, socket.inet_aton(_value(options, "-a"))))
        with theirs:
            done = _start(name, program, options, theirs)
        channel.sendall(b"ok" if done is None else done)
    if done is None:
        os.set_blocking(TAP, True)
        threading.Thread(target=_to_passt, args=(stream, echo), daemon=True).start()
        threading.Thread(
            target=_echo_to_guest, args=(echo, guest + router + _IP), daemon=True
        ).start()
        _to_guest(stream)


def _enter_new_namespace() -> None:
    if _LIBC.unshare(_CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    for key, value in _SYSCTLS.items():
        path = Path("/proc/sys", key)
        if path.exists():
            path.write_text(value)


def _give_up_rights() -> None:
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    _LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def _start(name: str, program: str, options: list[str], theirs: socket.socket) -> bytes | None:
    """Start passt, and wait until it goes to the background. Return the error, or None."""
    fd = theirs.fileno()
    try:
        subprocess.run(  # noqa: S603  a setting of netd
            [name, "--fd", str(fd), *options],
            executable=program,
            pass_fds=[fd],
            env={},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=START_S,
            check=True,
        )
    except subprocess.CalledProcessError as error:
        return bytes(error.stderr)[-4096:] or b"it ended"
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error).encode()
    return None


def _value(options: list[str], flag: str) -> str:
    return options[options.index(flag) + 1]


def _announcement(guest: bytes, router: bytes, address: bytes) -> bytes:
    """Return an ARP announcement of the guest, from which passt learns its MAC.

    Without the announcement, passt could not reach a guest that sends no ARP: a silent guest, or a
    guest that already knows its router's MAC. Connections can arrive as soon as passt runs, so the
    announcement is in its stream before it starts.
    """
    arp = b"\0\1\x08\0\6\4\0\1" + guest + address + bytes(6) + address
    return router + guest + b"\x08\x06" + arp


def _send(stream: socket.socket, frame: bytes) -> None:
    stream.sendall(len(frame).to_bytes(_LENGTH, "big") + frame)


def _echo_socket() -> socket.socket:
    echo = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
    echo.setsockopt(_SOL_RAW, _ICMP_FILTER, _ONLY_ECHO_REQUESTS)
    return echo


def _echo_to_guest(echo: socket.socket, head: bytes) -> None:
    while True:
        packet = echo.recv(_MOST)
        with contextlib.suppress(OSError):
            os.write(TAP, head + packet)


def _is_echo_reply(frame: bytes) -> bool:
    """Return True for an echo reply in an unfragmented IPv4 packet without options."""
    whole = len(frame) >= _ICMP_AT + 8 and frame[20] & 0x3F == 0 and frame[21] == 0
    return whole and frame[12:15] == _IP + b"\x45" and (frame[23], frame[_ICMP_AT]) == (1, 0)


def has_no_source(frame: bytes) -> bool:
    """Return True for an IPv6 packet from `::`, such as a check for duplicate addresses.

    passt of March 2023 takes `::` for the guest's address, and then sends to `::`.
    """
    return frame[12:14] == _IPV6 and frame[22:38] == bytes(16)


def _wait_until_taken(stream: socket.socket) -> None:
    """Return once passt has read all frames, or after some milliseconds.

    passt loses track of a connection if it reads the guest's SYN,ACK and first data together.
    """
    for _attempt in range(_ATTEMPTS):
        unread = fcntl.ioctl(stream, _SIOCOUTQ, bytes(4))
        if not any(unread):
            return
        time.sleep(_TURN_S)


def acknowledgement(frame: bytes) -> bytes:
    """Return the client's ACK for a SYN,ACK of the guest; empty for other frames.

    passt of March 2023 sends this ACK only with the client's first data. A server that speaks
    first, such as sshd, would wait for ever. A later passt sends the ACK itself; the duplicate is
    harmless.
    """
    four = frame[12:15] == _IP + b"\x45"
    six = frame[12:14] == _IPV6 and len(frame) > 20 and frame[20] == _TCP
    at = 34 if four else 54
    tcp = frame[at:]
    if not (six or (four and frame[23] == _TCP)) or len(tcp) < 20 or tcp[13] != _SYN_ACK:
        return b""
    following = (int.from_bytes(tcp[4:8], "big") + 1) % (1 << 32)
    body = tcp[2:4] + tcp[:2] + tcp[8:12] + struct.pack("!IBBHHH", following, 80, 16, 256, 0, 0)
    size = 4 if four else 16
    source, destination = frame[at - size : at], frame[at - 2 * size : at - size]
    summed = checksum(source + destination + struct.pack("!HH", _TCP, len(body)) + body)
    head = struct.pack("!BBHHHBBH", 0x45, 0, 40, 0, 0x4000, 64, _TCP, 0)
    if four:
        head = head[:10] + checksum(head + source + destination)
    else:
        head = struct.pack("!IHBB", 6 << 28, 20, _TCP, 64)
    ether = frame[6:12] + frame[:6] + frame[12:14]
    return ether + head + source + destination + body[:16] + summed + body[18:]


def checksum(data: bytes) -> bytes:
    """Return the checksum of the internet protocols (RFC 1071)."""
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return struct.pack("!H", ~total & 0xFFFF)


def _to_passt(stream: socket.socket, echo: socket.socket) -> None:
    try:
        while True:
            frame = os.read(TAP, _MOST)
            if _is_echo_reply(frame):
                end = 14 + int.from_bytes(frame[16:18], "big")
                with contextlib.suppress(OSError):  # no route to the reply's address
                    echo.sendto(frame[_ICMP_AT:end], (socket.inet_ntoa(frame[30:34]), 0))
                continue
            if has_no_source(frame):
                continue
            _send(stream, frame)
            if answer := acknowledgement(frame):
                _wait_until_taken(stream)
                os.write(TAP, answer)
    except OSError:
        os._exit(0)


def _to_guest(stream: socket.socket) -> None:
    """Copy frames from passt until passt ends. While the tap is down, frames are lost."""
    rest = b""
    while part := stream.recv(_READ):
        rest, at = rest + part, 0
        while len(rest) >= at + _LENGTH:
            end = at + _LENGTH + int.from_bytes(rest[at : at + _LENGTH], "big")
            if end > len(rest):
                break
            with contextlib.suppress(OSError):
                os.write(TAP, rest[at + _LENGTH : end])
            at = end
        rest = rest[at:]
        if len(rest) > _READ:
            break  # longer than any frame
    os._exit(0)


if __name__ == "__main__":
    main()
