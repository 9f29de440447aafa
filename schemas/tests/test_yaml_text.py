"""The cost of YAML from outside depends only on its size."""

import contextlib
import time
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from virtbus.schemas.yaml_text import MAX_DEPTH, MAX_NUMBER, YamlError, read_yaml

SIZE = 64 * 1024
MAX_VALUES = 2000
CPU_S = 1.0
"""For 64 KiB; measured on an idle machine: 0.1 s at most."""


def merge_bomb(levels: int) -> str:
    """Each level merges the previous one twice: pairs double with each line."""
    lines = (f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}\n" for n in range(1, levels))
    return "a0: &a0 {k: v}\n" + "".join(lines)


def alias_bomb(levels: int) -> str:
    return "a0: &a0 [x]\n" + "".join(
        f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, levels)
    )


def filled(unit: str, before: str = "", after: str = "") -> str:
    return before + unit * ((SIZE - len(before) - len(after)) // len(unit)) + after


HOSTILE = {
    "merge keys": merge_bomb(1500),
    "aliases": alias_bomb(1500),
    "merges a list of all before": "a0: &a0 {k: v}\n"
    + "".join(
        f"a{n}: &a{n} {{<<: [{', '.join(f'*a{m}' for m in range(n))}]}}\n" for n in range(1, 100)
    ),
    "brackets on a line": filled("["),
    "brackets on lines": filled("[\n"),
    "brackets and keys": filled("{a: ["),
    "dashes": filled("- "),
    "question marks": filled("? "),
    "tabs": filled("\t", "a:", "b"),
    "values": filled("a,", "[", "]"),
    "values deep inside": filled("a,", "[" * (MAX_DEPTH - 1)),
    "pairs": filled("a: b,", "{", "}"),
    "long key": filled("a", after=": b"),
    "quoted": filled("\\n", 'a: "', '"'),
    "lines": filled("\n  b", "a: "),
    "a block of blank lines": filled(" \n", "a: |\n", " b\n"),
    "comments": filled("#\n"),
    "sexagesimal": filled(":1", "a: 1"),
    "hexadecimal": filled("f", "a: 0x"),
    "binary": filled("QQ", "a: !!binary "),
    "keys of one hash": "{" + ",".join(f"{(2**61 - 1) * n}: 1" for n in range(1, 990)) + "}",
    "documents": filled("---\n"),
    "tag handles": "".join(f"%TAG !a{n}! b\n" for n in range(4000)) + "---\na",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_yaml_costs_no_more_than_its_size(text: str) -> None:
    begun_s = time.thread_time()
    with contextlib.suppress(YamlError):
        read_yaml(text, max_values=MAX_VALUES)
    assert time.thread_time() - begun_s < CPU_S


@pytest.mark.parametrize(
    "text",
    [
        merge_bomb(20),
        alias_bomb(20),
        "a: &a [*a]",
        "a: &a {<<: *a}",
        "&a {x: {<<: *a}}",
        "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1),
        "- " * (MAX_DEPTH + 1) + "a",
        f"[{'a,' * MAX_VALUES}]",
        f"a: 0x{'f' * MAX_NUMBER}",
        "a: 1\n---\nb: 2\n",
        "a: !!python/object/apply:os.system [id]",
        "a: 2001-99-99",
        "? [b]\n: c",
        "a: \x01",
        "\ta: b: c",
    ],
)
def test_yaml_that_is_too_expensive_or_invalid_is_refused(text: str) -> None:
    with pytest.raises(YamlError):
        read_yaml(text, max_values=MAX_VALUES)


def test_a_refusal_names_the_place() -> None:
    with pytest.raises(YamlError, match=r"more than 3 values.*line 2, column 1") as refused:
        read_yaml("a: 1\nb: 2", max_values=3)
    assert refused.value.line == 2


def test_anchors_and_merge_keys_within_the_budget_are_expanded() -> None:
    text = "base: &base {shell: /bin/sh, groups: &g [a]}\nweb: {<<: *base, name: web}\nmore: *g\n"
    assert read_yaml(text, max_values=40) == yaml.safe_load(text)


def test_values_repeated_by_an_alias_are_counted() -> None:
    text = "- &a [x, x, x, x]\n- *a\n"  # the list, twice the five values
    assert read_yaml(text, max_values=11) == [["x"] * 4] * 2
    with pytest.raises(YamlError, match="what aliases repeat"):
        read_yaml(text, max_values=10)


plain: Any = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(plain)
def test_yaml_is_read_as_pyyaml_reads_it(value: Any) -> None:
    text = yaml.safe_dump(value)
    assert read_yaml(text, max_values=1000) == yaml.safe_load(text)
