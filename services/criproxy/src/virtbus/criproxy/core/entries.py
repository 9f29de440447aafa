"""Defines an entry of a list, selects entries by a filter, and joins entries to an answer.

Every list of CRI is the first field of its answer. So in protobuf's encoding, an answer is a
sequence of framed entries, and the bytes of two answers in a row are one answer with both lists.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

_LIST_FIELD = b"\x0a"
"""protobuf's tag for field 1 with a length."""


class Entry(NamedTuple):
    """One element of a list. `raw` is its encoded message; the other fields are parts of it.

    Filters and routes need these parts.
    """

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
        """Return True if the filter leaves out nothing."""
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
