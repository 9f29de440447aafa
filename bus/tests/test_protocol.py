"""The bytes of a connection: messages with any split, malformed lines, headers, publications."""

import asyncio

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from nats.aio.client import Client
from nats.errors import ProtocolError

from virtbus.bus.client.link import Raw
from virtbus.bus.client.nats_client import RECORD_BYTES, DirectClient
from virtbus.bus.client.nats_protocol import MalformedError, headers_of, publication, take_messages
from virtbus.bus.client.owners import UNKNOWN, account_of
from virtbus.bus.errors import FullError

Message = tuple[int, bytes, bytes, bytes, bytes]

STREAM = (
    b"MSG a.b 1 5\r\nhello\r\n"
    b"PING\r\n"
    b"MSG a.b 1 _INBOX.x 0\r\n\r\n"
    b"HMSG $KV.vm.n1.u 2 $JS.ACK.KV_vm.w.1.7.7.9.0 28 35\r\n"
    b"NATS/1.0\r\nNats-TTL: 3s\r\n\r\n\r\nMSG a 1\r\n"
    b"+OK\r\n"
    b"HMSG r 2 16 16\r\nNATS/1.0 503\r\n\r\n\r\n"
    b"MSG none 99 1\r\nx\r\n"
    b"MSG a.b 1 2\r\n\r\n\r\n"
)
EXPECTED = [
    Raw("a.b", b"hello"),
    Raw("a.b", b"", "_INBOX.x"),
    Raw("$KV.vm.n1.u", b"MSG a 1", "$JS.ACK.KV_vm.w.1.7.7.9.0", {"Nats-TTL": "3s"}),
    Raw("r", b"", "", {"Status": "503"}),
    Raw("a.b", b"\r\n"),
]


