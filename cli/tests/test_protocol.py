"""The NATS protocol reader: the same events for any chunks, one exception for junk."""

from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virtbus.bus.client.nats_protocol import MalformedError
from virtbus.cli.wire.protocol import (
    Line,
    Reader,
    WireMessage,
    info_of,
)

WIRE = (
    b'INFO {"server_name":"x","headers":true}\r\n'
    b"+OK\r\nPING\r\n"
    b"MSG a.b 1 5\r\nhel\r\n\r\n"
    b"MSG a.b 1 _INBOX.1 0\r\n\r\n"
    b"HMSG r 7 16 16\r\nNATS/1.0 503\r\n\r\n\r\n"
    b"HMSG r 7 re 22 24\r\nNATS/1.0\r\nKey: v:1\r\n\r\nok\r\n"
    b"-ERR 'Permissions Violation for Publish to \"x\"'\r\n"
)
EVENTS: list[WireMessage | Line] = [
    Line("INFO", '{"server_name":"x","headers":true}'),
    Line("+OK"),
    Line("PING"),
    WireMessage("a.b", 1, "", b"hel\r\n"),
    WireMessage("a.b", 1, "_INBOX.1", b""),
    WireMessage("r", 7, "", b"", {"Status": "503"}),
    WireMessage("r", 7, "re", b"ok", {"Key": "v:1"}),
    Line("-ERR", "'Permissions Violation for Publish to \"x\"'"),
]


def read_all(*chunks: bytes) -> list[WireMessage | Line]:
    reader = Reader()
    found: list[WireMessage | Line] = []
    for chunk in chunks:
        reader.feed(chunk)
        while (event := reader.next_event()) is not None:
            found.append(event)
    return found


@given(st.lists(st.integers(0, len(WIRE)), max_size=20))
def test_events_do_not_depend_on_how_bytes_are_cut(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(WIRE)]
    chunks = [WIRE[a:b] for a, b in pairwise(edges)]
    assert read_all(*chunks) == EVENTS


@given(st.binary(max_size=200))
def test_junk_raises_only_protocol_errors(junk: bytes) -> None:
    with suppress(MalformedError):
        read_all(junk + b"\r\n" * 3)


@given(
    verb=st.sampled_from([b"MSG", b"HMSG"]),
    words=st.lists(st.sampled_from([b"a", b"-1", b"1", b"99999999999", b"5"]), max_size=6),
)
def test_impossible_message_lines_raise_only_protocol_errors(
    verb: bytes, words: list[bytes]
) -> None:
    with suppress(MalformedError):
        read_all(b" ".join([verb, *words]) + b"\r\n" + b"xxxxx\r\n" * 3)


def test_endless_line_is_refused() -> None:
    with pytest.raises(MalformedError, match="endless"):
        read_all(b"x" * 70_000)


@pytest.mark.parametrize("line", [b"PING", b"INFO", b"INFO []", b'INFO {"a"'])
def test_a_greeting_that_is_no_info_is_refused(line: bytes) -> None:
    (found,) = read_all(line + b"\r\n")
    assert isinstance(found, Line)
    with pytest.raises(MalformedError, match="greeting"):
        info_of(found)


def test_a_message_longer_than_announced_is_refused() -> None:
    with pytest.raises(MalformedError):
        read_all(b"MSG a 1 1\r\nxxxxx\r\n")
