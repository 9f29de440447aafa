"""Decodes and encodes msgpack and JSON, with limits on untrusted bytes (MSG-01 to MSG-04).

The services decode all received bytes by `decode`, which keeps no state between messages and raises
only VirtbusError.
"""

import difflib
import functools
import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any, TypeVar

import msgpack
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, to_json

from virtbus.schemas.bounds import REQUEST_BYTES
from virtbus.schemas.errors import MAX_DETAILS, Code, Detail, VirtbusError, unlisted
from virtbus.schemas.ids import check_uid
from virtbus.schemas.quantity import name_bytes

MAX_MESSAGE_BYTES = REQUEST_BYTES
MAX_DEPTH = 32
MAX_NODES = 20_000
"""Maximum number of values in a message, maps and lists included."""
CLIENT_VALUES = 8192
"""Maximum number of values in a client's request.

A request of 256 volumes with disks has fewer, and so has a request of 25 volumes of 256 files each.
"""
MANY_PROBLEMS = 1000
"""Up to this many problems of a value are collected in full, to show MAX_DETAILS of them."""
MAX_HINTS = 10
"""Maximum number of unknown fields with a hint; each is compared with every known name."""
HINT_CHARS = 64
"""Longer unknown fields get no hint, because no model has such a long field name."""

_ALWAYS = frozenset({"schema_version", "tombstone"})
"""Fields that are written even at their default: a record's bytes must contain its version."""

Model = TypeVar("Model", bound=BaseModel)


class _PairsError(ValueError):
    pass


