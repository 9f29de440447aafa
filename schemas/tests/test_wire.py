"""Outside bytes are bounded before they are parsed, and refused in one way (MSG-01 … MSG-06)."""

import json
import struct
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virtbus.schemas import wire
from virtbus.schemas.envelope import Envelope, open_envelope
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.vm import Cpu, VmSpec

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), inner)
    ),
    max_leaves=20,
)


REFUSED = object()


def taken(body: bytes) -> Any:
    """Return the parsed value, or REFUSED; any other exception than VirtbusError is a failure."""
    try:
        return wire.decode(body)
    except VirtbusError:
        return REFUSED


def refusal(body: bytes) -> VirtbusError:
    with pytest.raises(VirtbusError) as caught:
        wire.decode(body)
    assert caught.value.expected
    assert len(str(caught.value)) < 500
    return caught.value


@given(plain)
def test_plain_values_survive_msgpack(value: Any) -> None:
    assert wire.decode(wire.encode(value)) == value


@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=8), plain, max_size=4
    )
)
def test_maps_survive_json(value: dict[str, Any]) -> None:
    assert wire.decode(wire.encode_json(value)) == value


@given(st.binary(max_size=200) | st.binary(max_size=200).map(lambda body: b"{" + body))
def test_any_bytes_decode_or_are_refused_in_one_way(body: bytes) -> None:
    if (value := taken(body)) is not REFUSED:
        wire.encode(value)  # an accepted value can be encoded again


@given(plain, st.data())
def test_a_flipped_or_cut_message_never_raises_anything_else(
    value: Any, data: st.DataObject
) -> None:
    body = bytearray(wire.encode(value))
    at = data.draw(st.integers(0, len(body) - 1))
    body[at] ^= data.draw(st.integers(1, 255))
    for cut in (bytes(body), bytes(body[:at])):
        taken(cut)


HEADERS = {"array32": b"\xdd", "map32": b"\xdf", "bin32": b"\xc6", "str32": b"\xdb"}


@pytest.mark.parametrize("head", HEADERS.values(), ids=HEADERS)
@pytest.mark.parametrize("length", [2**32 - 1, 2**31, wire.MAX_NODES + 1])
def test_a_length_without_data_is_refused(head: bytes, length: int) -> None:
    assert refusal(head + struct.pack(">I", length)).reason == "malformed"


@pytest.mark.parametrize("length", [2**32 - 1, 1, 0])
def test_ext_types_are_refused(length: int) -> None:
    assert refusal(b"\xc9" + struct.pack(">I", length) + b"\x05").reason == "malformed"
    assert refusal(b"\xd4\x05x").reason == "malformed"


@pytest.mark.parametrize(
    "data", [b"\x00" * 4, b"\x00" * 8, b"\xff" * 8, b"\x00" * 12, b"\xff" * 12, b"\x00" * 5]
)
def test_timestamps_are_refused(data: bytes) -> None:
    body = b"\xc7" + bytes([len(data)]) + b"\xff" + data
    assert refusal(body).reason == "malformed"
    assert refusal(b"\x81\xa4time" + body).reason == "malformed"


@pytest.mark.parametrize("depth", [wire.MAX_DEPTH + 1, 500, 1500, 100_000])
@pytest.mark.parametrize("kind", ["msgpack list", "msgpack map", "json"])
def test_deep_nesting_is_refused(kind: str, depth: int) -> None:
    body = {
        "msgpack list": b"\x91" * depth + b"\xc0",
        "msgpack map": b"\x81\xa1a" * depth + b"\xc0",
        "json": b'{"a":' * min(depth, 100_000) + b"1" + b"}" * depth,
    }[kind]
    assert refusal(body).code in {Code.INVALID, Code.TOO_LARGE}


def test_the_allowed_depth_is_read() -> None:
    value: Any = 1
    for _ in range(wire.MAX_DEPTH - 1):
        value = [value]
    assert wire.decode(wire.encode(value)) == value


