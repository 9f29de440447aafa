"""Mutates valid messages into hostile bodies. Pure: the same draw gives the same bytes."""

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgpack
from pydantic import BaseModel
from tests.fuzz.ground import EVIL, NETWORK
from tests.fuzz.pool import NAMESPACE, Pool
from tests.fuzz.texts import hostile_text

from virtbus.bus.client.message_format import (
    CONTENT_TYPE,
    ERROR_CODE,
    ERROR_TEXT,
    JSON,
    MSGPACK,
    TRACEPARENT,
)
from virtbus.documents.examples import full, minimal
from virtbus.schemas.api import VmCreate
from virtbus.schemas.wire import MAX_DEPTH, MAX_MESSAGE_BYTES, MAX_NODES, encode

PAYLOAD_BYTES = 1024 * 1024
"""The maximum message of nats-server, headers included."""
SIZES = (
    *(MAX_MESSAGE_BYTES - near for near in (1, 0, -1, 64, 400, 1024)),
    *(64 * 1024, 64 * 1024 + 1, 256 * 1024, 400_000, PAYLOAD_BYTES - 2048),
)
COUNTS = (1, 100, 4000, MAX_NODES - 100, MAX_NODES, MAX_NODES + 1)
DEPTHS = (MAX_DEPTH - 1, MAX_DEPTH, MAX_DEPTH + 1, 1000, 100_000)
BUILT_DEPTHS = (*DEPTHS[:3], 150)
"""A depth that our own encoders must handle, from any stack depth of their caller."""
FILL = ("a", "\x01", "\x00", "\u00e9", "\U0001f600", '"', "\n", " ", "{", "*")
WRONG: tuple[Any, ...] = (
    *(None, True, 0, -1, 2**31, 2**53 + 1, 2**63 - 1, -(2**63), 1.5, 1e300, float("nan")),
    *("", "x", "_", "..", "../../etc/shadow", "a.b", ">", "*", "\x00", "\ud800", "é" * 300),
    *("%s%n", "${x}", "-rf", "\n\r\nINFO {}", "0" * 400, [], {}, [[]], {"": ""}, {"__class__": 1}),
    *(b"", b"\xff" * 100),
)

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Message:
    """A message that is sent `times` times; `what` names the mutation."""

    what: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    times: int = 1
    reply: str = ""
    """The reply subject; empty: an inbox of the attacker."""


def _spoilt(value: Any) -> bytes:
    """Encode anything as msgpack, even invalid text."""
    return msgpack.packb(value, unicode_errors="surrogatepass")


def plain(model: type[BaseModel], rng: random.Random, pool: Pool) -> Json:
    """Return a valid example about the attackers' own objects."""
    if model is VmCreate and rng.random() < 0.7:
        return own_vm(rng, pool)
    example = (full if rng.random() < 0.7 else minimal)(model)
    found: Json = _own(msgpack.unpackb(encode(example)), rng, pool)
    return found


def own_vm(rng: random.Random, pool: Pool) -> Json:
    """Return a create that is admitted."""
    vm: Json = {"name": pool.name(rng), "namespace": NAMESPACE, "uid": pool.uid(rng)}
    vm |= {"image": pool.image(rng), "memory": rng.choice(("32MiB", "64MiB"))}
    vm["spec"] = {"node_selector": {"kubernetes.io/hostname": rng.choice(("e2e", "e2e", EVIL))}}
    if rng.random() < 0.4:
        vm["network"] = NETWORK
    if rng.random() < 0.5:
        vm["user_data"] = hostile_text(rng)
    return vm


def _own(value: Any, rng: random.Random, pool: Pool, key: str = "") -> Any:
    """Replace the example's names by names of the attackers."""
    match value:
        case dict():
            return {name: _own(inner, rng, pool, name) for name, inner in value.items()}
        case list():
            return [_own(inner, rng, pool, key) for inner in value]
        case _:
            pass
    makes: dict[str, Callable[[], Any]] = {
        "uid": lambda: pool.uid(rng),
        "name": lambda: pool.name(rng),
        "namespace": lambda: NAMESPACE,
        "node": lambda: EVIL,
        "nodes": lambda: EVIL,
        "image": lambda: pool.image(rng),
        "ref": lambda: pool.image(rng),
        "user_data": lambda: hostile_text(rng),
        "network_data": lambda: hostile_text(rng),
        "memory": lambda: "32MiB",
    }
    return makes[key]() if key in makes else value


