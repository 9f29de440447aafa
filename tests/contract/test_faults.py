"""Each row of docs/reference/faults.md names tests, and those tests exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs" / "reference" / "faults.md"
LATER = {
    "F42": "with live migration",
}
"""Rows of features that do not exist yet."""
ROWS = 42
_TEST = re.compile(r"`([\w/.]+\.py)::(\w+)`")


def _rows() -> dict[str, str]:
    """Return the column "Tests" by the id of the fault."""
    found: dict[str, str] = {}
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if re.fullmatch(r"F\d+", cells[0]):
            assert cells[0] not in found, f"{cells[0]} is there twice"
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
