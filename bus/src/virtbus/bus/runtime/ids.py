"""Makes new ids: UUIDv7 (RFC 9562 §5.7), ordered by their millisecond of creation."""

import os
import time


def uuid7() -> str:
    """Return a new UUIDv7 in canonical form: 48 bits of Unix milliseconds, 74 random bits."""
    value = time.time_ns() // 1_000_000 << 80 | int.from_bytes(os.urandom(10), "big")
    value = value & ~(0xF << 76) | 0x7 << 76
    value = value & ~(0x3 << 62) | 0x2 << 62
    text = f"{value & (1 << 128) - 1:032x}"
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"
