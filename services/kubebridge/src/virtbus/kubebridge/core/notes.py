"""Annotations: which of them rules read, and how many of a template's a VMI gets."""

from collections.abc import Mapping
from typing import Any

from virtbus.kubebridge.core.causes import Cause
from virtbus.kubebridge.core.fields.table import ANNOTATIONS
from virtbus.kubebridge.core.plain import Object, number, part

READ = frozenset(ANNOTATIONS)
"""Every other annotation is a stranger's, of up to 256 KiB an object."""
VALUE_CHARS = 1024
TEMPLATE_BYTES = 16 * 1024
"""Names and values of a template's annotations; nothing else bounds those."""
LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
"""The whole manifest once more, which only kubectl reads."""
SIZE = "virtbus.io/annotation-bytes"
"""Beside the annotations of a template that are kept: the size of all, where it is too large."""


def read(notes: Mapping[str, Any]) -> dict[str, Any]:
    """The annotations that a rule reads, with values of bounded length."""
    return {name: _cut(notes[name]) for name in READ & notes.keys()}


def carried(notes: Mapping[str, Any]) -> dict[str, Any]:
    """Of a template's annotations those that its VMI gets: as many as fit, in their order."""
    left_bytes, kept = TEMPLATE_BYTES, {}
    for name, value in notes.items():
        left_bytes -= _size_bytes(name, value)
        if left_bytes < 0:
            break
        if name != LAST_APPLIED:
            kept[name] = value
    return kept


def slim_template(meta: Object) -> dict[str, Any]:
    """A template's metadata with the annotations that its VMI gets, and the size of all of them."""
    notes = part(meta, "annotations")
    size_bytes = sum(_size_bytes(name, value) for name, value in notes.items())
    marked = {SIZE: size_bytes} if size_bytes > TEMPLATE_BYTES else {}
    return {**meta, "annotations": carried(notes), **marked}


def causes(vm: Object) -> list[Cause]:
    """Why a VM's template has too many annotations, also of a VM whose annotations were cut."""
    meta = slim_template(part(vm, "spec", "template", "metadata"))
    size_bytes = number(meta, SIZE)
    if size_bytes <= TEMPLATE_BYTES:
        return []
    message = f"they have {size_bytes} bytes, and a VMI gets at most {TEMPLATE_BYTES}"
    return [Cause("spec.template.metadata.annotations", message)]


def _cut(value: Any) -> Any:
    return value[:VALUE_CHARS] if isinstance(value, str) else ""


def _size_bytes(name: str, value: Any) -> int:
    return len(name.encode()) + len(str(value).encode())
