"""Combines the sources of a guest's user data with virtbus' own values (ADR 0043).

Several cloud-configs become one cloud-config, by Virtlet's rules: maps are merged by key, lists are
joined, and a later value of another type wins. A single script stays a script, and virtbus adds its
values to the vendor data. Other sources become parts of a MIME message, in their order.
"""

import base64
import hashlib
import zlib
from collections.abc import Sequence
from typing import Any

import yaml

from virtbus.schemas.seed import CloudInit
from virtbus.schemas.user_data import CLOUD_CONFIG, GZIP, MIME, SCRIPT, content_type
from virtbus.schemas.yaml_text import read_yaml

MAX_VALUES = 2000
"""The limit of values in merged cloud-configs. With the longest text, a merge of as many takes 0.2
s of CPU.
"""
MERGED_BYTES = 64 * 1024
"""The limit of all cloud-configs together. Larger cloud-configs become parts, for cloud-init to
merge.
"""
UNPACKED_BYTES = 1024 * 1024
"""The limit of a gzip's content. A larger gzip becomes a part for cloud-init to unpack."""
APPEND = "dict(recurse_array,no_replace)+list(append)"
"""cloud-init's merge type for a part that only adds: lists are appended, other values stay."""
_OWN_RULES = frozenset({"merge_how", "merge_type"})
"""Keys with a cloud-config's own merge rules. With such a key, this module merges no cloud-configs.
"""
_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
"""libyaml writes the same text as PyYAML in a quarter of the time."""
Config = dict[str, Any]
Source = tuple[str, bytes]
"""A content type, and data of that type."""


def sources_of(seed: CloudInit) -> list[Source]:
    """Return the sources that are not blank, `user_data` first."""
    found = [
        (part.content_type or content_type(part.content), part.content)
        for part in seed.user_data_parts
    ]
    if (alone := seed.user_bytes) is not None:
        found.insert(0, (content_type(alone), alone))
    return [one for one in found if one[1].strip()]


def user_and_vendor(
    seed: CloudInit, defaults: Config, added: Config
) -> tuple[bytes | None, bytes | None]:
    """Return user data and vendor data for the guest; None for missing data.

    `defaults` and `added` are as in `combined`. In cloud-init, user data's keys replace vendor
    data's keys, so `added` usually goes to the user data. If the user data is one script, without
    keys, `added` goes to the vendor data. Host name and SSH keys are then only in the meta-data.
    """
    sources, vendor = sources_of(seed), seed.vendor_bytes
    if [kind for kind, _ in sources] != [SCRIPT]:
        return combined(sources, defaults, added), vendor
    if not added:
        return sources[0][1], vendor
    theirs = [] if vendor is None else [(content_type(vendor), vendor)]
    return sources[0][1], combined(theirs, {}, added)


def combined(sources: Sequence[Source], defaults: Config, added: Config) -> bytes | None:
    """Return the user data for the guest, or None.

    `defaults` (host name, SSH keys) are also in the meta-data. A user's values replace `defaults`.
    The lists of `added` are appended to the user's lists of the same names.
    """
    if not sources:
        return _ours(defaults, added) or None
    if len(sources) == 1 and not added:
        return _with_defaults(sources[0], defaults)
    sources = [_unpacked(one) for one in sources]
    configs = [data for kind, data in sources if kind == CLOUD_CONFIG]
    others = [one for one in sources if one[0] != CLOUD_CONFIG]
    merged = _merged(configs)
    if merged is None:
        return mime_message(sources, _ours(defaults, added))
    if not others:
        return cloud_config(_completed(merged, defaults, added))
    first = [(CLOUD_CONFIG, cloud_config(merged))] if configs else []
    return mime_message([*first, *others], _ours(defaults, added))


def _with_defaults(source: Source, defaults: Config) -> bytes:
    """Return a single source, with `defaults` if possible.

    Return three kinds of data unchanged: a cloud-config that cannot be merged, binary data (gzip),
    and other text if `defaults` has no SSH keys.
    """
    kind, data = source
    if kind == CLOUD_CONFIG:
        merged = _merged([data]) if defaults else None
        return data if merged is None else cloud_config(_completed(merged, defaults, {}))
    together = "ssh_authorized_keys" in defaults and _is_text(data)
    return mime_message([source], cloud_config(defaults)) if together else data


def _ours(defaults: Config, added: Config) -> bytes:
    return cloud_config(defaults | added) if defaults or added else b""


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


