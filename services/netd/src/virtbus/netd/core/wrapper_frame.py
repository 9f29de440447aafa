"""Frames of vmwrapper and netd, simple enough for 60 lines of C.

A frame is a 4-byte big-endian length and that many bytes of NUL-ended strings. The request is
`virtbus-wrapper/1`, the uid, and the wrapper's monotonic times in ns (entry, connected). A refusal
is `R` and a reason line. A grant is `A`, the emulator, the number of tap descriptors and the
arguments. `@fd0@` in an argument stands for the first descriptor's number.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from virtbus.schemas.ids import check_uid

MAX_FRAME_BYTES = 64 * 1024
MAX_DESCRIPTORS = 128
"""Maximum number of descriptors that vmwrapper takes."""
VIRTIO = "virtio-net-pci"
PROTOCOL = b"virtbus-wrapper/1"
_MAX_TIMES = 8


class FrameError(ValueError):
    """A frame violates the protocol."""


@dataclass(frozen=True, slots=True)
class WrapperRequest:
    """A wrapper's request. `times_ns` are its own times, by CLOCK_MONOTONIC."""

    uid: str
    times_ns: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NicArgument:
    """One interface on QEMU's command line.

    `device` has the properties of the device, without `netdev` and `mac`. The interface has
    `queues` tap descriptors. With `vhost`, it also has as many descriptors of vhost-net.
    """

    device: Mapping[str, str | int | bool]
    mac: str
    queues: int = 1
    vhost: bool = False


def frame_length(header: bytes) -> int:
    """Return the length in a frame's first 4 bytes.

    Raises:
        FrameError: the length is zero, or over MAX_FRAME_BYTES (FDS-04).
    """
    length = int.from_bytes(header, "big")
    if not 0 < length <= MAX_FRAME_BYTES:
        msg = f"frame of {length} bytes; 1 to {MAX_FRAME_BYTES} are accepted"
        raise FrameError(msg)
    return length


def frame(body: bytes) -> bytes:
    """Return `body` with its length in front."""
    frame_length(len(body).to_bytes(4, "big"))
    return len(body).to_bytes(4, "big") + body


def read_request(body: bytes) -> WrapperRequest:
    """Return the request in a frame's body.

    Raises:
        FrameError: the request has another protocol, an invalid uid, or invalid times.
    """
    parts = body.split(b"\0")
    if len(parts) < 3 or parts[0] != PROTOCOL or parts[-1] or len(parts) > 3 + _MAX_TIMES:
        msg = "not a wrapper's request"
        raise FrameError(msg)
    try:
        uid = parts[1].decode("ascii")
        times = tuple(int(part[:20].decode("ascii")) for part in parts[2:-1])
        canonical = check_uid(uid)
    except ValueError as error:
        msg = f"not a wrapper's request: {error}"
        raise FrameError(msg) from error
    if canonical != uid:
        msg = "not a wrapper's request: the uid is not in lower case"
        raise FrameError(msg)
    return WrapperRequest(uid, times)


def refusal(code: str, message: str) -> bytes:
    """Return the frame of a refusal: one line that libvirt shows."""
    line = " ".join(f"{code}: {message}".split())
    return frame(b"R\0" + line.encode()[:2000] + b"\0")


def with_vhost(nics: Sequence[NicArgument]) -> list[NicArgument]:
    """Return the interfaces with vhost-net where a guest can use it and descriptors are left.

    Without vhost-net, the emulator copies the packets itself.
    """
    left = MAX_DESCRIPTORS - sum(nic.queues for nic in nics)
    found = []
    for nic in nics:
        vhost = nic.device.get("driver") == VIRTIO and nic.queues <= left
        left -= nic.queues * vhost
        found.append(replace(nic, vhost=vhost))
    return found


def vhosts_of(nics: Sequence[NicArgument]) -> int:
    """Return the number of descriptors of vhost-net that a grant needs."""
    return sum(nic.queues for nic in nics if nic.vhost)


def grant(emulator: str, nics: Sequence[NicArgument], firmware_uuid: str | None) -> bytes:
    """Return the frame of a grant.

    The frame must be sent with the tap descriptors of all queues in their order, followed by the
    descriptors of vhost-net. QEMU uses the last of two options `-uuid`, so the guest sees
    `firmware_uuid`.
    """
    arguments: list[str] = []
    count, vhosts = 0, sum(nic.queues for nic in nics)
    for number, nic in enumerate(nics):
        netdev = f"tap,id=net{number},{_descriptors('fd', count, nic.queues)}"
        count += nic.queues
        if nic.vhost:
            netdev += f",vhost=on,{_descriptors('vhostfd', vhosts, nic.queues)}"
            vhosts += nic.queues
        device = {**nic.device, "netdev": f"net{number}", "mac": nic.mac}
        arguments += ["-netdev", netdev]
        arguments += ["-device", json.dumps(device, separators=(",", ":"))]
    if firmware_uuid is not None:
        arguments += ["-uuid", firmware_uuid]
    parts = [emulator, str(vhosts), *arguments]
    if any("\0" in part or "\n" in part for part in parts):
        msg = "an argument holds a NUL or a newline"
        raise FrameError(msg)
    return frame(b"A\0" + b"".join(part.encode() + b"\0" for part in parts))


def _descriptors(word: str, first: int, queues: int) -> str:
    places = ":".join(f"@fd{place}@" for place in range(first, first + queues))
    return f"{word}={places}" if queues == 1 else f"{word}s={places}"
