"""Bodies that a stranger could send, and a walk over all subscriptions of a service."""

import asyncio
import json
import re
from collections.abc import Iterator

from virtbus.bus.client.codec import pack
from virtbus.bus.client.link import Raw
from virtbus.bus.client.memory_link import MemoryLink, MemoryServer
from virtbus.bus.client.message_format import CONTENT_TYPE, JSON
from virtbus.schemas.catalogue import CHANNELS, Plane
from virtbus.schemas.errors import MAX_ERROR_BYTES
from virtbus.schemas.wire import MAX_MESSAGE_BYTES

UID = "0192f0c1-2d3e-7abc-8def-0123456789ab"
CONTROLS = "\x01" * 400_000
ANSWER_S = 45.0
"""Longer than any handler that waits for nodes, none of which exists."""


def bodies(fields: tuple[str, ...]) -> Iterator[bytes]:
    """Malformed, deep, wide, long and mistyped bodies; `fields` are those of the receiver."""
    yield from (b"", b"\x00", b"{", b"\xc1", b"[]", b"null", b"\xc7\x01\x05a", b'"text"')
    yield from (b'{"a":' * 80_000, b"\x91" * 500_000, b"x" * (MAX_MESSAGE_BYTES + 1))
    yield b'{"data":1,"id":5,"timeout_ms":-1,"epoch":"x"}'
    yield b'{"uid":"\\ud800","data":NaN}'
    yield b'{"uid":' + b"9" * 400_000 + b"}"
    yield json.dumps({f"key{n}": 1 for n in range(19_900)}).encode()
    yield pack({"x" * 400_000: 1})
    for field in fields:
        yield pack({field: CONTROLS})
        yield pack({"data": {field: CONTROLS}})
    values: tuple[object, ...] = (
        "x" * 1000,
        CONTROLS[:10_000],
        [[[]]],
        {"a": {"b": []}},
        2**62,
        -1,
        b"\xff",
        None,
    )
    for value in values:
        yield pack({"data": dict.fromkeys(fields, value)})


def _known(subject: str) -> tuple[str, ...]:
    """Return the fields of a subject's message, by the catalogue."""
    tokens = subject.split(".")
    for channel in CHANNELS:
        wanted = channel.subject.split(".")
        if (
            channel.message is not None
            and len(wanted) == len(tokens)
            and all(a == b or "{" in a for a, b in zip(wanted, tokens, strict=True))
        ):
            return tuple(channel.message.model_fields)
    return ()


def heard(server: MemoryServer) -> list[str]:
    """Return one literal of each subject that a service or its discovery subscribed to."""
    subjects = {one.subject for one in server.subscribed if not one.subject.startswith("_INBOX")}
    return sorted(subject.replace("*", UID).replace(">", UID) for subject in subjects)


def endpoints(server: MemoryServer) -> set[str]:
    """Return one literal of each subject on which a service answers requests."""
    return {one.subject.replace("*", UID) for one in server.subscribed if one.queue}


def unheard(server: MemoryServer, function: str, service: str) -> list[str]:
    """Return the catalogue's requests to a service without a subscription."""
    heard_ = [one.subject for one in server.subscribed if one.queue]
    wanted = [
        channel.subject
        for channel in CHANNELS
        if channel.function == function
        and channel.plane in {Plane.REQUEST, Plane.STREAM}
        and channel.id.startswith(service)
    ]
    assert wanted
    return [
        subject
        for subject in wanted
        if not any(re.fullmatch(re.sub(r"\{\w+\}", "[^.]+", subject), one) for one in heard_)
    ]


async def attack(server: MemoryServer, *, heard_by: tuple[str, ...] = ("",)) -> dict[str, int]:
    """Send every body to every subscribed subject that contains a part of `heard_by`.

    Returns the answers. Asserts that each answer is bounded and that each request to an endpoint
    has one.
    """
    link = MemoryLink(server)
    answered: dict[str, int] = {}
    answering = endpoints(server)
    for subject in heard(server):
        if not any(part in subject for part in heard_by):
            continue
        answered[subject] = 0
        for body in bodies(_known(subject)):
            for headers in ({}, {CONTENT_TYPE: JSON}):
                if subject not in answering:
                    await link.send(subject, body, headers=headers)
                    await asyncio.sleep(0)
                    continue
                raw: Raw = await link.ask(subject, body, headers=headers, timeout_s=ANSWER_S)
                assert raw.status != "503", f"nobody serves {subject} any more"
                assert len(raw.body) <= MAX_ERROR_BYTES, (subject, body[:80])
                answered[subject] += 1
    return answered
