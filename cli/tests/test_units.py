"""Times as a person writes them."""

import pytest

from virtbus.cli import units


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("1.5s", 1.5), ("10m", 600), ("2h", 7200), ("11574d", 999_993_600)],
)
def test_a_time_has_a_unit_or_is_in_seconds(text: str, seconds: float) -> None:
    assert units.seconds_of(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "d", "-1s", "nan", "inf", "1e9", "11575d", "277778h", "999999999d", "5w"]
)
def test_a_time_that_is_no_number_or_out_of_range_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"convert|range"):
        units.seconds_of(text)
