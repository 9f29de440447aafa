"""Each row of the fault matrix names the tests that hold it, and they are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs" / "explanation" / "faults.md"
LATER = {
    "F5": "with the bridge",
    "F42": "with live migration",
}
"""Rows of what is not built yet."""
ROWS = 42
_TEST = re.compile(r"`([\w/.]+\.py)::(\w+)`")


def _rows() -> dict[str, str]:
    """Number of a fault to what stands under "Held by"."""
    found: dict[str, str] = {}
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if re.fullmatch(r"F\d+", cells[0]):
            assert cells[0] not in found, f"{cells[0]} stands there twice"
            found[cells[0]] = cells[-1]
    return found


def test_no_row_is_missing() -> None:
    assert list(_rows()) == [f"F{number}" for number in range(1, ROWS + 1)]


@pytest.mark.parametrize("number", [f"F{number}" for number in range(1, ROWS + 1)])
def test_a_row_names_tests_that_exist(number: str) -> None:
    held = _rows()[number]
    if number in LATER:
        assert held == LATER[number]
        return
    named = _TEST.findall(held)
    assert named
    assert not _TEST.sub("", held).strip(), "only tests are named"
    for path, name in named:
        text = (ROOT / path).read_text(encoding="utf-8")
        assert re.search(rf"^(async )?def {name}\(", text, re.MULTILINE), f"{path}::{name}"
