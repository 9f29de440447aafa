"""Splits lists into pages of limited size and item count (ADR 0028)."""

import base64
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Protocol

from pydantic import BaseModel

from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.paging import Paged
from virtbus.schemas.wire import encode, encode_json

PAGE_BYTES = 512 * 1024
"""Size limit of a page with more than one item. 500 usual VMs are smaller."""
ITEM_BYTES = 768 * 1024
"""Size limit of an item, because a bus message has at most 1 MiB. A larger item loses its largest
fields."""
PAGE_ITEMS = 500

Plain = dict[str, Any]


class AnswerFormat(Protocol):
    """The attribute of a request that says if the answer must be JSON."""

    @property
    def wants_json(self) -> bool: ...


class Page(NamedTuple):
    """Items as plain data, and the key of the last item; None if no more items follow."""

    items: list[Plain]
    last: str | None


def answer(
    model: type[Paged],
    found: Iterable[tuple[str, BaseModel]],
    asked: AnswerFormat,
    *,
    most: int = PAGE_ITEMS,
    **fields: Any,
) -> Plain:
    """Return the first page of `found` as the plain data of a `model`.

    `fields` has the values of the model's fields other than `items` and `continue`.
    """
    found_ = page(found, as_json=asked.wants_json, most=most)
    if not (asked.wants_json or found_.last or any(fields.values())):
        return {"items": found_.items}  # msgpack omits the other fields
    continue_ = None if found_.last is None else token(found_.last)
    empty = model.model_validate({"continue": continue_, **fields})
    return plain(empty, as_json=asked.wants_json) | {"items": found_.items}


def page(found: Iterable[tuple[str, BaseModel]], *, as_json: bool, most: int = PAGE_ITEMS) -> Page:
    """Return the first items of `found`, which yields (key, model), that fit in one answer."""
    return next(split(found, as_json=as_json, most=most))


def split(
    found: Iterable[tuple[str, BaseModel]], *, as_json: bool, most: int = PAGE_ITEMS
) -> Iterator[Page]:
    """Yield pages with all of `found`; at least one page. Each page is made on demand."""
    items: list[Plain] = []
    left_bytes, last = PAGE_BYTES, ""
    for key, model in found:
        item, size_bytes = fitting(model, as_json=as_json)
        if items and (left_bytes < size_bytes or len(items) >= most):
            yield Page(items, last)
            items, left_bytes = [], PAGE_BYTES
        items.append(item)
        left_bytes -= size_bytes
        last = key
    yield Page(items, None)


def fitting(model: BaseModel, *, as_json: bool) -> tuple[Plain, int]:
    """Return a model as plain data, and its encoded size in bytes.

    An item that is larger than ITEM_BYTES loses its largest fields, and `cut` names them. A
    required field gets an empty value instead.
    """
    item = plain(model, as_json=as_json)
    size_bytes = _size_bytes(item, as_json=as_json)
    if size_bytes <= ITEM_BYTES:
        return item, size_bytes
    sizes = {name: _size_bytes({name: item[name]}, as_json=as_json) for name in item}
    empty = plain(type(model).model_construct(), as_json=as_json)
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        if size_bytes <= ITEM_BYTES:
            break
        item["cut"] = sorted([*item.get("cut", ()), name])
        if name in empty or not type(model).model_fields[_field(model, name)].is_required():
            item.pop(name)
            item.update({name: empty[name]} if name in empty else {})
        else:
            item[name] = type(item[name])()
        size_bytes = _size_bytes(item, as_json=as_json)
    return item, size_bytes


def _field(model: BaseModel, name: str) -> str:
    """Return the model's own name of the field that is encoded as `name`."""
    fields = type(model).model_fields
    return next(each for each, field in fields.items() if name in {each, field.alias})


def plain(model: BaseModel, *, as_json: bool) -> Plain:
    """Return a model as plain data. JSON includes default values; msgpack omits them."""
    if as_json:
        return model.model_dump(mode="json", by_alias=True)
    return model.model_dump(exclude_defaults=True, by_alias=True)


def _size_bytes(item: Plain, *, as_json: bool) -> int:
    return len(encode_json(item) if as_json else encode(item))


def token(key: str) -> str:
    """Return the value of `continue` for the page after the item with this key."""
    return base64.urlsafe_b64encode(key.encode()).decode()


def key_of(continue_: str | None) -> str:
    """Return the key in a `continue`, "" for None; raise VirtbusError 400 if it is invalid."""
    if not continue_:
        return ""
    try:
        return base64.urlsafe_b64decode(continue_.encode()).decode()
    except ValueError:
        raise bad_continue() from None


def bad_continue() -> VirtbusError:
    """Return the error 400 for a `continue` that no list returned."""
    message = "continue is not what a list gave; leave it out to begin again"
    return VirtbusError(Code.INVALID, "bad_continue", message)
