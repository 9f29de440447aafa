"""The pages of KubeVirt's fields and verbs name each row."""

from virtbus.documents import kubevirt_fields as page
from virtbus.documents import kubevirt_states as states_page
from virtbus.kubebridge.core.api.subresources import VERBS
from virtbus.kubebridge.core.fields.table import VM, VMI
from virtbus.kubebridge.core.validation.rules import SPEC_RULES


def test_every_row_with_a_text_is_on_a_page() -> None:
    fields = page.page()
    told = [row for table in (VM, VMI) for row in table.rows if row.why or row.values or row.to]
    named = [row.path for row in told if page.says(row)]
    assert [path for path in named if f"| `{path}` |" not in fields] == []
    assert [rule.field for rule in SPEC_RULES if f"| `{rule.field}` |" not in fields] == []
    verbs = states_page.page()
    assert [v.name for v in VERBS if f"| `{v.resource}/{v.name}` |" not in verbs] == []
