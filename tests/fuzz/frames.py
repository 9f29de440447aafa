"""`python -m tests.fuzz.frames SEED COUNT TAP MAC ADDRESS GATEWAY`: a guest that sends anything.

It runs in the network namespace of a VM in place of its QEMU: it writes DHCP, DNS and echo replies
to the tap, and reads the answers. It prints the number of frames sent, and of DHCP answers.
"""

import fcntl
import os
import random
import struct
import sys
import time
from ipaddress import IPv4Address

TUNSETIFF = 0x400454CA
IFF_TAP_NO_PI = 0x1002
VNET_HEADER = 0x4000
ECHOES = 2000
MAGIC = b"\x63\x82\x53\x63"


def opened(tap: str) -> int:
    """The tap, as QEMU has it but without an offload header."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    for flags in (IFF_TAP_NO_PI, IFF_TAP_NO_PI | VNET_HEADER):
        try:
            fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", tap.encode(), flags))
        except OSError:
            continue
        return descriptor
    raise SystemExit("the tap cannot be opened")


def checksum(data: bytes) -> int:
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data[: len(data) // 2 * 2]))
    total = (total & 0xFFFF) + (total >> 16)
    return ~(total + (total >> 16)) & 0xFFFF


def ip_frame(mac: bytes, protocol: int, source: bytes, to: bytes, body: bytes) -> bytes:
    header = struct.pack(
        "!BBHHHBBH4s4s", 0x45, 0, 20 + len(body), 1, 0, 64, protocol, 0, source, to
    )
    header = header[:10] + struct.pack("!H", checksum(header)) + header[12:]
    return b"\xff" * 6 + mac + b"\x08\x00" + header + body


def dhcp(rng: random.Random, mac: bytes) -> bytes:
    """A DISCOVER or REQUEST whose options are valid, cut, repeated, endless or of false length."""
    kind = rng.choice((1, 1, 3, 3, 4, 7, 8, 0, 255))
    fixed = struct.pack(
        "!BBBBIHH4s4s4s4s16s64s128s",
        *(1, 1, 6, 0, rng.getrandbits(32), 0, rng.choice((0, 0x8000))),
        *(b"\0" * 4, b"\0" * 4, b"\0" * 4, b"\0" * 4, mac.ljust(16, b"\0"), b"", b""),
    )
    options = bytes([53, 1, kind])
    options += rng.choice(
        (
            b"\xff",
            b"",
            bytes([50, 4]) + rng.randbytes(4) + b"\xff",
            bytes([57, 2]) + rng.randbytes(2) + b"\xff",
            bytes([61, 255]) + rng.randbytes(40),
            bytes([12, 200]) + b"\xff" * 200 + b"\xff",
            bytes([55, 1, 121]) * 80,
            bytes([52, 1, 3]) + b"\xff",
            b"\0" * 1200 + b"\xff",
            rng.randbytes(rng.randrange(600)),
        )
    )
    message = fixed + rng.choice((MAGIC, MAGIC, MAGIC, b"\0\0\0\0")) + options
    if rng.random() < 0.1:
        message = message[: rng.randrange(len(message))]
    length = rng.choice((8 + len(message), 8 + len(message), 0, 9, 0xFFFF))
    return struct.pack("!HHHH", 68, 67, length, 0) + message


def query(rng: random.Random) -> bytes:
    """A DNS query whose name, counts and records are valid, looped, cut, endless or random."""
    name = rng.choice(
        (
            b"\x03web\x07default\x02vm\x08internal\0",
            b"\x01x" * 120 + b"\0",
            b"\x3f" + b"x" * 63 + b"\0",
            b"\xc0\x0c",
            b"\xc0\xff",
            b"\x40" * 30,
            bytes([rng.randrange(64)]) + rng.randbytes(rng.randrange(60)),
        )
    )
    counts = rng.choice(((1, 0, 0, 0), (1, 0, 0, 1), (1, 0, 0, 9), (65535,) * 4, (0,) * 4))
    flags = rng.choice((0x0100, 0x0100, 0x8180, 0x2800, rng.getrandbits(16)))
    head = struct.pack("!HHHHHH", rng.getrandbits(16), flags, *counts)
    kind = struct.pack("!HH", rng.choice((1, 28, 12, 6, 255, rng.getrandbits(16))), 1)
    edns = b"\0\0\x29\xff\xff\0\0\0\0" + struct.pack("!H", rng.choice((0, 4, 400, 65535)))
    message = head + name + kind + rng.choice((b"", edns, edns + rng.randbytes(400)))
    if rng.random() < 0.2:
        message = rng.randbytes(rng.randrange(1200))
    return struct.pack("!HHHH", 1024 + rng.getrandbits(15), 53, 8 + len(message), 0) + message


def main(argv: list[str]) -> None:
    seed, count, tap, mac_text, address, gateway = argv
    rng = random.Random(seed)
    mac = bytes.fromhex(mac_text.replace(":", ""))
    descriptor = opened(tap)
    sent = answered = 0
    for _ in range(int(count)):
        frame = ip_frame(mac, 17, b"\0" * 4, b"\xff" * 4, dhcp(rng, mac))
        if rng.random() < 0.1:
            frame = frame[:14] + rng.randbytes(rng.choice((0, 1, 20, 1400)))
        sent += _written(descriptor, frame)
        time.sleep(rng.choice((0.0, 0.01, 0.06)))
        answered += _answers(descriptor)
    own, host = IPv4Address(address).packed, IPv4Address(gateway).packed
    for _ in range(int(count)):
        sent += _written(descriptor, ip_frame(mac, 17, own, host, query(rng)))
    for number in range(ECHOES):
        body = struct.pack("!BBHHH", 0, 0, 0, rng.getrandbits(16), number & 0xFFFF) + b"x" * 24
        body = body[:2] + struct.pack("!H", checksum(body)) + body[4:]
        sent += _written(descriptor, ip_frame(mac, 1, own, host, body))
    time.sleep(0.2)
    answered += _answers(descriptor)
    sys.stdout.write(f"{sent} {answered}\n")


def _written(descriptor: int, frame: bytes) -> int:
    try:
        os.write(descriptor, frame)
    except OSError:
        return 0
    return 1


def _answers(descriptor: int) -> int:
    """Return the DHCP answers among the received frames."""
    count = 0
    while True:
        try:
            count += b"\x00\x43\x00\x44" in os.read(descriptor, 4096)[:64]
        except OSError:
            return count


if __name__ == "__main__":
    main(sys.argv[1:])
