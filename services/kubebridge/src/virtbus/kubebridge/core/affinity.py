"""Converts node affinity to a node selector, if it requires no more than one."""

from collections.abc import Iterator

from virtbus.kubebridge.core.fields.placement import EVERY_NODE, REQUIRED
from virtbus.kubebridge.core.plain import Object, at, items, part, text

TERMS = ("affinity", "nodeAffinity", REQUIRED, "nodeSelectorTerms")
Expression = tuple[str, Object]
"""One, and its path below the spec."""


def terms(spec: Object) -> list[Object]:
    """One of them must hold."""
    return items(spec, *TERMS)


def expressions(spec: Object) -> Iterator[Expression]:
    """Of the only term: all must hold."""
    for index, one in enumerate(items(next(iter(terms(spec)), {}), "matchExpressions")):
        yield f"{'.'.join(TERMS)}[0].matchExpressions[{index}]", one


def value_of(expression: Object) -> str | None:
    """The only value, where it has one."""
    values = at(expression, "values")
    if isinstance(values, list) and len(values) == 1 and isinstance(values[0], str):
        return values[0]
    return None


def selector(spec: Object) -> dict[str, str]:
    """The labels that the affinity asks for beside those of nodeSelector."""
    asked = {
        text(one, "key"): value
        for _, one in expressions(spec)
        if (value := value_of(one)) is not None
    }
    known = {**EVERY_NODE, **part(spec, "nodeSelector")}
    return {key: value for key, value in asked.items() if known.get(key) != value}
