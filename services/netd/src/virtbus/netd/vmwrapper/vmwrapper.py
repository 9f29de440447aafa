#!/usr/bin/python3 -ISE
"""Fetches a VM's tap descriptors from netd, then becomes QEMU.

netd replaces the two words between @ at the installation. The program imports only built-in
modules, because others cost milliseconds at every start. libvirt shows the program's stderr.
"""

import _socket
import itertools
import posix
import sys
import time

SOCKET = "@WRAPPER_SOCKET@"
EMULATOR = "@EMULATOR@"
PROTOCOL = b"virtbus-wrapper/1"
TIMEOUT_S = 8.0  # netd waits 5 s for a network that is being attached
MAX_DESCRIPTORS = 128  # a tap for each queue of a VM's NICs; vhost-net may use the rest


def fail(message: str) -> None:
    """Write `message` to stderr as one line, and exit with code 1."""
    posix.write(2, f"virtbus: {message}\n".encode())
    posix._exit(1)


def fetch(uid: bytes, entered_ns: int) -> tuple[list[bytes], list[int]]:
    """Request the taps of VM `uid`. Return the strings of netd's answer, and the descriptors."""
    peer = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    peer.settimeout(TIMEOUT_S)
    peer.connect(SOCKET)
    if int.from_bytes(peer.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, 12)[4:8], "little"):
        fail("netd_foreign: the process behind netd's socket is not root's; restart virtbus-netd")
    times = [b"%d" % moment for moment in (entered_ns, time.monotonic_ns())]
    request = b"\0".join([PROTOCOL, uid, *times, b""])
    peer.sendall(len(request).to_bytes(4, "big") + request)
    space = _socket.CMSG_SPACE(4 * MAX_DESCRIPTORS)
    answer, control, _flags, _address = peer.recvmsg(65540, space)
    descriptors = [
        int.from_bytes(data[at : at + 4], sys.byteorder)
        for level, kind, data in control
        if (level, kind) == (_socket.SOL_SOCKET, _socket.SCM_RIGHTS)
        for at in range(0, len(data), 4)
    ]
    while len(answer) < 4 or len(answer) < 4 + int.from_bytes(answer[:4], "big"):
        part = peer.recv(65540)
        if not part:
            fail("netd_gone: netd closed the connection; see its log, start the VM again")
        answer += part
    peer.close()
    return answer[4:].split(b"\0")[:-1], descriptors


def main(argv: list[bytes]) -> None:
    """Become QEMU. Add taps for a guest, and leave the arguments of libvirt's probes unchanged."""
    flags = dict(itertools.pairwise(argv))  # the last of repeated flags wins, as in QEMU
    uid = flags.get(b"-uuid", b"")
    if not flags.get(b"-name", b"").startswith(b"guest=") or not uid:
        posix.execv(EMULATOR, [EMULATOR.encode(), *argv[1:]])
    words, descriptors = fetch(uid, time.monotonic_ns())
    if words[:1] != [b"A"] or len(words) < 3:
        fail(words[1].decode("utf-8", "replace") if len(words) > 1 else "netd_answer: no answer")
    if int(words[2]) != len(descriptors):
        fail(f"netd_answer: {len(descriptors)} descriptors came, {int(words[2])} were named")
    more = words[3:]
    for place, descriptor in enumerate(descriptors):
        posix.set_inheritable(descriptor, True)
        more = [word.replace(b"@fd%d@" % place, b"%d" % descriptor) for word in more]
    posix.execv(words[1], [words[1], *argv[1:], *more])


if __name__ == "__main__":
    try:
        main([argument.encode("utf-8", "surrogateescape") for argument in sys.argv])
    except OSError as error:
        fail(f"netd_unreachable: {error}; is virtbus-netd running?")
    except ValueError as error:
        fail(f"netd_answer: {error}; do netd and vmwrapper come from one version?")
