"""Selection and encoding of the domain names that guests get."""

from collections.abc import Iterable

from virtbus.schemas.dns import is_domain


def domains(texts: Iterable[str]) -> tuple[str, ...]:
    """Return the valid names among `texts`, each once and without the dot at its end."""
    names = (text.removesuffix(".") for text in texts)
    return tuple(dict.fromkeys(name for name in names if is_domain(name)))


def domain_list(names: Iterable[str]) -> bytes:
    """Return domain names as DNS encodes them, without compression (RFC 1035, 3.1)."""
    parts = []
    for name in names:
        labels = (label.encode("ascii") for label in name.strip(".").split("."))
        parts.append(b"".join(bytes((len(label),)) + label for label in labels) + b"\0")
    return b"".join(parts)


def first_domains(encoded: bytes, most_bytes: int) -> bytes:
    """Return the first names of a `domain_list` that fit in `most_bytes`."""
    at = end = 0
    while at < len(encoded):
        length = encoded[at]
        at += 1 + length
        if at > most_bytes:
            break
        if length == 0:
            end = at
    return encoded[:end]