class _Budget:
    """Counts values while a body is decoded, and raises above the limit."""

    def __init__(self, most: int) -> None:
        self._most = self._left = most

    def _take(self, many: int) -> None:
        self._left -= many
        if self._left < 0:
            msg = f"more than {self._most} values"
            raise _PairsError(msg)

    def pairs(self, pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
        self._take(len(pairs))
        return _unique(pairs)

    def items(self, items: list[Any]) -> list[Any]:
        self._take(len(items))
        return items


def _unique(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
    """Return a map; raise _PairsError for a duplicate key, or a key that is no text."""
    result = dict(pairs)
    try:
        keys = "".join(result)
    except TypeError:
        msg = "map keys must be strings"
        raise _PairsError(msg) from None
    if len(result) != len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        msg = f"duplicate key {twice[:64]!r}"
        raise _PairsError(msg)
    if not keys.isascii():
        _check_text(keys)
    return result


def _no_ext(code: int, _data: bytes) -> Any:
    msg = f"msgpack ext type {code} is not accepted"
    raise _PairsError(msg)


def _no_constant(name: str) -> Any:
    msg = f"{name} is not accepted"
    raise _PairsError(msg)


def _malformed(message: str) -> VirtbusError:
    return VirtbusError(Code.INVALID, "malformed", f"the message cannot be read: {message}")


def _check_shape(root: Any, sure: frozenset[type], most: int) -> None:
    """Raise if `root` nests too deep, has more than `most` values, or cannot be encoded again.

    `sure` has the scalar types that need no check.
    """
    seen, level = 0, [root]
    for _ in range(MAX_DEPTH):
        seen += len(level)
        if seen > most:
            raise _malformed(f"more than {most} values")
        below: list[Any] = []
        for value in level:
            kind = type(value)
            if kind is dict:
                below.extend(value.values())
            elif kind is list:
                below.extend(value)
            elif kind not in sure and not (kind is int and _LEAST <= value <= _MOST):
                _check_scalar(value)
        if not below:
            return
        level = below
    raise _malformed(f"nested deeper than {MAX_DEPTH}")


_SURE_IN_JSON: frozenset[type] = frozenset({bool, type(None)})
_SURE_IN_MSGPACK: frozenset[type] = frozenset({*_SURE_IN_JSON, bytes, str})
"""The reader of msgpack checks that text is UTF-8."""


_LEAST, _MOST = -(2**63), 2**63 - 1


def _check_scalar(value: Any) -> None:
    """Raise for a value that only one of the two encodings supports."""
    match value:
        case str():
            _check_text(value)
        case float():
            if not math.isfinite(value):
                raise _malformed("NaN and infinity are not accepted")
        case int():
            if not _LEAST <= value <= _MOST:
                raise _malformed("integers must fit in 64 bits")
        case _:
            raise _malformed(f"{type(value).__name__} is not accepted")


def _check_text(text: str) -> None:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise _malformed("a lone surrogate is no text") from None


def is_json(body: bytes) -> bool:
    """Return True if `{` is the first byte that is not white space, within the first 64 bytes."""
    return body[:64].lstrip()[:1] == b"{"


def decode(
    body: bytes, most_bytes: int = MAX_MESSAGE_BYTES, *, most_values: int = MAX_NODES
) -> Any:
    """Return the value of a msgpack or JSON body.

    Raises:
        VirtbusError: 413 if the body is larger than `most_bytes`; 400 if it is malformed, or has
            more than `most_values` values.
    """
    if len(body) > most_bytes:
        raise VirtbusError(
            Code.TOO_LARGE,
            "too_large",
            f"the message has {len(body)} bytes; at most {most_bytes} are accepted",
        )
    budget = _Budget(most_values) if len(body) > most_values else None  # each value takes a byte
    pairs = budget.pairs if budget is not None else _unique
    sure = _SURE_IN_MSGPACK
    try:
        if is_json(body):
            sure = _SURE_IN_JSON
            value = json.loads(body, object_pairs_hook=pairs, parse_constant=_no_constant)
        else:
            value = msgpack.unpackb(
                body,
                object_pairs_hook=pairs,
                list_hook=budget.items if budget is not None else None,
                max_array_len=most_values,
                max_map_len=most_values,
                strict_map_key=False,
                ext_hook=_no_ext,
                timestamp=0,
            )
    except VirtbusError:
        raise
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise _malformed(str(error)[:200] or type(error).__name__) from None
    _check_shape(value, sure, most_values)
    return value


def encode(value: Any) -> bytes:
    """Return the msgpack bytes of a plain value or a model, without defaults."""
    if isinstance(value, BaseModel):
        kept = {name: getattr(value, name) for name in _always(type(value))}
        value = kept | value.model_dump(exclude_defaults=True, by_alias=True)
    packed: bytes = msgpack.packb(value)
    return packed


@functools.cache
def _always(model: type[BaseModel]) -> tuple[str, ...]:
    return tuple(name for name in model.model_fields if name in _ALWAYS)


def encode_json(value: Any) -> bytes:
    """Return the JSON bytes of a plain value or a model, with defaults."""
    return to_json(value, inf_nan_mode="constants")


def read(model: type[Model], body: bytes) -> Model:
    """Decode and validate in one step; raises VirtbusError as `decode` and `validate` do."""
    return validate(model, decode(body))


def validate(model: type[Model], value: Any, prefix: str = "") -> Model:
    """Return `value` as `model`, or raise VirtbusError 400 with all problems by field path."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        count = error.error_count()
        if count <= MANY_PROBLEMS:
            raise invalid(problems(error, prefix, model=model)) from None
    raise invalid(_first_problems(model, value, prefix, count))


def _first_problems(
    model: type[BaseModel], value: Any, prefix: str, count: int
) -> tuple[Detail, ...]:
    """Return the first of thousands of problems, and a detail that counts the others.

    pydantic returns all errors or none, and 20,000 errors take 10 MiB. So only a part of the value
    is validated again.
    """
    left = iter(range(MANY_PROBLEMS))
    try:
        model.model_validate(_part(value, frozenset(_field_names(model)), left))
    except ValidationError as error:
        found = problems(error, prefix, model=model)[: MAX_DETAILS - 1]
    else:
        found = ()
    return (*found, unlisted(count - len(found)))


def _part(value: Any, names: frozenset[str], left: Iterator[int]) -> Any:
    """Return a part of a value: all known fields, but only `left` unknown fields and list items."""
    if isinstance(value, dict):
        kept = (key for key in value if key in names or next(left, None) is not None)
        return {key: _part(value[key], names, left) for key in kept}
    if isinstance(value, list):
        return [_part(item, names, left) for item in value if next(left, None) is not None]
    return value


def invalid(details: tuple[Detail, ...]) -> VirtbusError:
    """Return the error 400 that lists all problems."""
    count = len(details)
    first = f"{details[0].path}: {details[0].message}" if details[0].path else details[0].message
    more = f" (and {count - 1} more)" if count > 1 else ""
    return VirtbusError(Code.INVALID, "invalid", f"{first}{more}", details=details)


def valid_uid(text: str) -> str:
    """Return the uid of a request in lower case; raise VirtbusError 400 if it is no UUID."""
    try:
        return check_uid(text)
    except ValueError as error:
        raise invalid((Detail(path="uid", message=str(error)),)) from None


def problems(
    error: ValidationError, prefix: str = "", *, model: type[BaseModel] | None = None
) -> tuple[Detail, ...]:
    """Return pydantic's errors as details. The input may be a secret, so it is omitted.

    With `model`, the first MAX_HINTS unknown fields get the most similar known name as a hint. If
    there are more than MAX_DETAILS errors, the last detail counts the omitted ones.
    """
    found = error.errors(include_url=False, include_input=False, include_context=False)
    details, hints = [], 0
    for item in found[:MAX_DETAILS]:
        unknown = model is not None and item["type"] == "extra_forbidden"
        hints += unknown
        details.append(_detail(item, prefix, model if hints <= MAX_HINTS else None))
    if len(found) > MAX_DETAILS:
        details[-1] = unlisted(len(found) - MAX_DETAILS + 1)
    return tuple(details)


def _near(name: str, model: type[BaseModel]) -> str:
    if len(name) > HINT_CHARS:
        return ""
    snake = "".join(f"_{c.lower()}" if c.isupper() else c for c in name)
    near = difflib.get_close_matches(snake, _field_names(model), n=1)
    if near and near[0] == name:
        return f"{name} belongs to another part of the request"
    return f"did you mean {near[0]}?" if near else ""


@functools.cache
def _field_names(model: type[BaseModel]) -> tuple[str, ...]:
    """Return every field name of a model and of the models inside it."""
    schema = model.model_json_schema(by_alias=True)
    names: set[str] = set(schema.get("properties", {}))
    for inner in schema.get("$defs", {}).values():
        names |= set(inner.get("properties", {}))
    return tuple(sorted(names))


_BOUNDS = frozenset({"greater_than_equal", "less_than_equal"})


def _detail(item: ErrorDetails, prefix: str, model: type[BaseModel] | None) -> Detail:
    path = prefix
    for part in item["loc"]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part != "[key]":
            path += f".{part}" if path else part
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] in _BOUNDS:
        message = name_bytes(message)
    hint = ""
    if item["type"] == "extra_forbidden":
        message = "unknown field"
        hint = _near(str(item["loc"][-1]), model) if model is not None else ""
    return Detail(path=path, message=message, hint=hint)


def reason_of(error: ValueError) -> str:
    """Return the reason in an error, without the lines that pydantic adds."""
    if isinstance(error, ValidationError):
        return "; ".join(one["msg"] for one in error.errors(include_url=False))
    return str(error)


HASHED_WHEN_SET = frozenset(
    {
        *("eviction_strategy", "placement", "start_strategy", "container_disk", "protected"),
        *("cloud_init_config_drive", "files", "user_data_base64", "network_data_base64"),
        "image_pull_secret",
        "autoattach_graphics_device",
        "watchdog",
        *("error_policy", "read_error_policy", "cache", "io", "discard", "detect_zeroes"),
        *("block_size", "dedicated_io_thread", "limits", "io_threads", "tray"),
        *("vendor_data", "vendor_data_base64", "ignition", "sysprep"),
        *("user_data_parts", "environment", "write_files", "mounts"),
        *("volume", "template", "host_device", "links", "make_filesystem"),
        *("filesystems", "host_disk", "resources", "dns_config"),
        *("host_aliases", "fqdn", "meta_data", "network_state"),
        *("acpi_index", "mtu", "queues", "state", "publish", "addresses"),
    }
)
"""Fields that were added after the first release. They are hashed only if they are set and not
empty, so that the hashes of older specs stay equal."""
_UNSET: tuple[Any, ...] = (None, [], {})


_NESTED = frozenset({dict, list})
_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"))


def spec_hash(value: BaseModel) -> str:
    """Return the hex SHA-256 of a model's canonical JSON: equal for equal content."""
    return hashlib.sha256(canonical(value)).hexdigest()


def canonical(value: BaseModel) -> bytes:
    """Return a model's ASCII JSON with sorted keys, without unset fields of HASHED_WHEN_SET."""
    plain = _hashed(value.model_dump(mode="json"))
    return _CANONICAL.encode(plain).encode()


def _hashed(value: Any) -> Any:
    kind = type(value)  # exact types suffice: plain data has no subclasses
    if kind is dict:
        return {
            key: _hashed(field) if type(field) in _NESTED else field
            for key, field in value.items()
            if field or key not in HASHED_WHEN_SET or field not in _UNSET
        }
    return [_hashed(item) for item in value] if kind is list else value
