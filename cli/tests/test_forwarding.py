"""`vm port-forward --stdio` reads from a pipe, and from a file."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from virtbus.cli.vm import forwarding


@contextmanager
def pipe(_: Path) -> Iterator[int]:
    reader, writer = os.pipe()
    os.write(writer, b"GET /")
    os.close(writer)
    yield reader  # asyncio closes it


@contextmanager
def file(folder: Path) -> Iterator[int]:
    (folder / "request").write_bytes(b"GET /")
    with (folder / "request").open("rb") as opened:
        yield opened.fileno()


@pytest.mark.parametrize("source", [pipe, file])
async def test_standard_input_is_read_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: type
) -> None:
    with source(tmp_path) as descriptor:
        monkeypatch.setattr("sys.stdin", os.fdopen(descriptor, "rb", closefd=source is pipe))
        read = await forwarding._stdin()
        assert [await read(9), await read(9)] == [b"GET /", b""]
