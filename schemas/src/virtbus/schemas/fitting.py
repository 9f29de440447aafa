"""Cuts a status or a heartbeat to the size that may be written (ADR 0027).

Long texts are shortened first, then optional fields are removed, then long lists are shortened. Ids
and states are never cut.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pydantic import BaseModel

from virtbus.schemas.bounds import HEARTBEAT, STATUS
from virtbus.schemas.node import NodeRecord
from virtbus.schemas.vm_status import VmStatus
from virtbus.schemas.wire import encode

MARK = "…"
KEY_BYTES = 256
LEAST_ENTRIES = 16
"""A map keeps at least this many entries, because the map may be a model as plain data."""
HINTS = frozenset({"detail", "attributes"})
"""Optional fields that readers can do without."""


class CutStep(NamedTuple):
    """Limits of texts and lists after one step of cutting. With `hints`, optional fields stay."""

    text_bytes: int
    items: int
    hints: bool = False


STEPS = (
    CutStep(2048, 1_000_000, hints=True),
    CutStep(2048, 1_000_000),
    CutStep(512, 64),
    CutStep(128, 16),
    CutStep(64, 2),
)


def fitted_bytes(value: VmStatus | NodeRecord) -> bytes:
    """Return the encoded status or heartbeat, cut to the written limit of its kind."""
    most = (STATUS if isinstance(value, VmStatus) else HEARTBEAT).written_bytes
    body, forms = encode(value), smaller_forms(value)
    while len(body) > most and (smaller := next(forms, None)) is not None:
        body = encode(type(value).model_validate(smaller))
    return body


def smaller_forms(value: Any) -> Iterator[Any]:
    """Yield the value as plain data, smaller with each step."""
    return (_cut(value, step) for step in STEPS)


def cut_text(text: str, most_bytes: int) -> str:
    """Return at most `most_bytes` (UTF-8) of a text; a shortened text ends with `…`."""
    data = text.encode(errors="replace")
    if len(data) <= most_bytes:
        return text
    return data[: most_bytes - len(MARK.encode())].decode(errors="ignore") + MARK


def _cut(value: Any, step: CutStep) -> Any:
    match value:
        case BaseModel():
            fields = {name: getattr(value, name) for name in type(value).model_fields}
            return _mapped(fields, step)
        case str():
            return cut_text(value, step.text_bytes)
        case bytes():
            return value[: step.text_bytes]
        case Mapping():
            kept = list(value.items())[: max(step.items, LEAST_ENTRIES)]
            return _mapped({cut_text(str(key), KEY_BYTES): one for key, one in kept}, step)
        case list() | tuple():
            return [_cut(one, step) for one in value[: step.items]]
        case _:
            return value


def _mapped(fields: Mapping[str, Any], step: CutStep) -> dict[str, Any]:
    return {
        name: type(one)() if name in HINTS and not step.hints else _cut(one, step)
        for name, one in fields.items()
    }
