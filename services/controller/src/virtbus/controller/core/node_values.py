"""Caches one kind of values that controllers write to keys of nodes, as a watch delivers them."""

from collections.abc import ItemsView
from typing import Generic, TypeVar

from pydantic import BaseModel

from virtbus.schemas.records import read_stored

T = TypeVar("T", bound=BaseModel)


class NodeValues(Generic[T]):
    """The values by key, each with its revision. An unreadable value is None."""

    def __init__(self, model: type[T]) -> None:
        self._model = model
        self._stored: dict[str, tuple[T | None, int]] = {}

    def put(self, key: str, value: bytes, revision: int) -> None:
        """Process a value; raise VirtbusError if it is unreadable."""
        if self.at(key)[1] < revision:
            self._stored[key] = None, revision
            self._stored[key] = read_stored(self._model, key, value), revision

    def purge(self, key: str, revision: int) -> None:
        """Process a purge marker."""
        if self.at(key)[1] < revision:
            self.forget(key)

    def forget(self, key: str) -> None:
        """Drop a value that a complete list does not contain."""
        self._stored.pop(key, None)

    def at(self, key: str) -> tuple[T | None, int]:
        """Return the value and its revision; (None, 0) without a value."""
        return self._stored.get(key, (None, 0))

    def items(self) -> ItemsView[str, tuple[T | None, int]]:
        return self._stored.items()
