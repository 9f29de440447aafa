"""Envelopes, types, ids, filters and times: the basics of every message."""

import contextlib
import json
import time
import uuid
from pathlib import Path

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from virtbus.bus.client import codec, timestamps
from virtbus.bus.client.filters import matches
from virtbus.bus.client.message_format import JSON, MSGPACK, type_of
from virtbus.bus.client.ports import Message
from virtbus.bus.errors import BusError
from virtbus.bus.provisioning.permissions import node_users
from virtbus.bus.runtime.bus_settings import BusSettings
from virtbus.bus.runtime.ids import uuid7
from virtbus.schemas.envelope import open_envelope
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.events import Event, EventKind
from virtbus.schemas.wire import MAX_MESSAGE_BYTES

UID = "0192f0c1-2d3e-7abc-8def-0123456789ab"

TOKEN = st.text("abc01-_", min_size=1, max_size=4)
SUBJECT = st.lists(TOKEN, min_size=1, max_size=6).map(".".join)


def test_uuid7_is_of_its_version_and_of_this_moment() -> None:
    before_ms = time.time_ns() // 1_000_000
    made = [uuid.UUID(uuid7()) for _ in range(1000)]
    after_ms = time.time_ns() // 1_000_000
    assert all(one.version == 7 and one.variant == uuid.RFC_4122 for one in made)
    assert all(before_ms <= one.int >> 80 <= after_ms for one in made)
    assert len(set(made)) == 1000


def test_an_envelope_is_opened_by_the_schemas() -> None:
    subject = "virtbus.api.v1.vm.create"
    body = codec.envelope(subject, {"a": b"x"}, message_id="i", source="cli", timeout_ms=1500)
    frame = open_envelope(body)
    assert (frame.id, frame.source, frame.timeout_ms) == ("i", "cli", 1500)
    assert (frame.type, frame.subject) == ("virtbus.vm.create.v1", subject)
    assert frame.data == {"a": b"x"}


@pytest.mark.parametrize(
    ("subject", "type_"),
    [
        ("virtbus.api.v1.vm.create", "virtbus.vm.create.v1"),
        (f"virtbus.evt.n1.{UID}.vm.accepted", "virtbus.vm.accepted.v1"),
        (f"virtbus.node.n1.ready.{UID}.image", "virtbus.ready.image.v1"),
        ("virtbus.node.n1.rpc.agent.console", "virtbus.rpc.agent.console.v1"),
        ("virtbus.node.n1.report.netd", "virtbus.report.netd.v1"),
        ("virtbus.ask.n1.names", "virtbus.ask.names.v1"),
        ("elsewhere", ""),
    ],
)
def test_the_type_follows_from_the_subject(subject: str, type_: str) -> None:
    assert type_of(subject) == type_


def test_models_are_packed_without_their_defaults_however_deep() -> None:
    event = Event(kind=EventKind.VM_ACCEPTED, uid=UID, node="n1")
    packed = codec.pack({"items": [event]})
    assert msgpack.unpackb(packed) == {"items": [{"kind": "vm.accepted", "uid": UID, "node": "n1"}]}


def test_an_unencodable_value_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="object"):
        codec.pack(object())


@given(st.binary(max_size=200))
def test_an_answer_of_any_bytes_is_a_value_or_a_bus_error(body: bytes) -> None:
    for kind in (MSGPACK, JSON):
        with contextlib.suppress(BusError):
            codec.unpack_answer(body, kind)


@given(st.binary(max_size=200))
def test_a_message_of_any_bytes_is_read_or_refused(body: bytes) -> None:
    with contextlib.suppress(VirtbusError):
        codec.read_message(Event, Message("s", body))


def test_a_message_over_the_bound_is_refused() -> None:
    with pytest.raises(VirtbusError, match="bytes"):
        codec.read_message(Event, Message("s", b"\xc4" * (MAX_MESSAGE_BYTES + 1)))


@given(SUBJECT, st.data())
def test_a_filter_made_of_a_subject_matches_it(subject: str, data: st.DataObject) -> None:
    tokens = subject.split(".")
    starred = [data.draw(st.sampled_from([token, "*"])) for token in tokens]
    assert matches(".".join(starred), subject)
    assert matches(">", subject)
    assert matches(".".join([*tokens, ">"]), subject) is False
    assert matches(".".join([*tokens[:-1], ">"]), subject)
    assert matches(".".join([*tokens, "*"]), subject) is False


@pytest.mark.parametrize(
    ("text", "expected_ns"),
    [
        ("2026-11-21T10:08:08.123456789Z", 1_795_255_688_123_456_789),
        ("2026-11-21T10:08:08Z", 1_795_255_688_000_000_000),
        ("2026-11-21T12:08:08.5+02:00", 1_795_255_688_500_000_000),
        ("yesterday", 0),
    ],
)
def test_server_times_keep_their_nanoseconds(text: str, expected_ns: int) -> None:
    assert timestamps.time_ns(text) == expected_ns


def test_credentials_are_read_again_and_their_faults_are_named(tmp_path: Path) -> None:
    path = tmp_path / "bus.creds"
    settings = BusSettings.found(tmp_path, "client", creds=path)
    with pytest.raises(BusError, match="does not exist"):
        settings.resolved()
    path.write_text("[")
    with pytest.raises(BusError, match="cannot be read"):
        settings.resolved()
    path.write_text(json.dumps({"url": "nats://h:1", "user": "u", "password": "p"}))
    assert settings.resolved().servers == ["nats://h:1"]
    assert BusSettings.found(tmp_path, "client", server="nats://x:2").url == "nats://x:2"


def test_a_nodes_permissions_name_no_other_node_and_no_stream_call() -> None:
    for role in node_users("n1"):
        said = [subject for subject in role.publish if subject != "_R_.>"]
        assert all("n1" in subject for subject in said)
        assert not any("STREAM" in s or "CONSUMER.CREATE" in s for s in said)
