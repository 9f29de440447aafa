"""Docstrings, comments, log messages, CRD descriptions and pages are plain technical English."""

import pytest
from tests.contract import prose


@pytest.mark.timeout(300)
def test_prose_keeps_its_rules_and_the_allow_list_only_shrinks() -> None:
    found = prose.findings()
    over = prose.counted(found) - prose.allowed()
    new = [str(one) for one in found if (one.path, one.rule) in over]
    assert not new, "\n" + "\n".join(new)
    unused = prose.allowed() - prose.counted(found)
    assert not unused, f"shrink the allow-list: python -m tests.contract.prose --write; {unused}"


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ("headline", "Whether the node is ready."),
        ("citation", "Holds when the node is cut off (F99)."),
        ("outside", "The create path (design §3)."),
        ("long", "A " + "very " * 40 + "long sentence."),
        ("archaic", "The agent starts anew."),
        ("archaic", "It waits, for it is not ready."),
        ("headless", "It is done. What stays is listed."),
    ],
)
def test_each_rule_finds_its_fault(rule: str, text: str) -> None:
    judged = prose.judge(prose.Text(1, text, docstring=True), frozenset())
    assert [found for found, _ in judged] == [rule]


@pytest.mark.parametrize(
    "text",
    [
        "Return the node's id (F20, RFC 9562 §5.7).",
        "See `tests/sim/told.py`; the answer of ADR-32 has no end.",
        "What does a silent node mean? It is suspect.",
    ],
)
def test_plain_text_passes(text: str) -> None:
    assert list(prose.judge(prose.Text(1, text), frozenset({"F20"}))) == []


def test_code_is_not_prose() -> None:
    source = 'told = "anew # told"  # told\n\n\ndef f():\n    """Told."""\n    log.info("told")\n'
    assert [(one.line, one.text) for one in prose.python_prose(source)] == [
        (5, "Told."),
        (6, "told"),
        (1, "told"),
    ]


def test_crd_descriptions_are_prose() -> None:
    source = 'a = said("What told.", told="told")\nb = must(\n    "Whom to tell."\n)\n'
    texts = list(prose.python_prose(source))
    assert [(one.line, one.text) for one in texts] == [(1, "What told."), (3, "Whom to tell.")]
    rules = [rule for one in texts for rule, _ in prose.judge(one, frozenset())]
    assert rules == ["headline", "archaic", "headline"]


def test_code_blocks_of_pages_are_not_prose() -> None:
    page = "# Told\n\none\ntwo\n```sh\nanew\n```\n| F1 | b |\n"
    found = [(one.line, one.text.strip()) for one in prose.page_prose(page) if one.text.strip()]
    assert found == [(1, "# Told"), (3, "one two"), (8, "F1"), (8, "b")]
