"""Reads the references of Virtlet's annotations to ConfigMaps and Secrets, and their contents.

A reference is `configmap/NAME` or `secret/NAME`, for an object in the pod's namespace. A reference
for SSH keys may end with `/KEY`.
"""

import base64
import binascii
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from virtbus.schemas.guest_files import GuestFile
from virtbus.schemas.wire import reason_of

SECRETS = "secrets"
_KINDS = {"configmap": "configmaps", "secret": SECRETS}
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_KEY = re.compile(r"[A-Za-z0-9._-]{1,253}")
AUTHORIZED_KEYS = "authorized_keys"
BASE64, PLAIN = "base64", "plain"
_PATH, _ENCODING = "_path", "_encoding"


class Source(NamedTuple):
    """An object of the pod's namespace, and one of its keys. An empty key means all keys."""

    kind: str
    """The plural of the object's kind, as in paths of the API."""
    name: str
    key: str = ""

    def path(self, namespace: str) -> str:
        return f"/api/v1/namespaces/{namespace}/{self.kind}/{self.name}"


Contents = Mapping[str, Mapping[str, bytes]]
"""The values of the named objects, by annotation and by key."""


def parse(text: str, *, with_key: bool = False) -> Source:
    """Return the object that an annotation names.

    With `with_key`, the reference may have a key. The default key is AUTHORIZED_KEYS.

    Raises ValueError.
    """
    parts = text.strip().split("/")
    kind = _KINDS.get(parts[0].lower())
    key = parts[2] if len(parts) == 3 and with_key else ""
    valid = len(parts) == 2 or bool(_KEY.fullmatch(key))
    if kind is None or not valid or not _NAME.fullmatch(parts[1]):
        form = "configmap/NAME or secret/NAME" + (", with /KEY after it" if with_key else "")
        msg = f"must be {form}"
        raise ValueError(msg)
    return Source(kind, parts[1], key or (AUTHORIZED_KEYS if with_key else ""))


def values(kind: str, obj: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the decoded values of an object from the API server, by key.

    Raises ValueError.
    """
    texts = {str(key): str(one) for key, one in (obj.get("data") or {}).items()}
    if kind == SECRETS:
        return {key: base64.b64decode(one, validate=True) for key, one in texts.items()}
    more = obj.get("binaryData") or {}
    return {
        **{key: one.encode() for key, one in texts.items()},
        **{str(key): base64.b64decode(str(one), validate=True) for key, one in more.items()},
    }


def decoded(value: bytes, encoding: str) -> str:
    """Return a value as text, decoded from `encoding`.

    Raises ValueError.
    """
    try:
        return (base64.b64decode(value) if encoding == BASE64 else value).decode()
    except (binascii.Error, UnicodeDecodeError):
        msg = f"is no UTF-8 text in the encoding {encoding}"
        raise ValueError(msg) from None


def merged(first: Any, second: Any) -> Any:
    """Merge two values as Virtlet does.

    Two maps are merged recursively, and two lists are joined. In other cases, the result is
    `second`.
    """
    if isinstance(first, dict) and isinstance(second, dict):
        both = {key: merged(first[key], second[key]) for key in first.keys() & second.keys()}
        return {**first, **second, **both}
    if isinstance(first, list) and isinstance(second, list):
        return [*first, *second]
    return second


def files(given: Mapping[str, bytes]) -> tuple[GuestFile, ...]:
    """Return the files of an object. The keys `X`, `X_path` and `X_encoding` describe one file.

    Raises:
        ValueError: a path is missing or wrong, or an encoding is wrong. The error names only keys,
            because values may be secret.
    """
    found = []
    for key in sorted(given):
        if f"{key}{_PATH}" not in given:
            if not key.endswith((_PATH, _ENCODING)):
                msg = f"has the key {key!r:.80} without {key}{_PATH}"
                raise ValueError(msg)
            continue
        encoding = given.get(f"{key}{_ENCODING}", BASE64.encode()).decode(errors="replace").strip()
        if encoding not in {BASE64, PLAIN}:
            msg = f"has an unknown {key}{_ENCODING}; write base64 or plain"
            raise ValueError(msg)
        path = given[f"{key}{_PATH}"].decode(errors="replace").strip()
        try:
            content = base64.b64decode(given[key]) if encoding == BASE64 else given[key]
            found.append(GuestFile(path=path, content_base64=base64.b64encode(content).decode()))
        except ValueError as error:
            msg = f"has the keys {key!r:.80} and {key}{_PATH}: {reason_of(error)}"
            raise ValueError(msg) from None
    return tuple(found)
