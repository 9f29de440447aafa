"""Makes random tokens, and ids as UUIDv7 (RFC 9562 §5.7), ordered by millisecond of creation."""

import os
import time

_TOKEN_BYTES = 12
_TOKENS_AT_ONCE = 256
_tokens: list[bytes] = []
"""Unused random tokens. The kernel supplies 256 tokens at once.

Each call to the kernel releases the interpreter's lock. To get the lock back from other busy
threads takes 30 us.
"""
os.register_at_fork(after_in_child=_tokens.clear)


def random_token() -> bytes:
    """Return 12 cryptographically random bytes. Thread-safe."""
    try:
        return _tokens.pop()
    except IndexError:
        drawn = os.urandom(_TOKEN_BYTES * _TOKENS_AT_ONCE)
        _tokens.extend(
            drawn[at : at + _TOKEN_BYTES] for at in range(_TOKEN_BYTES, len(drawn), _TOKEN_BYTES)
        )
        return drawn[:_TOKEN_BYTES]


def uuid7() -> str:
    """Return a new UUIDv7 in canonical form: 48 bits of Unix milliseconds, 74 random bits."""
    value = time.time_ns() // 1_000_000 << 80 | int.from_bytes(random_token()[:10], "big")
    value = value & ~(0xF << 76) | 0x7 << 76
    value = value & ~(0x3 << 62) | 0x2 << 62
    text = f"{value & (1 << 128) - 1:032x}"
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"
