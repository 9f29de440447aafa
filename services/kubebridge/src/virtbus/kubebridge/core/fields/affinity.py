"""Converts node affinity with one term and single values to a node selector."""

from collections.abc import Iterator

from virtbus.kubebridge.core.fields.placement import EVERY_NODE, REQUIRED
from virtbus.kubebridge.core.objects.unstructured import Object, at, items, part, text

TERMS = ("affinity", "nodeAffinity", REQUIRED, "nodeSelectorTerms")
Expression = tuple[str, Object]
"""The path of a match expression below the spec, and the expression."""


def terms(spec: Object) -> list[Object]:
    """Return the terms. A node must match one of them."""
    return items(spec, *TERMS)


def expressions(spec: Object) -> Iterator[Expression]:
    """Yield the expressions of the only term. A node must match all of them."""
    for index, one in enumerate(items(next(iter(terms(spec)), {}), "matchExpressions")):
        yield f"{'.'.join(TERMS)}[0].matchExpressions[{index}]", one


def value_of(expression: Object) -> str | None:
    """Return the only value of an expression, or None."""
    values = at(expression, "values")
    if isinstance(values, list) and len(values) == 1 and isinstance(values[0], str):
        return values[0]
    return None


def selector(spec: Object) -> dict[str, str]:
    """Return the labels that the affinity requires in addition to nodeSelector."""
    asked = {
        text(one, "key"): value
        for _, one in expressions(spec)
        if (value := value_of(one)) is not None
    }
    known = {**EVERY_NODE, **part(spec, "nodeSelector")}
    return {key: value for key, value in asked.items() if known.get(key) != value}
