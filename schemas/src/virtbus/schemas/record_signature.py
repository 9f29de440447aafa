"""The signature of an encoded VM record: the last pair of its msgpack map (ADR 0032)."""

TEXT_BYTES = 52
"""Length of a signature's text: key id, a colon, 32 bytes in base64 without padding."""
_FIELD = b"\xa9signature\xd9" + bytes([TEXT_BYTES])
"""The msgpack bytes before the signature's text."""
_FIXMAP, _FIXMAP_MOST, _MAP16 = 0x80, 15, 0xDE


def unsigned(value: bytes) -> bytes:
    """Return an encoded record without its signature."""
    end = len(_FIELD) + TEXT_BYTES
    return _counted(value[:-end], -1) if value[-end:].startswith(_FIELD) else value


def with_signature(bare: bytes, text: str) -> bytes:
    """Return the unsigned record `bare` with the signature `text` of TEXT_BYTES characters."""
    return _counted(bare, 1) + _FIELD + text.encode()


def _counted(value: bytes, more: int) -> bytes:
    """Return a msgpack map with `more` added to the number of pairs in its header."""
    if value[0] == _MAP16:
        count, rest = int.from_bytes(value[1:3], "big") + more, value[3:]
    else:
        count, rest = value[0] - _FIXMAP + more, value[1:]
    if count <= _FIXMAP_MOST:
        return bytes([_FIXMAP + count]) + rest
    return bytes([_MAP16]) + count.to_bytes(2, "big") + rest
