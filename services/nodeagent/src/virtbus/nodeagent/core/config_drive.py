"""Renders a config drive's files in OpenStack's layout.

See cloud-init: reference/datasources/configdrive. Unlike a NoCloud seed, a config drive also works
for Windows guests with cloudbase-init. The spec's host name and SSH keys are only in the metadata.
"""

import json
from collections.abc import Sequence
from typing import Any

from virtbus.nodeagent.core.guest_files import cloud_config_lists
from virtbus.nodeagent.core.user_data import mime_message, user_and_vendor
from virtbus.schemas.network import InterfaceStatus
from virtbus.schemas.seed import CloudInit
from virtbus.schemas.user_data import content_type
from virtbus.schemas.vm import VmRecord

LATEST = "openstack/latest"


def config_drive_files(
    record: VmRecord, seed: CloudInit, interfaces: Sequence[InterfaceStatus]
) -> dict[str, bytes]:
    """Return the files' contents by path. The guest's instance id is the VM's uid."""
    hostname = seed.hostname or record.name
    meta = seed.more_meta | {"uuid": record.uid, "name": record.name}
    meta["hostname"] = seed.fqdn or hostname
    if seed.ssh_keys:
        meta["public_keys"] = {f"key-{number}": key for number, key in enumerate(seed.ssh_keys)}
    network = seed.network_bytes
    files = {
        f"{LATEST}/meta_data.json": _json(meta),
        f"{LATEST}/network_data.json": _json(_network(interfaces)) if network is None else network,
    }
    added = cloud_config_lists(seed, record.spec.domain.devices)
    user, vendor = user_and_vendor(seed, {}, added)
    if user is not None:
        files[f"{LATEST}/user_data"] = user
    if vendor is not None:
        files[f"{LATEST}/vendor_data.json"] = _json({"cloud-init": _as_text(vendor)})
    return files


def _as_text(data: bytes) -> str:
    """Return text unchanged, and other bytes as a MIME message, because JSON holds only text."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return mime_message([(content_type(data), data)]).decode()


def _network(interfaces: Sequence[InterfaceStatus]) -> dict[str, Any]:
    """Return OpenStack's network data: IPv4 DHCP on each interface, identified by MAC."""
    names = [f"vb{index}" for index, _ in enumerate(interfaces)]
    return {
        "links": [
            {"id": name, "type": "phy", "ethernet_mac_address": interface.mac}
            for name, interface in zip(names, interfaces, strict=True)
        ],
        "networks": [{"id": name, "type": "ipv4_dhcp", "link": name} for name in names],
        "services": [],
    }


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value).encode()
