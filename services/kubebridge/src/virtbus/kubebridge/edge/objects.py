"""Objects of one kind as they were last seen, each as the JSON of what the rules read of it.

Bytes, since a parsed object takes five times as much (ADR 0024), and is parsed in microseconds.
"""

import json
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from virtbus.kubebridge.core import notes
from virtbus.kubebridge.core.plain import Object, at, key, part, text

Changed = Callable[[str], None]
"""Told the `namespace/name` of what changed, came or went."""

ENDED_MAX = 10_000
"""Ends that are remembered; of one that is forgotten, what is left is held for a person."""


class _Held(NamedTuple):
    uid: str
    version: int
    body: bytes


class Objects:
    """A cache. What is read of it is the reader's own."""

    def __init__(self) -> None:
        self._held: dict[str, _Held] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self.listeners: list[Changed] = []
        self.of_writes: list[Changed] = []
        """Told of what we wrote ourselves, which `listeners` know."""

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[str]:
        """The keys, `namespace/name`."""
        return iter(tuple(self._held))

    def get(self, name: str) -> dict[str, Any] | None:
        """The object of a key."""
        held = self._held.get(name)
        return None if held is None else json.loads(held.body)

    def uid(self, name: str) -> str:
        """Of what has the key now, or empty."""
        held = self._held.get(name)
        return "" if held is None else held.uid

    def put(self, obj: Object) -> None:
        """Take in what a list or a watch told: both are in order."""
        name, held = key(obj), _held(obj)
        before = self._held.get(name)
        if at(obj, "metadata", "deletionTimestamp"):
            self._note_end(held.uid)
        if before is not None and before.uid == held.uid and held.version < before.version:
            return  # what we wrote since is known already
        self._held[name] = held
        if before != held:
            self._tell(name)

    def wrote(self, obj: Object) -> None:
        """Take in the answer of a write of ours, before its echo: the next look sees it.

        What the watch told to be gone does not come back by it.
        """
        name, held = key(obj), _held(obj)
        before = self._held.get(name)
        if before is not None and before.uid == held.uid and held.version > before.version:
            self._held[name] = held
            for changed in self.of_writes:
                changed(name)

    def ended(self, uid: str) -> bool:
        """True where its end was told: a delete that was asked for, or a watch's DELETED.

        What a list only lacks is absent: an API server may be restored to an older state.
        """
        return uid in self._ended

    def _note_end(self, uid: str) -> None:
        self._ended[uid] = None
        self._ended.move_to_end(uid)
        if len(self._ended) > ENDED_MAX:
            self._ended.popitem(last=False)

    def deleted(self, obj: Object) -> None:
        """A watch told that it is gone."""
        self._note_end(text(obj, "metadata", "uid"))
        self.drop(key(obj))

    def drop(self, name: str) -> None:
        """It is gone, or absent."""
        if self._held.pop(name, None) is not None:
            self._tell(name)

    def retain(self, names: set[str]) -> None:
        """A whole list has only these: the others went while nobody told us."""
        for name in self._held.keys() - names:
            self.drop(name)

    def _tell(self, name: str) -> None:
        for changed in self.listeners:
            changed(name)


def _held(obj: Object) -> _Held:
    version = text(obj, "metadata", "resourceVersion")
    number = int(version) if version.isdigit() else 0
    body = json.dumps(slim(obj), separators=(",", ":"), ensure_ascii=False)
    return _Held(text(obj, "metadata", "uid"), number, body.encode())


def slim(obj: Object) -> dict[str, Any]:
    """Without what no rule reads: who wrote which field, and annotations of others.

    Annotations may have 256 KiB an object, and a template's as much as etcd takes (ADR 0028).
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