@pytest.mark.parametrize("filler", [b"\x80", b"\x90", b"\xc0", b"\x01"])
def test_a_message_of_too_many_values_is_refused_before_it_is_built(filler: bytes) -> None:
    """The number of values bounds the work: 0.5 MiB of empty maps took 40 MB before."""
    count = wire.MAX_MESSAGE_BYTES - 5
    flat = b"\xdd" + struct.pack(">I", count) + filler * count
    rows = 1000
    nested = b"\xdc" + struct.pack(">H", rows) + (b"\xdc\x01\xf4" + filler * 500) * rows
    for body in (flat, nested):
        tracemalloc.start()
        try:
            assert refusal(body).reason == "malformed"
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak_bytes < 400 * wire.MAX_NODES


def test_exactly_the_allowed_number_of_values_is_read() -> None:
    assert len(wire.decode(wire.encode([0] * (wire.MAX_NODES - 1)))) == wire.MAX_NODES - 1
    refusal(wire.encode([0] * wire.MAX_NODES))
    refusal(wire.encode_json({"a": [0] * wire.MAX_NODES}))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"{",
        b"{}{}",
        b"{} x",
        b'{"a":NaN}',
        b'{"a":Infinity}',
        b'{"a":-Infinity}',
        b'{"a":1e999}',
        b'{"a":9223372036854775808}',
        b'{"a":' + b"9" * 5000 + b"}",
        b'{"a":1,"a":2}',
        b'{"a":{"b":1,"b":1}}',
        b'{"a":"\\ud800"}',
        b'{"\\ud800":1}',
        b'{"a":"\xff"}',
        b"{'a':1}",
        b'\xef\xbb\xbf{"a":1}',
        b"\x00{}",
        b"\xc0\xc0",
        b"\x81\xa1a\x01\x00",
        b"\x82\xa1a\x01\xa1a\x02",
        b"\x81\x01\x02",
        b"\x81\xc4\x01a\x02",
        b"\x81\x91\x01\x02",
        b"\x81\x80\x02",
        b"\x81\xc0\x02",
        b"\x81\xc3\x02",
        b"\xa1\xff",
        b"\xa3\xed\xa0\x80",
        b"\xcf\xff\xff\xff\xff\xff\xff\xff\xff",
        b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00",
        b"\xcb\x7f\xf0\x00\x00\x00\x00\x00\x00",
        b"\xca\xff\x80\x00\x00",
    ],
)
def test_ambiguous_archives_are_refused(body: bytes) -> None:
    assert refusal(body).reason == "malformed"


@pytest.mark.parametrize("number", [2**63 - 1, -(2**63)])
def test_the_largest_numbers_are_read(number: int) -> None:
    assert wire.decode(wire.encode(number)) == number


def test_a_message_over_the_limit_is_413_and_one_at_it_is_read() -> None:
    body = wire.encode("x" * (wire.MAX_MESSAGE_BYTES - 5))
    assert len(body) == wire.MAX_MESSAGE_BYTES
    wire.decode(body)
    assert refusal(body + b"x").code == Code.TOO_LARGE


def test_a_refused_message_leaves_nothing_for_the_next() -> None:
    for _ in range(3):
        refusal(b"\x93\x01")
        assert wire.decode(b"\x93\x01\x02\x03") == [1, 2, 3]


def test_a_refusal_contains_no_part_of_a_long_key() -> None:
    body = b"{" + b",".join([b'"' + b"k" * 10_000 + b'":1'] * 2) + b"}"
    assert len(str(refusal(body))) < 300


# --- models ----------------------------------------------------------------------------------
def test_all_problems_come_in_one_answer_each_with_its_path() -> None:
    value = {
        "domain": {"cpu": {"cores": 0, "sokets": 1}, "memory": {"guest": "1X"}},
        "volumes": [{"name": "a.b"}, {}],
        "node_selector": {"-bad": "x"},
    }
    with pytest.raises(VirtbusError) as caught:
        wire.validate(VmSpec, value, "spec")
    found = {detail.path: detail for detail in caught.value.body.details}
    assert set(found) == {
        "spec.domain.cpu.cores",
        "spec.domain.cpu.sokets",
        "spec.domain.memory.guest",
        "spec.volumes[0].name",
        "spec.volumes[1].name",
        "spec.node_selector.-bad",
    }
    assert found["spec.domain.cpu.sokets"].hint == "did you mean sockets?"
    assert found["spec.domain.cpu.sokets"].message == "unknown field"
    assert "(and 5 more)" in str(caught.value)


