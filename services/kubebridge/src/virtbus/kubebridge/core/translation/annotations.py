"""Selection of the annotations that the bridge reads, and that a VMI gets from its template."""

from collections.abc import Mapping
from typing import Any

from virtbus.kubebridge.core.fields.table import ANNOTATIONS
from virtbus.kubebridge.core.fields.vm import IGNITION
from virtbus.kubebridge.core.objects.status_errors import Cause
from virtbus.kubebridge.core.objects.unstructured import Object, number, part, text

READ = frozenset(ANNOTATIONS)
"""Annotations that the bridge reads. The bridge ignores all others, which may have 256 KiB."""
VALUE_CHARS = 1024
IGNITION_CHARS = 16 * 1024
LONG = {IGNITION: IGNITION_CHARS + 1}
"""Bounds of annotations that may be longer than VALUE_CHARS, in characters. One character above the
limit is kept, to show that the value is too long."""
TEMPLATE_BYTES = 16 * 1024
"""Bound of the names and values of a template's annotations. Kubernetes sets no bound."""
LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
"""A copy of the whole manifest that only kubectl reads."""
SIZE = "virtbus.io/annotation-bytes"
"""The metadata key of the total size of a template's annotations. `slim_template` adds this key if
the annotations are too large."""


def read(notes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the annotations that the bridge reads, with values of bounded length."""
    return {name: text(notes, name)[: LONG.get(name, VALUE_CHARS)] for name in READ & notes.keys()}


def carried(notes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the first annotations of a template that fit. The VMI gets them.

    LAST_APPLIED counts towards the size, although the VMI does not get it.
    """
    left_bytes, kept = TEMPLATE_BYTES, {}
    for name, value in notes.items():
        left_bytes -= _size_bytes(name, value)
        if left_bytes < 0:
            break
        if name != LAST_APPLIED:
            kept[name] = value
    return kept


def slim_template(meta: Object) -> dict[str, Any]:
    """Return a template's metadata with only the annotations that its VMI gets.

    If the annotations are too large together, the key `SIZE` has their total size.
    """
    notes = part(meta, "annotations")
    size_bytes = sum(_size_bytes(name, value) for name, value in notes.items())
    marked = {SIZE: size_bytes} if size_bytes > TEMPLATE_BYTES else {}
    return {**meta, "annotations": carried(notes), **marked}


def causes(vm: Object) -> list[Cause]:
    """Report a template whose annotations are too large, even after `slim_template` cut them."""
    meta = slim_template(part(vm, "spec", "template", "metadata"))
    size_bytes = number(meta, SIZE)
    if size_bytes <= TEMPLATE_BYTES:
        return []
    message = f"the annotations have {size_bytes} bytes, but a VMI gets at most {TEMPLATE_BYTES}"
    return [Cause("spec.template.metadata.annotations", message)]


def _size_bytes(name: str, value: Any) -> int:
    return len(name.encode()) + len(str(value).encode())
