"""Translates a manifest by a table of fields, and collects up to MAX_CAUSES problems."""

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from virtbus.kubebridge.core.fields.row import Field, FieldType, Verdict, as_is
from virtbus.kubebridge.core.fields.table import Table
from virtbus.kubebridge.core.objects import quantity
from virtbus.kubebridge.core.objects.status_errors import Cause, Reason

MAX_CAUSES = 100
"""Largest number of reported problems. A hostile object of 1.5 MB may have far more."""
NOTHING: tuple[Any, ...] = (False, [], "")
"""Values without effect, also 0 (it equals False). Even refused fields accept these values."""
Path = tuple[str | int, ...]
_SHAPES: dict[FieldType, tuple[type, ...]] = {
    FieldType.OBJECT: (dict,),
    FieldType.LIST: (list,),
    FieldType.TEXT: (str,),
    FieldType.NUMBER: (int,),
    FieldType.FLAG: (bool,),
    FieldType.QUANTITY: (int, float, str),
    FieldType.MAP: (dict,),
    FieldType.ANY: (object,),
}


@dataclass(slots=True)
class Translation:
    """The result of `walk`. `ours` is a VmCreate as plain values.

    `origin` has the manifest field of each field in `ours`. `beside` has values without a field in
    `ours`, such as the name of a Secret.
    """

    causes: list[Cause] = field(default_factory=list)
    ours: dict[str, Any] = field(default_factory=dict)
    beside: dict[str, Any] = field(default_factory=dict)
    origin: dict[Path, str] = field(default_factory=dict)

    def put(self, path: Path, value: Any, origin: str) -> None:
        if path not in self.origin:
            self.origin[path] = origin
            _put(self.ours, path, value)

    def where(self, path: str) -> str:
        """Return the manifest's path for a path in `ours`, such as `spec.volumes[0].name`.

        A field without an origin gets its path from its nearest parent that has an origin.
        """
        found = re.findall(r"[^.\[\]]+", path)
        parts = tuple(int(part) if part.isdigit() else part for part in found)
        for end in range(len(parts), 0, -1):
            if (origin := self.origin.get(parts[:end])) is not None:
                return origin + "".join(map(_kubevirts, parts[end:]))
        return path


def walk(value: Any, table: Table, prefix: str) -> Translation:
    """Translate `value` by the table; `prefix` is the path of `value` in the manifest."""
    walked = Translation()
    steps: list[tuple[int, Path, Any, str]] = []
    for one in _walk(value, "", prefix, (), table):
        if isinstance(one, Cause):
            walked.causes.append(one)
            if len(walked.causes) == MAX_CAUSES:
                break  # the object is refused anyway; this bounds the cost of a hostile object
        else:
            steps.append(one)
    for _, path, ours, origin in sorted(steps, key=lambda step: step[0]):
        if path:
            walked.put(path, ours, origin)
        else:
            walked.beside[origin] = ours
    return walked


Step = tuple[int, Path, Any, str]


def _walk(
    value: Any, pattern: str, path: str, indices: tuple[int, ...], table: Table
) -> Iterator[Cause | Step]:
    row = table.by_path.get(pattern) or table.by_path.get(f"{pattern}[]")
    if row is None:
        yield _unknown(pattern, path, table)
        return
    if value is None or row.verdict is Verdict.IGNORED:
        return
    if row.verdict is not Verdict.MAPPED:
        if value not in NOTHING:
            yield Cause(path, f"{row.why}; {row.instead}", Reason.NOT_SUPPORTED)
    elif not isinstance(value, _SHAPES[row.kind]) or _is_odd(value, row.kind):
        yield Cause(path, f"must be {row.kind}")
    else:
        yield from _mapped(value, row, path, indices, table)


def _is_odd(value: Any, kind: FieldType) -> bool:
    if kind is FieldType.MAP:
        return not all(isinstance(one, str) for one in value.values())
    return isinstance(value, bool) and kind in {FieldType.NUMBER, FieldType.QUANTITY}


def _mapped(
    value: Any, row: Field, path: str, indices: tuple[int, ...], table: Table
) -> Iterator[Cause | Step]:
    match row.kind:
        case FieldType.LIST:
            for index, item in enumerate(value):
                yield from _object(item, row, f"{path}[{index}]", (*indices, index), table)
        case FieldType.OBJECT:
            yield from _object(value, row, path, indices, table)
        case _:
            yield from _leaf(value, row, path, indices, table)


def _object(
    value: Any, row: Field, path: str, indices: tuple[int, ...], table: Table
) -> Iterator[Cause | Step]:
    if not isinstance(value, dict):
        yield Cause(path, "must be an object")
        return
    if row.to:
        ours = {} if row.make is as_is else row.make(value)  # the fields below fill it
        yield table.place[row.path], _ours(row.to, indices), ours, path
    for key, one in value.items():
        below = f"{row.path}.{key}" if row.path else str(key)
        yield from _walk(one, below, f"{path}.{key}", indices, table)


def _leaf(
    value: Any, row: Field, path: str, indices: tuple[int, ...], table: Table
) -> Iterator[Cause | Step]:
    if value == "" and (row.values or row.pattern):
        return  # Go clients write an empty string for a missing field
    taken = not row.values or value in row.values
    if row.pattern and re.fullmatch(row.pattern, value) is None:
        taken = False
    if not taken:
        shown = f"{value!r:.80} is not supported; " if isinstance(value, str) else ""
        yield Cause(path, f"{shown}{row.instead}", Reason.NOT_SUPPORTED)
        return
    try:
        if row.kind is FieldType.QUANTITY:
            quantity.whole(value)
        ours = value if row.make is as_is else row.make(value)
    except ValueError as error:
        yield Cause(path, str(error))
        return
    if ours is not None:
        yield table.place[row.path], _ours(row.to, indices), ours, path


def _unknown(pattern: str, path: str, table: Table) -> Cause:
    name, beside = pattern.rpartition(".")[2], table.beside(pattern)
    near = difflib.get_close_matches(name[:64], beside, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return Cause(path, f"KubeVirt has no such field{hint}", Reason.NOT_SUPPORTED)


# --- paths in VmCreate -------------------------------------------------------------------------
def _ours(to: str, indices: tuple[int, ...]) -> Path:
    numbers = iter(indices)
    path: list[str | int] = []
    for part in filter(None, to.split(".")):
        path.append(part.removesuffix("[]"))
        if part.endswith("[]"):
            path.append(next(numbers))
    return tuple(path)


def _kubevirts(part: str | int) -> str:
    """Return a part of a path as KubeVirt writes it: `container_disk` is `.containerDisk`."""
    if isinstance(part, int):
        return f"[{part}]"
    first, *others = part.split("_")
    return f".{first}" + "".join(one.capitalize() for one in others)


def _put(root: dict[str, Any], path: Path, value: Any) -> None:
    here: Any = root
    for part, following in zip(path, (*path[1:], None), strict=True):
        fresh: Any = value if following is None else [] if isinstance(following, int) else {}
        if isinstance(part, int):
            here.extend({} for _ in range(part + 1 - len(here)))
            if following is None:
                here[part] = fresh
        elif following is None:
            here[part] = fresh
        else:
            here.setdefault(part, fresh)
        here = here[part]


def changed(one: Any, other: Any, table: Table) -> bool:
    """Return True if two specs make different guests. Ignored fields make no difference."""
    first, second = walk(one, table, ""), walk(other, table, "")
    return (first.ours, first.beside) != (second.ours, second.beside)
