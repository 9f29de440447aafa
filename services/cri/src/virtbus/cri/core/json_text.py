"""Writes values of YAML as JSON. JSON has no dates, sets and bytes, so they are converted."""

import json
from typing import Any

_OF_JSON = (str, int, float, type(None))


def json_text(value: Any) -> str:
    """Return a value of `read_yaml` as JSON.

    Dates and bytes become texts, in keys too. A set becomes a map of nulls.

    Raises:
        ValueError: bytes are not UTF-8 text.
    """
    return json.dumps(_plain(value))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {_scalar(name): _plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, set):
        return dict.fromkeys(sorted(str(_scalar(one)) for one in value))
    return _scalar(value)


def _scalar(value: Any) -> Any:
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            msg = "has binary data that are no UTF-8 text"
            raise ValueError(msg) from None
    return value if isinstance(value, _OF_JSON) else str(value)