# --- mutations of the data ------------------------------------------------------------------
def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Yield the path of every value inside."""
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    return [path, *(place for key, inner in items for place in _places(inner, (*path, key)))]


def _with(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy: Any = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = _with(copy[path[0]], path[1:], new)
    return copy


def _replaced(data: Any, rng: random.Random) -> tuple[str, Any]:
    path = rng.choice(_places(data))
    new = rng.choice(WRONG)
    return f"{'.'.join(map(str, path)) or 'all'} = {str(new)[:20]!r}", _with(data, path, new)


def _long(data: Any, rng: random.Random) -> tuple[str, Any]:
    path, fill, size = rng.choice(_places(data)), rng.choice(FILL), rng.choice(SIZES)
    text = fill * (size // len(fill.encode()))
    return f"{'.'.join(map(str, path)) or 'all'} of {size} x {fill!r}", _with(data, path, text)


def _wide(data: Any, rng: random.Random) -> tuple[str, Any]:
    count = rng.choice(COUNTS)
    more = {f"field_{number}_x": number for number in range(count)}
    maps = [path for path in _places(data) if isinstance(_at(data, path), dict)]
    outer = rng.random() < 0.6 and () in maps
    path = () if outer or not maps else rng.choice(maps)
    inner = _at(data, path) if maps else {}
    return f"{count} unknown fields in {path}", _with(data, path, {**inner, **more})


def _many(data: Any, rng: random.Random) -> tuple[str, Any]:
    count = rng.choice(COUNTS)
    lists = [path for path in _places(data) if isinstance(_at(data, path), list)]
    if not lists:
        return f"list of {count}", [data] * min(count, 5000)
    path = rng.choice(lists)
    one = (_at(data, path) or ["x"])[0]
    return f"{path} has {count}", _with(data, path, [one] * min(count, 5000))


def _deep(data: Any, rng: random.Random) -> tuple[str, Any]:
    value: Any = "x"
    depth = rng.choice(BUILT_DEPTHS)
    for level in range(depth):
        value = {"a": value} if level % 2 else [value]
    path = rng.choice(_places(data))
    return f"{path} nests {depth}", _with(data, path, value)


def _less(data: Any, rng: random.Random) -> tuple[str, Any]:
    if not isinstance(data, dict) or not data:
        return "nothing", None
    name = rng.choice(list(data))
    return f"no {name}", {key: value for key, value in data.items() if key != name}


def _at(data: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        data = data[key]
    return data


DATA = (*[_replaced] * 6, _long, _wide, _many, _deep, _deep, _less, _less)


# --- mutations of the bytes -----------------------------------------------------------------
def encoded(data: Any, rng: random.Random) -> tuple[bytes, dict[str, str]]:
    """Encode as msgpack or JSON, with a header that fits, is false or is missing."""
    as_json = rng.random() < 0.4
    try:
        body = json.dumps(data).encode() if as_json else _spoilt(data)
    except (TypeError, ValueError, OverflowError, RecursionError):
        as_json, body = False, _spoilt(str(data)[:100])
    right, wrong = (JSON, MSGPACK) if as_json else (MSGPACK, JSON)
    kinds = (right, right, wrong, "", "text/html", "application/json; charset=utf-16", "x" * 2000)
    kind = rng.choice(kinds)
    return body[: PAYLOAD_BYTES - 8192], {CONTENT_TYPE: kind} if kind else {}


def _flipped(body: bytes, rng: random.Random) -> bytes:
    spoilt = bytearray(body or b"x")
    for _ in range(rng.randrange(1, 8)):
        spoilt[rng.randrange(len(spoilt))] = rng.randrange(256)
    return bytes(spoilt)


SPOILT: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "cut": lambda body, rng: body[: rng.randrange(len(body) + 1)],
    "bits flipped": _flipped,
    "noise": lambda _, rng: rng.randbytes(rng.choice((1, 16, 4096))),
    "one byte": lambda _, rng: bytes([rng.randrange(256)]),
    "deep msgpack": lambda _, rng: b"\x91" * rng.choice(DEPTHS),
    "deep json": lambda _, rng: b'{"a":' * rng.choice(DEPTHS),
    "lying lengths": lambda body, _: b"\xdf\xff\xff\xff\xff" + body[:100],
    "long number": lambda _, rng: b'{"a":' + b"9" * rng.choice((400, 4301, 100_000)) + b"}",
    "twice": lambda _, __: b'{"a":1,"a":2,"b":NaN,"c":1e999}',
}
"""Bodies that no encoder makes."""


def _envelope(data: Any, subject: str, rng: random.Random) -> tuple[str, Json]:
    """Wrap it in CloudEvents, right or wrong."""
    frame: Json = {
        "id": f"fuzz-{rng.randrange(8)}",
        "source": "fuzz",
        "type": "virtbus.fuzz.v1",
        "subject": subject,
        "data": data,
        "timeout_ms": rng.choice((1, 1000, 30_000, 3_600_000)),
    }
    if rng.random() < 0.5:
        return "enveloped", frame
    name = rng.choice([*frame, "time", "epoch", "generation", "x"])
    return f"enveloped, {name} wrong", frame | {name: rng.choice(WRONG)}


NATS_STATUSES = ("100", "204", "404", "408", "409", "500", "503")
"""Statuses of heartbeats, ends and errors, which only servers send."""


def _headers(rng: random.Random, pool: Pool) -> dict[str, str]:
    """Headers that a client may write, some of which are reserved for servers."""
    return rng.choice(
        (
            {TRACEPARENT: rng.choice(("00-0-0-0", "x" * 3000, "00-" + "f" * 32 + "-" + "0" * 16))},
            {"Nats-Msg-Id": f"fuzz-{rng.randrange(4)}"},
            {"Nats-Rollup": rng.choice(("all", "sub"))},
            {"Nats-TTL": rng.choice(("1", "never", "-1", "9999999h"))},
            {"Nats-Expected-Last-Sequence": "1", "Nats-Expected-Last-Subject-Sequence": "0"},
            {"Nats-Batch-Id": "b", "Nats-Batch-Sequence": "1", "Nats-Batch-Commit": "1"},
            {ERROR_CODE: "abc", ERROR_TEXT: "e" * 4000},
            {"KV-Operation": rng.choice(("DEL", "PURGE", "x"))},
            {"Status": rng.choice(NATS_STATUSES)},
            {f"X-{number}": pool.uid(rng) for number in range(300)},
        )
    )


def drawn(
    rng: random.Random, pool: Pool, model: type[BaseModel] | None, subject: str, *, enveloped: bool
) -> Message:
    """Return one message for a subject."""
    data: Any = plain(model, rng, pool) if model is not None else _free(rng, pool)
    what, headers, times = "valid", dict[str, str](), 1
    if rng.random() < 0.6:
        what, data = rng.choice(DATA)(data, rng)
    if enveloped and rng.random() < 0.5:
        word, data = _envelope(data, subject, rng)
        what = f"{what}; {word}"
    body, headers = encoded(data, rng)
    if rng.random() < 0.15:
        word = rng.choice(sorted(SPOILT))
        body = SPOILT[word](body, rng)
        what = f"{what}; {word}"
    if rng.random() < 0.15:
        more = _headers(rng, pool)
        headers |= more
        what = f"{what}; headers {next(iter(more))}"
    reply = ""
    if rng.random() < 0.03:
        reply = f"$KV.vm._.{pool.uid(rng)}"
        what = f"{what}; answer to {reply[:12]}"
    if rng.random() < 0.04:
        times = rng.choice((8, 64)) if len(body) < 4096 else 4
        what = f"{what}; {times} times"
    return Message(what[:240], body, headers, times, reply)


def _free(rng: random.Random, pool: Pool) -> Any:
    """Return data for a subject without a model, which JetStream often parses."""
    return rng.choice(
        (
            {"batch": 1_000_000, "expires": 10**18, "no_wait": True},
            {"batch": 10, "max_bytes": 1, "idle_heartbeat": 1},
            {"seq": rng.choice((0, 1, -1, 2**63))},
            {"last_by_subj": f"$KV.vm.e2e.{pool.uid(rng)}"},
            {"uid": pool.uid(rng)},
            {},
            "",
        )
    )
