"""The pages in docs/reference match the tables."""

from pathlib import Path

import pytest

from virtbus.kubebridge.core.api.subresources import VERBS
from virtbus.kubebridge.core.documents import fields as page
from virtbus.kubebridge.core.documents import states as states_page
from virtbus.kubebridge.core.fields.table import VM, VMI
from virtbus.kubebridge.core.validation.rules import SPEC_RULES

REFERENCE = Path(__file__).parents[3] / "docs" / "reference"


@pytest.mark.parametrize(
    ("name", "text"),
    [("kubevirt-fields.md", page.page()), ("kubevirt-states.md", states_page.page())],
)
def test_a_page_equals_its_tables(name: str, text: str) -> None:
    written = (REFERENCE / name).read_text(encoding="utf-8")
    assert written.partition("-->\n\n")[2].strip() == text.strip(), "run `make docs`"


def test_every_row_with_a_text_is_on_a_page() -> None:
    fields = page.page()
    told = [row for table in (VM, VMI) for row in table.rows if row.why or row.values or row.to]
    named = [row.path for row in told if page.says(row)]
    assert [path for path in named if f"| `{path}` |" not in fields] == []
    assert [rule.field for rule in SPEC_RULES if f"| `{rule.field}` |" not in fields] == []
    verbs = states_page.page()
    assert [v.name for v in VERBS if f"| `{v.resource}/{v.name}` |" not in verbs] == []
