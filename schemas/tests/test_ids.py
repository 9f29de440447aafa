"""Ids refuse text that could add a token, leave a directory, or look like another (BUS-01)."""

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from virtbus.schemas import ids

HOSTILE = [
    "",
    ".",
    "..",
    "a.b",
    "*",
    "a*",
    ">",
    "a>",
    " ",
    " a",
    "a ",
    "a b",
    "a\r\nPUB x 1\r\ny",
    "a\n",
    "\n",
    "a\x00",
    "\x00",
    "a\u202eb",
    "A",
    "Web",
    "\u0430",  # Cyrillic twin of a
    "\uff41",  # full-width twin of a
    "a\u0301",
    "\u0131",  # dotless i
    "\u212a",  # Kelvin sign: lower() makes it an ASCII k
    "\u0663",
    "\u00b2",
    "-a",
    "-c",
    "_",
    "_name",
    "a_b",
    "a/b",
    "../etc",
    "a;b$(id)",
    "$KV",
    "{{7*7}}",
    "%s",
    "a" * 64,
    "a" * 300,
    "\ud800",
]
UUID = "0192f0c1-2d3e-7abc-8def-0123456789ab"


@pytest.mark.parametrize("text", HOSTILE)
def test_a_hostile_id_is_refused_by_every_way_in(text: str) -> None:
    assert not ids.is_id(text)
    with pytest.raises(ValueError, match="must be 1-63 characters"):
        ids.check_id(text)
    with pytest.raises(ValidationError):
        TypeAdapter(ids.Id).validate_python(text)


@pytest.mark.parametrize("text", ["a", "0", "web", "web-1", "0-", "a" * 63, "a--b"])
def test_a_dns_label_is_an_id(text: str) -> None:
    assert ids.check_id(text) == text
    assert TypeAdapter(ids.Id).validate_python(text) == text


@given(st.text())
def test_an_id_is_one_token_of_up_to_63_ascii_characters(text: str) -> None:
    if ids.is_id(text):
        assert text.isascii()
        assert 1 <= len(text) <= 63
        assert not set(text) & set(".*> \t\r\n\0/\\")


@given(st.from_regex(ids.ID_PATTERN, fullmatch=True))
def test_the_pattern_and_the_check_agree(text: str) -> None:
    assert ids.is_id(text) == (not text.endswith("\n"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        UUID[:-1],
        UUID + "0",
        UUID + "\n",
        UUID.replace("-", ""),
        "{" + UUID + "}",
        "urn:uuid:" + UUID,
        UUID.replace("0", "\u0660", 1),
        UUID.replace("-", "."),
        "x" * 36,
        "\u212a" + UUID[1:],
        "../../../../../../../../../etc/passwd",
    ],
)
def test_a_non_canonical_uuid_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be a UUID"):
        ids.check_uid(text)


def test_an_upper_case_uuid_is_the_same_uuid() -> None:
    assert ids.check_uid(UUID.upper()) == UUID


@pytest.mark.parametrize("value", [1, True, None, b"web", ["web"], {"a": 1}, 1.0])
def test_a_uid_must_be_text(value: object) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(ids.Uid).validate_python(value)


@given(st.from_regex(r"[a-z0-9][a-z0-9-]{0,62}", fullmatch=True))
def test_a_name_token_is_one_token_and_tells_names_apart(name: str) -> None:
    token = ids.name_token(name)
    assert token.isascii()
    assert token.isalnum()
    assert token == token.lower()
    padded = token.upper() + "=" * (-len(token) % 8)
    assert base64.b32decode(padded).decode() == name