def test_a_refusal_never_repeats_the_input() -> None:
    secret = "hunter2-hunter2"
    for value in (
        {"volumes": [{"name": secret.upper()}]},
        {"volumes": [{"name": "a", "cloud_init_no_cloud": {"user_data": [secret]}}]},
        {"volumes": secret},
    ):
        with pytest.raises(VirtbusError) as caught:
            wire.validate(VmSpec, value)
        assert secret.lower() not in caught.value.body.model_dump_json().lower()


@pytest.mark.parametrize("value", [None, 1, "x", [], [["cores", 1]], b"x"])
def test_a_body_that_is_no_map_is_no_model(value: object) -> None:
    with pytest.raises(VirtbusError) as caught:
        wire.validate(Cpu, value)
    assert caught.value.code == Code.INVALID


def test_camel_case_gets_a_hint() -> None:
    with pytest.raises(VirtbusError) as caught:
        wire.validate(VmSpec, {"runStrategy": "Always"})
    assert caught.value.body.details[0].hint == "did you mean run_strategy?"


def test_equal_meaning_has_an_equal_hash_and_other_meaning_another() -> None:
    given_in_full = VmSpec.model_validate({"domain": {"cpu": {"cores": 1, "sockets": 1}}})
    assert wire.spec_hash(VmSpec()) == wire.spec_hash(given_in_full)
    labels = {"a": "1", "b": "2"}
    turned = dict(reversed(labels.items()))
    assert wire.spec_hash(VmSpec(node_selector=labels)) == wire.spec_hash(
        VmSpec(node_selector=turned)
    )
    assert wire.spec_hash(VmSpec()) != wire.spec_hash(VmSpec(termination_grace_s=31))


def test_the_hash_of_a_default_spec_is_unchanged() -> None:
    """Stored in records and in domains' metadata: a change makes every VM look changed."""
    assert wire.spec_hash(VmSpec()) == (
        "645abe6073ef5906dd4247487d0a05a597a28ab09c78191c3eed28a72ac50dbb"
    )


# --- envelope --------------------------------------------------------------------------------
def test_a_map_with_data_is_an_envelope() -> None:
    body = wire.encode({"id": "1", "data": {"name": "web"}, "timeout_ms": 500, "more": 1})
    opened = open_envelope(body)
    assert (opened.id, opened.data, opened.timeout_ms) == ("1", {"name": "web"}, 500)


@pytest.mark.parametrize("data", [{"name": "web", "image": "tiny"}, {}, {"id": "x"}])
def test_a_map_without_data_is_the_data(data: dict[str, str]) -> None:
    assert open_envelope(json.dumps(data).encode()) == Envelope(data=data)
    assert open_envelope(wire.encode(data)) == Envelope(data=data)


@pytest.mark.parametrize("body", [b"", b"  \n"])
def test_an_empty_body_is_a_request_without_data(body: bytes) -> None:
    assert open_envelope(body).data == {}


@pytest.mark.parametrize(
    "attributes",
    [
        {"timeout_ms": 0},
        {"timeout_ms": -1},
        {"timeout_ms": 3_600_001},
        {"timeout_ms": "soon"},
        {"id": "x" * 129},
        {"id": {}},
        {"epoch": "x"},
    ],
)
def test_wrong_attributes_are_a_refusal(attributes: dict[str, Any]) -> None:
    with pytest.raises(VirtbusError) as caught:
        open_envelope(wire.encode({"data": {}} | attributes))
    assert caught.value.code == Code.INVALID
    assert caught.value.body.details[0].path == next(iter(attributes))