class _Client(DirectClient):
    """Without a connection: it counts the pings."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Raw] = []
        self.pings = 0
        self._receivers = {1: self.seen.append, 2: self.seen.append}

    @property
    def is_closed(self) -> bool:
        return False

    async def _process_ping(self) -> None:
        self.pings += 1


@pytest.mark.parametrize("size", [1, 2, 3, 7, 16, 50, len(STREAM)])
async def test_messages_arrive_once_and_in_order_with_any_split(size: int) -> None:
    client = _Client()
    for start in range(0, len(STREAM), size):
        await client._ps.parse(STREAM[start : start + size])
    assert client.seen == EXPECTED
    assert client.pings == 1
    assert not client._ps.buf


async def test_a_receiver_that_fails_stops_nothing() -> None:
    client = _Client()

    def fail(raw: Raw) -> None:
        raise RuntimeError(raw.subject)

    client._receivers[1] = fail
    await client._ps.parse(STREAM)
    assert [raw.subject for raw in client.seen] == ["$KV.vm.n1.u", "r"]


async def test_no_message_is_delivered_after_its_subscription_ended() -> None:
    client = _Client()
    client._remove_sub(1)
    await client._ps.parse(STREAM)
    assert [raw.subject for raw in client.seen] == ["$KV.vm.n1.u", "r"]


@pytest.mark.parametrize(
    "line",
    [
        b"MSG a 1\r\n",
        b"MSG a x 1\r\n",
        b"MSG a 1 -1\r\n",
        b"MSG a 1 r r 1\r\n",
        b"HMSG a 1 5\r\n",
        b"HMSG a 1 9 5\r\n",
        b"HMSG a 1 r r 1 5\r\n",
        b"HMSG a 1 -2 5\r\n",
        b"MSG\ta 1 1\r\nx\r\n",
        b"M\x0fG a 1 1\r\nx\r\n",
        b"\r\n",
        b"MSG " + b"a" * 5000 + b" 1 1\r\nx\r\n",
    ],
)
async def test_a_malformed_line_ends_the_connection(line: bytes) -> None:
    with pytest.raises(ProtocolError):
        await _Client()._ps.parse(line)


def test_an_incomplete_message_tells_how_many_bytes_it_has() -> None:
    found: list[Message] = []

    def deliver(*message: bytes | int) -> None:
        found.append(message)  # type: ignore[arg-type]  # five of them

    line = b"MSG a 1 1000\r\n"
    assert take_messages(b"MSG b 2 1\r\nx\r\n" + line + b"x", deliver) == (14, len(line) + 1002)
    assert found == [(2, b"b", b"", b"", b"x")]
    with pytest.raises(MalformedError):
        take_messages(b"MSG a\r\n", deliver)


@pytest.mark.parametrize(
    "block",
    [
        b"NATS/1.0\r\nA: 1\r\nB:2:3 \r\nno colon\r\nA:\t4\r\n\r\n",
        b"NATS/1.0 100 Idle Heartbeat\r\nNats-Last-Consumer: 7\r\n\r\n",
        b"NATS/1.0 409 Exceeded MaxWaiting\r\n\r\n",
        b"NATS/1.0 404\r\n\r\n",
        b"NATS/1.0\r\nText: \xc3\xbcber\r\n\r\n",
    ],
)
async def test_headers_are_those_of_nats_py(block: bytes) -> None:
    assert headers_of(block) == (await Client()._process_headers(block) or {})


@pytest.mark.parametrize("name", [" A", "A ", "\tA", "\u00a0A", "\u2003A", "a", "A\x0b"])
def test_a_name_with_a_blank_is_another_name(name: str) -> None:
    block = f"NATS/1.0\r\nA: right\r\n{name}: forged\r\n\r\n"
    assert headers_of(block.encode())["A"] == "right"


def test_no_block_is_no_headers() -> None:
    assert headers_of(b"") == {}
    assert headers_of(b"NATS/1.0 \xff\xff\r\n\r\n") == {}


PIECES = (
    *(b"NATS/1.0", b"NATS/1.1 ", b"500", b" ", b"\r\n", b"\r", b"\n", b"\x80", b"X", b": ", b'"'),
    *(b"\\", b"Nats-Request-Info", b": ", b'{"acc":"CTL"', b',"x":"', b"}", b"Status: 500\r\n"),
)


@given(st.lists(st.sampled_from(PIECES), max_size=16))
@example([b"NATS/1.0\r\nX: y"])
@example([b"NATS/1.0\r\n"])
@example([b'Nats-Request-Info: {"acc":"CTL"}\r\n\r\n'])
def test_no_header_block_gives_an_account_of_the_senders_choice(
    pieces: list[bytes],
) -> None:
    written = b'Nats-Request-Info: {"acc":"OBSERVER","rtt":1}\r\n\r\n'
    headers = headers_of(b"".join(pieces)[:-2] + written)
    assert account_of(headers) in {"OBSERVER", UNKNOWN}


async def test_publications_are_those_of_nats_py() -> None:
    for headers in ({}, {"A": "1"}, {"A": "ü", "B": "2"}, {"A": "1\r\nPUB x 0", "B": "1\n2"}):
        client = Client()
        client._status, client._max_payload = Client.CONNECTED, 100
        client._flush_queue = asyncio.Queue()
        client._flusher_task = asyncio.current_task()
        client._transport = None
        await client.publish("a.b", b"body", "r", headers=headers or None)
        found = publication("a.b", b"body", "r", headers, 100)
        assert [found] == client._pending


async def test_publications_of_one_turn_are_written_together_up_to_a_record() -> None:
    client = DirectClient()
    client._status, client._max_payload = Client.CONNECTED, 1024**2
    client._flush_queue, client._flusher_task = asyncio.Queue(), asyncio.current_task()
    sent = [("a", b"x"), ("b", b"y" * RECORD_BYTES), ("c", b"z"), ("d", b"")]
    for subject, body in sent:
        await client.send(subject, body, "", {})
    commands = [publication(subject, body, "", {}, 1024**2) for subject, body in sent]
    assert client._pending == [commands[0], commands[1], commands[2] + commands[3]]
    assert client._pending_data_size == sum(map(len, commands))


def test_a_publication_has_no_second_command_and_no_more_than_the_most_bytes() -> None:
    for subject, reply in (("", ""), ("a b", ""), ("a\r\nPING", ""), ("a", "b\n"), ("a", "\tb")):
        with pytest.raises(MalformedError):
            publication(subject, b"", reply, {}, 100)
    assert publication("a", b"x" * 84, "", {"B": "c"}, 102).count(b"\r\n") == 5
    with pytest.raises(FullError):
        publication("a", b"x" * 85, "", {"B": "c"}, 102)
    assert publication("a", b"x" * 100, "", {}, 100)
    with pytest.raises(FullError):
        publication("a", b"x" * 101, "", {}, 100)
