"""Keeps the VM records that this controller is writing, so that the watch need not decode them."""

from collections.abc import Iterator
from contextlib import contextmanager

from virtbus.schemas.record_signature import unsigned
from virtbus.schemas.vm import VmRecord


class OwnWrites:
    """The unfinished writes of VM records, by key.

    The watch usually delivers a record before the bus acknowledges the write.
    """

    def __init__(self) -> None:
        self._under_way: dict[str, tuple[bytes, VmRecord]] = {}

    @contextmanager
    def writing(self, key: str, value: bytes, record: VmRecord) -> Iterator[None]:
        """Keep a record and its encoded form during its write. A later write of the key wins."""
        own = self._under_way[key] = (value, record)
        try:
            yield
        finally:
            if self._under_way.get(key) is own:
                del self._under_way[key]

    def record_of(self, key: str, value: bytes) -> VmRecord | None:
        """Return the record that is being written if `value` without its signature is its encoding.

        Another controller may have written the key meanwhile, so the bytes are compared.
        """
        own = self._under_way.get(key)
        return own[1] if own is not None and unsigned(value) == own[0] else None
