"""A NoCloud seed's three files (cloud-init: reference/datasources/nocloud)."""

import base64
from collections.abc import Sequence
from typing import Any

import yaml

from virtbus.schemas.network import InterfaceStatus
from virtbus.schemas.vm import CloudInitNoCloud, VmRecord

CLOUD_CONFIG = "#cloud-config"
BOUNDARY = "==virtbus-user-data=="


def seed_files(
    record: VmRecord, seed: CloudInitNoCloud, interfaces: Sequence[InterfaceStatus]
) -> dict[str, bytes]:
    """File name to contents. Values go through a YAML dumper, never into text (INJ-10)."""
    hostname = seed.hostname or record.name
    meta: dict[str, Any] = {"instance-id": record.uid, "local-hostname": hostname}
    if seed.ssh_keys:
        meta["public-keys"] = list(seed.ssh_keys)
    return {
        "meta-data": _yaml(meta),
        "user-data": user_data(seed.user_data, hostname, seed.ssh_keys),
        "network-config": _network(seed, interfaces),
    }


def user_data(text: str | None, hostname: str, ssh_keys: Sequence[str]) -> bytes:
    """The user's own text, with the platform's part beside it.

    A cloud-config is merged key by key, the user's keys winning; any other kind (a script, MIME,
    an include) becomes a second part of a MIME message, untouched.
    """
    ours: dict[str, Any] = {"hostname": hostname}
    if ssh_keys:
        ours["ssh_authorized_keys"] = list(ssh_keys)
    if text is None or not text.strip():
        return _cloud_config(ours)
    if text.lstrip().startswith(CLOUD_CONFIG):
        try:
            theirs = yaml.safe_load(text)
        except yaml.YAMLError:
            return text.encode()  # cloud-init tells its user what is wrong with it
        if theirs is None or isinstance(theirs, dict):
            return _cloud_config(_merged(ours, theirs or {}))
        return text.encode()
    if not ssh_keys and text.lstrip().startswith(("#!", "#include", "## template")):
        return text.encode()
    return _mime([_cloud_config(ours), text.encode()])


def _merged(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    merged = {**ours, **theirs}
    keys = theirs.get("ssh_authorized_keys")
    if isinstance(keys, list) and "ssh_authorized_keys" in ours:
        merged["ssh_authorized_keys"] = list(dict.fromkeys([*ours["ssh_authorized_keys"], *keys]))
    return merged


def _cloud_config(value: dict[str, Any]) -> bytes:
    return f"{CLOUD_CONFIG}\n".encode() + _yaml(value)


def _yaml(value: dict[str, Any]) -> bytes:
    text: str = yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=1000)
    return text.encode()


_KINDS = {b"#cloud-config": "cloud-config", b"#!": "x-shellscript", b"#include": "x-include-url"}


def _mime(parts: Sequence[bytes]) -> bytes:
    lines = [
        "MIME-Version: 1.0",
        f'Content-Type: multipart/mixed; boundary="{BOUNDARY}"',
        "",
    ]
    for part in parts:
        kind = next((k for start, k in _KINDS.items() if part.lstrip().startswith(start)), "plain")
        lines += [
            f"--{BOUNDARY}",
            f"Content-Type: text/{kind}; charset=utf-8",
            "Content-Transfer-Encoding: base64",
            "",
            base64.encodebytes(part).decode().rstrip(),
        ]
    return "\n".join([*lines, f"--{BOUNDARY}--", ""]).encode()


def _network(seed: CloudInitNoCloud, interfaces: Sequence[InterfaceStatus]) -> bytes:
    """Network-config v2: DHCP on each of our MACs, or the user's own text."""
    if seed.network_data is not None:
        return seed.network_data.encode()
    ethernets = {
        f"vb{index}": {"match": {"macaddress": interface.mac}, "dhcp4": True}
        for index, interface in enumerate(interfaces)
    }
    return _yaml({"version": 2, "ethernets": ethernets})
