"""The table of threats: every credential has a row, and the named tests exist."""

import re
from pathlib import Path

from virtbus.bus.provisioning import permissions

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs" / "explanation" / "threats.md"
_TEST = re.compile(r"`([\w/.]+\.py)::(\w+)`")


def _rows() -> dict[str, str]:
    """Return the column "Shown by" by actor."""
    found = {}
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and cells[0] not in {"Actor", "---"}:
            found[cells[0].strip("`")] = cells[-1]
    return found


def test_every_credential_has_a_row() -> None:
    roles = (*permissions.fixed(), permissions.sys(), *permissions.users_on("n1"))
    users = {role.user.replace("-n1", "-<id>") for role in roles}
    assert users <= set(_rows())


def test_a_row_names_tests() -> None:
    for actor, shown in _rows().items():
        named = _TEST.findall(shown)
        assert named or shown.startswith("trusted"), actor


def test_every_test_that_the_page_names_exists() -> None:
    for path, name in _TEST.findall(TABLE.read_text(encoding="utf-8")):
        text = (ROOT / path).read_text(encoding="utf-8")
        assert re.search(rf"^(async )?def {name}\(", text, re.MULTILINE), f"{path}::{name}"


def test_every_finding_has_a_test() -> None:
    counts = {"C": 2, "H": 9, "M": 10, "L": 8}
    wanted = {f"{kind}{n}" for kind, most in counts.items() for n in range(1, most + 1)}
    text = TABLE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([CHML]\d+) \|.*\| (.*) \|$", text, re.MULTILINE)
    assert wanted == {finding for finding, shown in rows if _TEST.findall(shown)}
