"""Times in objects may have any value."""

from datetime import UTC, datetime

import pytest

from virtbus.kubebridge.core.objects.unstructured import moment


@pytest.mark.parametrize(
    "said",
    ["", "soon", "2026-13-01T00:00:00Z", "9999-12-31T23:59:59-23:59", "0001-01-01T00:00:00+09:00"],
)
def test_an_invalid_time_is_none(said: str) -> None:
    assert moment(said) is None


def test_a_time_is_in_utc() -> None:
    assert moment("2026-11-22T14:00:00+02:00") == datetime(2026, 11, 22, 12, tzinfo=UTC)
