"""Tars as Python, GNU tar and attackers write them, in chunks of any size (SRC-16)."""

import gzip
import io
import random
import tarfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from backports import zstd
from hypothesis import given, settings
from hypothesis import strategies as st

from virtbus.imaged.core import decoding
from virtbus.imaged.core.archive import Archive, ArchiveEntry, DamagedError
from virtbus.imaged.core.decoding import PIECE_BYTES, decoded

NAMES = st.text(st.characters(exclude_characters="\0/", codec="utf-8"), min_size=1, max_size=120)


def pieces(data: bytes, seed: int = 0) -> Iterator[bytes]:
    chance, at = random.Random(seed), 0
    while at < len(data):
        step = chance.choice((1, 7, 512, 600, 4096))
        yield data[at : at + step]
        at += step


def read(data: bytes, seed: int = 0) -> list[tuple[ArchiveEntry, bytes]]:
    archive, found = Archive(pieces(data, seed)), []
    while (entry := archive.entry()) is not None:
        found.append((entry, b"".join(archive.data())))
    return found


def made(*infos: tarfile.TarInfo, form: int = tarfile.PAX_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as archive:
        for info in infos:
            archive.addfile(info, io.BytesIO(bytes(info.size)) if info.isreg() else None)
    return out.getvalue()


def info(name: str, size: int = 0, kind: bytes = tarfile.REGTYPE) -> tarfile.TarInfo:
    one = tarfile.TarInfo(name)
    one.size, one.type = size, kind
    return one


@given(
    st.lists(st.tuples(st.lists(NAMES, min_size=1, max_size=5), st.integers(0, 2000)), max_size=6),
    st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
    st.integers(0, 99),
)
@settings(max_examples=150, deadline=None)
def test_names_and_sizes_are_those_that_were_written(
    files: list[tuple[list[str], int]], form: int, seed: int
) -> None:
    wanted = [(parts, size) for parts, size in files if not {".", ".."} & set(parts)]
    data = made(*(info("/".join(parts), size) for parts, size in wanted), form=form)
    found = read(data, seed)
    assert [(list(e.parts), e.kind, e.size_bytes, len(d)) for e, d in found] == [
        (parts, "0", size, size) for parts, size in wanted
    ]


@given(st.binary(max_size=3000), st.booleans())
@settings(max_examples=200, deadline=None)
def test_bytes_of_any_kind_end_in_entries_or_one_error(data: bytes, zeros: bool) -> None:
    try:
        read(data + bytes(1024 if zeros else 0))
        list(decoded(pieces(data), 1 << 20, 100))
    except DamagedError:
        pass


@given(st.integers(0, 2047), st.integers(0, 255))
@settings(max_examples=300, deadline=None)
def test_a_changed_byte_is_seen_or_harmless(at: int, value: int) -> None:
    data = bytearray(made(info("disk/" + "n" * 150, 100), form=tarfile.PAX_FORMAT))
    data[at % len(data)] = value
    try:
        found = read(bytes(data))
    except DamagedError:
        return
    assert len(found) <= 2


def test_a_ustar_prefix_and_a_gnu_number_are_read() -> None:
    long = "a" * 90 + "/" + "b" * 90
    assert read(made(info(long, 3), form=tarfile.USTAR_FORMAT))[0][0].parts == tuple(
        long.split("/")
    )
    huge = info("x", 1 << 40)
    header = huge.tobuf(format=tarfile.GNU_FORMAT)
    assert Archive(iter([header])).entry() == ArchiveEntry(("x",), "0", 1 << 40)
    huge.size = 1 << 40
    header = huge.tobuf(format=tarfile.PAX_FORMAT)
    assert Archive(iter([header])).entry() == ArchiveEntry(("x",), "0", 1 << 40)


def header(**fields: bytes) -> bytes:
    """A header of a file `x` with raw fields in it, its checksum right."""
    data = bytearray(info("x").tobuf(format=tarfile.USTAR_FORMAT)[:512])
    for name, value in fields.items():
        at = {"name": 0, "size": 124, "kind": 156}[name]
        data[at : at + len(value)] = value
    data[148:156] = b" " * 8
    data[148:156] = b"%06o\0 " % sum(data)
    return bytes(data)


def pax(body: bytes) -> bytes:
    size = b"%011o\0" % len(body)
    return header(kind=b"x", size=size) + body + bytes(-len(body) % 512) + header()


HOSTILE = {
    "a negative size": header(size=b"\xff" * 12),
    "a size beyond all": header(size=b"\x80" + b"\xff" * 11),
    "a size of letters": header(size=b"xxxxxxxxxxx\0"),
    "a PAX size beyond all": pax(b"30 size=99999999999999999999\n"),
    "a negative PAX size": pax(b"11 size=-1\n"),
    "a PAX record that is too long": pax(b"999 path=x\n"),
    "a PAX record of length 0": pax(b"0 path=x\n"),
    "a PAX record without an end": pax(b"9 path=xy"),
    "a PAX record without a key": pax(b"6 abc\n"),
    "a PAX name with a NUL": pax(b"12 path=a\0b\n"),
    "PAX records of a GiB": header(kind=b"x", size=b"%011o\0" % 1024**3),
    "a long name of a GiB": header(kind=b"L", size=b"%011o\0" % 1024**3),
    "a name outside": header(name=b"../../etc/x"),
    "an old sparse file": header(kind=b"S"),
    "a PAX sparse file": pax(b"22 GNU.sparse.major=1\n"),
    "a cut header": header()[:100],
    "cut data": header(size=b"%011o\0" % 1000) + bytes(512),
    "a wrong checksum": header()[:-100] + b"x" * 100,
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_hostile_archives_are_refused(data: bytes) -> None:
    with pytest.raises(DamagedError):
        read(data)


def test_links_and_folders_have_no_data_even_if_they_claim_it() -> None:
    data = header(kind=b"2", size=b"%011o\0" % 512) + header(name=b"y\0")
    assert [entry.parts for entry, _ in read(data)] == [("x",), ("y",)]


@pytest.mark.parametrize("pack", [gzip.compress, zstd.compress])
def test_decompressed_data_comes_in_pieces_and_ends_at_its_bounds(
    pack: Callable[[bytes], bytes],
) -> None:
    packed, sizes = pack(bytes(100 * PIECE_BYTES)), list[int]()
    with pytest.raises(DamagedError, match="more than 50000000 bytes"):
        sizes.extend(map(len, decoded(pieces(packed), 50_000_000, 100_000)))
    assert max(sizes) <= PIECE_BYTES
    with pytest.raises(DamagedError, match="2-fold"):
        list(decoded(pieces(packed), 1 << 40, 2))
    assert sum(map(len, decoded(pieces(packed), 1 << 40, 100_000))) == 100 * PIECE_BYTES


def test_entries_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("virtbus.imaged.core.archive.MAX_ENTRIES", 3)
    read(header() * 3)
    with pytest.raises(DamagedError, match="more than 3"):
        read(header() * 4)


@pytest.mark.parametrize(
    "nothing",
    [gzip.compress(b"", mtime=0), zstd.compress(b""), b"\x50\x2a\x4d\x18" + bytes(4)],
    ids=["gzip", "zstd", "skipped"],
)
def test_endless_empty_members_are_refused(monkeypatch: pytest.MonkeyPatch, nothing: bytes) -> None:
    monkeypatch.setattr(decoding, "MAX_MEMBERS", 100)
    assert b"".join(decoded(pieces(nothing * 100), 1 << 20, 100)) == b""
    with pytest.raises(DamagedError, match="more than 100 parts"):
        list(decoded(pieces(nothing * 101), 1 << 20, 100))


def test_the_rest_of_an_archive_is_not_copied_for_each_entry() -> None:
    copied = 0

    class Counted(bytes):
        def __getitem__(self, which: Any) -> Any:
            nonlocal copied
            part = Counted(super().__getitem__(which))
            copied += len(part)
            return part

    tar = Counted(made(*(info(f"f{number}") for number in range(500))))
    archive = Archive(iter([tar]))
    while archive.entry() is not None:
        pass
    assert copied <= len(tar)