# --- cloud-configs -----------------------------------------------------------------------------
def cloud_config(value: Config) -> bytes:
    """Return a cloud-config of these values."""
    return b"#cloud-config\n" + to_yaml(value)


def to_yaml(value: Config) -> bytes:
    """Return YAML in ASCII. PyYAML writes a Unicode NEL unescaped, but reads NEL as a space."""
    text: str = yaml.dump(value, Dumper=_DUMPER, sort_keys=False, width=1000)
    return text.encode()


def _merged(configs: Sequence[bytes]) -> Config | None:
    """Merge all cloud-configs; return None if one cannot be merged."""
    if sum(map(len, configs)) > MERGED_BYTES:
        return None
    merged: Config = {}
    left = MAX_VALUES
    try:
        for data in configs:
            value = read_yaml(data.decode(), max_values=left)
            left -= _count(value)
            if value is None:
                continue
            if not isinstance(value, dict) or (len(configs) > 1 and _OWN_RULES & value.keys()):
                return None
            merged = _joined(merged, value)
        to_yaml(merged)
    except (yaml.YAMLError, ValueError, TypeError, OverflowError, RecursionError):
        return None  # not YAML, or not representable
    return merged


def _count(value: Any) -> int:
    """Count values as the budget of `read_yaml` does."""
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(_count, value.values()))
    return 1 + sum(map(_count, value)) if isinstance(value, list) else 1


def _joined(first: Any, second: Any) -> Any:
    """Merge maps by key, join lists, and choose the second of other values."""
    if isinstance(first, dict) and isinstance(second, dict):
        both = {key: _joined(first[key], second[key]) for key in first.keys() & second.keys()}
        return {**first, **second, **both}
    if isinstance(first, list) and isinstance(second, list):
        return [*first, *second]
    return second


def _completed(theirs: Config, defaults: Config, added: Config) -> Config:
    whole = {**defaults, **theirs}
    for key, values in added.items():
        whole[key] = _joined(theirs.get(key), values)
    keys = theirs.get("ssh_authorized_keys")
    if isinstance(keys, list) and "ssh_authorized_keys" in defaults:
        ours = [key for key in defaults["ssh_authorized_keys"] if key not in keys]
        whole["ssh_authorized_keys"] = [*ours, *keys]
    return whole


# --- MIME --------------------------------------------------------------------------------------
def mime_message(sources: Sequence[Source], ours: bytes = b"") -> bytes:
    """Return one message of all sources, with virtbus' cloud-config `ours` at its end.

    A user's own message becomes an unparsed part, for cloud-init to unpack. A mail parser in the
    agent would process a thousand nested parts.
    """
    parts = [
        data.lstrip() if kind == MIME else _part(kind or _plain(data), data)
        for kind, data in sources
    ]
    if ours:
        parts.append(_part(CLOUD_CONFIG, ours, f"X-Merge-Type: {APPEND}\n"))
    # derived from the contents, so that equal input gives an equal seed
    boundary = f"=={hashlib.sha256(b''.join(parts)).hexdigest()}=="
    head = f'Content-Type: multipart/mixed; boundary="{boundary}"\nMIME-Version: 1.0\n\n'
    body = b"".join(b"--%s\n%s\n" % (boundary.encode(), part) for part in parts)
    return b"%s%s--%s--\n" % (head.encode(), body, boundary.encode())


def _plain(data: bytes) -> str:
    return "text/plain" if _is_text(data) else "application/octet-stream"


def _part(kind: str, data: bytes, more: str = "") -> bytes:
    charset = '; charset="utf-8"' if kind.startswith("text/") else ""
    head = (
        f"Content-Type: {kind}{charset}\nMIME-Version: 1.0\n{more}"
        "Content-Transfer-Encoding: base64\n\n"
    )
    return head.encode() + base64.encodebytes(data)


def _unpacked(source: Source) -> Source:
    """Return a gzip's content up to UNPACKED_BYTES; any other source unchanged."""
    if source[0] != GZIP:
        return source
    data, rest = b"", source[1]
    while rest:  # A gzip has one or several members, and zeros may follow (RFC 1952 §2.2).
        unpacker = zlib.decompressobj(wbits=31)
        try:
            data += unpacker.decompress(rest, UNPACKED_BYTES + 1 - len(data))
        except zlib.error:
            return source
        if not unpacker.eof or len(data) > UNPACKED_BYTES:
            return source
        rest = unpacker.unused_data.lstrip(b"\0")
    kind = content_type(data)
    return (kind, data) if kind not in {"", GZIP} else source
