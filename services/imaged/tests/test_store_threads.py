"""The store's lists answer while other threads add names and images."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from virtbus.imaged.core.limits import SpaceLimits
from virtbus.imaged.core.links import NameLink
from virtbus.imaged.edge.store import ImageStore
from virtbus.schemas.image import ImageFormat, ImageInfo


def image(number: int) -> ImageInfo:
    digest = f"sha256:{hashlib.sha256(b'%d' % number).hexdigest()}"
    return ImageInfo(digest=digest, format=ImageFormat.RAW, size_bytes=512, virtual_size_bytes=512)


FIRST = image(0)


class Busy:
    """A store in which another thread adds a name and an image at each step of a loop."""

    def __init__(self, store: ImageStore) -> None:
        self.store = store
        busy, self._numbers = self, count(1)

        class Name(str):
            __slots__ = ()

            def encode(self, *args: Any) -> bytes:  # by which each file name is made
                busy.change()
                return super().encode(*args)

        class Link(NameLink):
            def __getattribute__(self, name: str) -> Any:
                if name in NameLink.model_fields:
                    busy.change()
                return super().__getattribute__(name)

        class After(str):
            __slots__ = ()

            def __lt__(self, other: str) -> bool:
                busy.change()
                return super().__lt__(other)

        self.after = After("")
        self._name, self._link = Name, Link
        for _ in range(2):
            self.change()

    def change(self) -> None:
        number = next(self._numbers)
        if number < 100:
            made, name = image(number), self._name(f"n{number}")
            self.store._images[made.digest] = made
            self.store._links[name] = self._link.of(name, made, made.digest)


@pytest.fixture
def busy(tmp_path: Path) -> Iterator[Busy]:
    with closing(ImageStore(tmp_path, SpaceLimits(0, 0.0))) as store:
        yield Busy(store)


READS: dict[str, Callable[[Busy], object]] = {
    "pinned": lambda busy: busy.store.pinned(FIRST.digest),
    "may_be": lambda busy: busy.store.may_be(FIRST.digest, FIRST.digest),
    "links_of": lambda busy: busy.store.links_of("https://example.org/i"),
    "named": lambda busy: busy.store.named(FIRST.digest),
    "images": lambda busy: busy.store.images(),
    "page": lambda busy: busy.store.page(busy.after),
    "keys": lambda busy: busy.store.keys(),
    "uses": lambda busy: busy.store.uses(frozenset()),
    "plain_names": lambda busy: busy.store.plain_names(),
    "save_uses": lambda busy: busy.store.save_uses(1.0),
    "garbage": lambda busy: busy.store.garbage(frozenset(), 60.0),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_list_answers_while_a_transfer_adds_its_name(
    busy: Busy, read: Callable[[Busy], object]
) -> None:
    read(busy)


def test_the_time_of_use_of_a_name_that_is_deleted_meanwhile_is_no_error(busy: Busy) -> None:
    name = next(iter(busy.store._links))
    busy.store.used(name)
    busy.store._names_used_s.pop(name)  # a delete takes the name out on another thread
    busy.store.save_uses(1.0)
