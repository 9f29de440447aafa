"""Byte quantities are parsed exactly or refused, never rounded."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from virtbus.schemas.quantity import Bytes, Count, format_bytes, name_bytes, parse_bytes

MAX = 2**63 - 1


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0),
        ("1", 1),
        ("12B", 12),
        ("1k", 1000),
        ("1K", 1000),
        ("1kB", 1000),
        ("1Ki", 1024),
        ("1KiB", 1024),
        ("256MiB", 256 * 1024**2),
        ("4G", 4 * 1000**3),
        ("4Gi", 4 * 1024**3),
        ("2T", 2 * 1000**4),
        ("1Pi", 1024**5),
        ("0.5Gi", 512 * 1024**2),
        ("1.25k", 1250),
        (" 2 GiB ", 2 * 1024**3),
        ("7EiB", None),
    ],
)
def test_units(text: str, count: int | None) -> None:
    if count is None:
        with pytest.raises(ValueError, match="unknown unit"):
            parse_bytes(text)
    else:
        assert parse_bytes(text) == count


@pytest.mark.parametrize(
    "value",
    [
        True,
        False,
        None,
        1.5,
        2.0,
        float("nan"),
        b"1",
        [],
        {},
        -1,
        MAX + 1,
        2**64,
        10**400,
        "",
        " ",
        "-1",
        "+1",
        "1e3",
        "0x10",
        "1_000",
        "1,5G",
        "1.G",
        ".5G",
        "1.2.3",
        "1G1",
        "1 G B",
        "0.1B",
        "1.0001k",
        "\u0663",
        "\uff11G",
        "1G\x00",
        "1G; rm",
        "9" * 20,
        "9999999999999999999P",
        "1" + "0" * 5000,
    ],
)
def test_a_fractional_number_of_bytes_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"must be|unknown unit"):
        parse_bytes(value)
    with pytest.raises(ValidationError):
        TypeAdapter(Bytes).validate_python(value)


@given(st.integers(min_value=0, max_value=MAX))
def test_a_number_is_itself_as_int_and_as_text(count: int) -> None:
    assert parse_bytes(count) == count
    assert parse_bytes(str(count)) == count


@given(st.integers(0, 2**20), st.sampled_from(["Ki", "Mi", "Gi", "k", "M", "G"]))
def test_a_unit_multiplies(count: int, unit: str) -> None:
    base = 1024 if unit.endswith("i") else 1000
    exponent = "KMG".index(unit[0].upper()) + 1
    assert parse_bytes(f"{count}{unit}") == count * base**exponent


@given(st.text(max_size=40))
def test_any_text_gives_bytes_or_a_value_error(text: str) -> None:
    try:
        count = parse_bytes(text)
    except ValueError:
        return
    assert 0 <= count <= MAX


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0B"),
        (1023, "1023B"),
        (1024, "1KiB"),
        (1536, "1.5KiB"),
        (256 * 1024**2, "256MiB"),
        (1024**5, "1024TiB"),
        (MAX, "8388608TiB"),
    ],
)
def test_bytes_are_shown_in_the_largest_binary_unit(count: int, text: str) -> None:
    assert format_bytes(count) == text


@given(st.integers(0, 1023), st.integers(0, 4))
def test_whole_units_are_formatted_and_parsed_back(count: int, exponent: int) -> None:
    size = count * 1024**exponent
    assert parse_bytes(format_bytes(size)) == size


@pytest.mark.parametrize("value", [True, False, "2", 2.0, b"2", None])
def test_a_count_is_an_integer_and_nothing_similar(value: object) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(Count).validate_python(value)


def test_long_numbers_of_an_error_get_units_where_that_is_exact() -> None:
    given_text = "from 16777216 to 17592186044416, not 16777217, 1048576000001 or 1611661312"
    assert (
        name_bytes(given_text) == "from 16MiB to 16TiB, not 16777217, 1048576000001 or 1611661312"
    )
