"""Renders a NoCloud seed's three files (cloud-init: reference/datasources/nocloud)."""

import base64
import hashlib
import re
from collections.abc import Sequence
from email.mime.text import MIMEText
from typing import Any

import yaml

from virtbus.schemas.network import InterfaceStatus
from virtbus.schemas.seed import CloudInit
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.yaml_text import read_yaml

MAX_VALUES = 2000
"""A cloud-config with more values is not merged. At the limit, a merge takes up to 0.2 s of CPU."""
_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
"""libyaml writes the same as PyYAML, in a quarter of the time."""
CLOUD_CONFIG = "#cloud-config"
_MIME = re.compile(r"\s*(?:mime-version|content-type):", re.IGNORECASE)
_KINDS = (
    ("#cloud-config-archive", "cloud-config-archive"),
    ("#cloud-config-jsonp", "cloud-config-jsonp"),
    ("#cloud-boothook", "cloud-boothook"),
    (CLOUD_CONFIG, "cloud-config"),
    ("#part-handler", "part-handler"),
    ("#include-once", "x-include-once-url"),
    ("#include", "x-include-url"),
    ("## template: jinja", "jinja2"),
    ("#!", "x-shellscript"),
)
"""First line to MIME subtype (cloud-init: explanation/format); longer prefixes first."""


def seed_files(
    record: VmRecord, seed: CloudInit, interfaces: Sequence[InterfaceStatus]
) -> dict[str, bytes]:
    """Return the files as name to contents. A YAML dumper writes all values (INJ-10)."""
    hostname = seed.hostname or record.name
    meta: dict[str, Any] = {"instance-id": record.uid, "local-hostname": hostname}
    if seed.ssh_keys:
        meta["public-keys"] = list(seed.ssh_keys)
    return {
        "meta-data": _yaml(meta),
        "user-data": user_data(seed.user_bytes, hostname, seed.ssh_keys),
        "network-config": _network(seed, interfaces),
    }


def user_data(data: bytes | None, hostname: str, ssh_keys: Sequence[str]) -> bytes:
    """Return the user's data combined with the platform's part: host name and SSH keys.

    A cloud-config is merged key by key; the user's keys win. Any other kind (a script, MIME, an
    include) becomes the second part of a MIME message, unchanged. Without SSH keys it is used
    alone.

    Data that is no text (gzip), or that cannot be merged within MAX_VALUES, is also used alone. The
    meta-data contains the host name and the SSH keys, too.
    """
    try:
        text = data.decode() if data is not None else None
    except UnicodeDecodeError:
        return data or b""
    ours: dict[str, Any] = {"hostname": hostname}
    if ssh_keys:
        ours["ssh_authorized_keys"] = list(ssh_keys)
    if text is None or not text.strip():
        return _cloud_config(ours)
    if kind_of(text) == "cloud-config":
        return _with_ours(ours, text) or text.encode()
    if not ssh_keys:
        return text.encode()
    return _mime(_cloud_config(ours), text)


def kind_of(text: str) -> str:
    """Return the `text/…` subtype by the first line, as cloud-init does; "" if unknown."""
    start = text.lstrip()
    return next((kind for prefix, kind in _KINDS if start.startswith(prefix)), "")


def _with_ours(ours: dict[str, Any], text: str) -> bytes | None:
    """Return `ours` merged with the user's cloud-config; None if that is no map or too large."""
    try:
        theirs = read_yaml(text, max_values=MAX_VALUES)
        if theirs is None:
            return _cloud_config(ours)
        return _cloud_config(_merged(ours, theirs)) if isinstance(theirs, dict) else None
    except (yaml.YAMLError, ValueError, TypeError, OverflowError, RecursionError):
        return None  # not YAML, or not representable


def _merged(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    merged = {**ours, **theirs}
    keys = theirs.get("ssh_authorized_keys")
    if isinstance(keys, list) and "ssh_authorized_keys" in ours:
        merged["ssh_authorized_keys"] = list(dict.fromkeys([*ours["ssh_authorized_keys"], *keys]))
    return merged


def _cloud_config(value: dict[str, Any]) -> bytes:
    return f"{CLOUD_CONFIG}\n".encode() + _yaml(value)


def _yaml(value: dict[str, Any]) -> bytes:
    # Escape all but ASCII: PyYAML writes a NEL unescaped, and reads it as a space.
    text: str = yaml.dump(value, Dumper=_DUMPER, sort_keys=False, width=1000)
    return text.encode()


def _mime(ours: bytes, text: str) -> bytes:
    """Return a MIME message of our cloud-config and the user's text.

    A user's MIME message becomes one part, which cloud-init unpacks. It is not parsed here, because
    a mail parser would process a thousand nested parts.
    """
    theirs = text.lstrip() if _MIME.match(text) else _part(text, kind_of(text) or "plain")
    # derived from the contents, so that the same input gives the same seed
    boundary = f"=={hashlib.sha256(text.encode()).hexdigest()}=="
    parts = "".join(
        f"--{boundary}\n{part}\n" for part in (_part(ours.decode(), "cloud-config"), theirs)
    )
    head = f'Content-Type: multipart/mixed; boundary="{boundary}"\nMIME-Version: 1.0\n\n'
    return f"{head}{parts}--{boundary}--\n".encode()


def _part(text: str, kind: str) -> str:
    part = MIMEText("", kind, "utf-8")
    part.set_payload(base64.encodebytes(text.encode()).decode())
    return part.as_string()


def _network(seed: CloudInit, interfaces: Sequence[InterfaceStatus]) -> bytes:
    """Return network-config v2: the user's own text, or DHCP on each interface by its MAC."""
    if (network := seed.network_bytes) is not None:
        return network
    ethernets = {
        f"vb{index}": {"match": {"macaddress": interface.mac}, "dhcp4": True}
        for index, interface in enumerate(interfaces)
    }
    return _yaml({"version": 2, "ethernets": ethernets})
