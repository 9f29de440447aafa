"""Lists of CPUs are as Linux writes them; anything else is refused before it is stored."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from virtbus.schemas.resources import CPU_MAX, Resources, cpu_list, cpu_numbers

NO_LISTS = (",", ",,", "0,,1", "0,", "1-", "-1", "-", "3-1", " 3", "+3", "\u0663", "3\n", "4096")


@pytest.mark.parametrize("text", ["", *NO_LISTS])
def test_what_is_no_list_of_cpus_is_refused(text: str) -> None:
    with pytest.raises(ValidationError):
        Resources(cpus=text)


@pytest.mark.parametrize("text", NO_LISTS)
def test_nobody_reads_cpus_in_it(text: str) -> None:
    with pytest.raises(ValueError, match="no range of CPUs"):
        cpu_numbers(text)


@given(st.frozensets(st.integers(0, CPU_MAX), min_size=1, max_size=50))
def test_a_list_of_cpus_is_read_as_it_was_written(numbers: frozenset[int]) -> None:
    text = cpu_list(numbers)
    assert cpu_numbers(text) == numbers
    assert Resources(cpus=text).cpus == text


@given(st.text("0123456789,-+ \u0663", max_size=12))
def test_an_accepted_list_can_be_stored_and_read(text: str) -> None:
    try:
        found = Resources(cpus=text)
    except ValidationError:
        return
    assert Resources.model_validate(found.model_dump()) == found
