"""Cache of the objects of one kind, as JSON of the fields that the controllers read.

Objects are kept as bytes, because a parsed object takes five times as much memory (ADR 0024).
Parsing takes microseconds.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from virtbus.bus.runtime.recent import Recent
from virtbus.kubebridge.core.objects.unstructured import Object, at, key, part, text
from virtbus.kubebridge.core.runtime.controller import Notify
from virtbus.kubebridge.core.translation import annotations as notes

Slim = Callable[[Object], dict[str, Any]]
"""Removes the fields that no controller reads."""

ENDED_MAX = 10_000
"""Number of deleted objects that are remembered by uid. If a deleted VMI is forgotten, its VM on
the bus counts as orphaned: the VM is kept until a person decides."""


class _Stored(NamedTuple):
    uid: str
    version: int
    body: bytes


class ObjectStore:
    """A cache of objects by `namespace/name`. Each read returns a new object."""

    def __init__(self, slim: Slim | None = None) -> None:
        self._slim = slim or slim_kubevirt
        self._stored: dict[str, _Stored] = {}
        self._ended: Recent[str, None] = Recent(ENDED_MAX)
        self.notify: Notify = lambda _: None
        self.writes: set[str] = set()
        """The keys of the bridge's own writes. `notify` is not called for these writes."""

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._stored))

    def get(self, name: str) -> dict[str, Any] | None:
        stored = self._stored.get(name)
        return None if stored is None else json.loads(stored.body)

    def uid(self, name: str) -> str:
        stored = self._stored.get(name)
        return "" if stored is None else stored.uid

    def put(self, obj: Object) -> None:
        """Store an object from a list or a watch. The versions of an object arrive in order."""
        name, stored = key(obj), self._slimmed(obj)
        before = self._stored.get(name)
        if at(obj, "metadata", "deletionTimestamp"):
            self._ended[stored.uid] = None
        if before is not None and before.uid == stored.uid and stored.version < before.version:
            return  # a newer write of the bridge is already stored
        self._stored[name] = stored
        if before != stored:
            self.notify(name)

    def wrote(self, obj: Object) -> None:
        """Store the answer of the bridge's own write before the watch delivers it.

        An object that the watch has removed is not stored again.
        """
        name, stored = key(obj), self._slimmed(obj)
        before = self._stored.get(name)
        if before is not None and before.uid == stored.uid and stored.version > before.version:
            self._stored[name] = stored
            self.writes.add(name)

    def ended(self, uid: str) -> bool:
        """Return True if the object's end was reported: by a deletion timestamp or a DELETED event.

        An object that is only missing in a list may still exist, because the API server may have
        been restored to an older state.
        """
        return uid in self._ended

    def deleted(self, obj: Object) -> None:
        self._ended[text(obj, "metadata", "uid")] = None
        self.drop(key(obj))

    def drop(self, name: str) -> None:
        if self._stored.pop(name, None) is not None:
            self.notify(name)

    def retain(self, names: set[str]) -> None:
        for name in self._stored.keys() - names:
            self.drop(name)

    def restored(self) -> None:
        """Accept any version of each object. A restored API server continues at lower versions."""
        self._stored = {name: one._replace(version=0) for name, one in self._stored.items()}

    def _slimmed(self, obj: Object) -> _Stored:
        version = text(obj, "metadata", "resourceVersion")
        number = int(version) if version.isdigit() else 0
        body = json.dumps(self._slim(obj), separators=(",", ":"), ensure_ascii=False)
        return _Stored(text(obj, "metadata", "uid"), number, body.encode())


def slim_kubevirt(obj: Object) -> dict[str, Any]:
    """Remove managedFields, and the annotations that no controller reads and no VMI gets.

    An object may have 256 KiB of annotations, and its template as many as fit into etcd (ADR 0028).
    """
    meta = {name: value for name, value in obj["metadata"].items() if name != "managedFields"}
    if isinstance(meta.get("annotations"), dict):
        meta["annotations"] = notes.read(meta["annotations"])
    kept = {**obj, "metadata": meta}
    if part(obj, "spec", "template", "metadata", "annotations"):
        template = part(obj, "spec", "template")
        named = notes.slim_template(part(template, "metadata"))
        kept["spec"] = {**part(obj, "spec"), "template": {**template, "metadata": named}}
    return kept
