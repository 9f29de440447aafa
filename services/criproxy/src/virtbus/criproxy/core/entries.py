"""Defines an entry of a list, selects entries by a filter, and joins entries to an answer.

In every list answer of CRI, the list is the first field. In protobuf's encoding, such an answer is
a sequence of framed entries: the bytes of two answers in a row are one answer with both lists.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

_LIST_FIELD = b"\x0a"
"""protobuf's tag for field 1 with a length."""


class Entry(NamedTuple):
    """One element of a list: the encoded message `raw`, and the parts for filters and routes."""

    key: str
    raw: bytes
    state: int = 0
    sandbox_id: str = ""
    pod_uid: str = ""
    labels: Mapping[str, str] = {}
    names: tuple[str, ...] = ()
    """Other names of an image."""


class Wanted(NamedTuple):
    """A filter. An empty part selects everything."""

    key: str = ""
    state: int | None = None
    sandbox_id: str = ""
    labels: Mapping[str, str] = {}

    @property
    def everything(self) -> bool:
        return self == EVERYTHING


EVERYTHING = Wanted()


def selected(entries: Iterable[Entry], wanted: Wanted) -> list[Entry]:
    """Return the entries that match all parts of the filter. The beginning of an id is enough."""
    return [
        one
        for one in entries
        if (one.key.startswith(wanted.key) or wanted.key in one.names)
        and wanted.state in {None, one.state}
        and one.sandbox_id.startswith(wanted.sandbox_id)
        and wanted.labels.items() <= one.labels.items()
    ]


def answer(entries: Iterable[Entry]) -> bytes:
    """Return the answer that lists the entries."""
    return b"".join(framed(one.raw) for one in entries)


def framed(raw: bytes) -> bytes:
    """Return a message as an element of the list of an answer."""
    size, length = len(raw), bytearray()
    while size > 0x7F:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    length.append(size)
    return _LIST_FIELD + bytes(length) + raw
