"""Renders the files of a NoCloud seed (cloud-init: reference/datasources/nocloud)."""

from collections.abc import Sequence
from typing import Any

from virtbus.nodeagent.core.guest_files import cloud_config_lists
from virtbus.nodeagent.core.user_data import to_yaml, user_and_vendor
from virtbus.schemas.dns import DnsConfig
from virtbus.schemas.network import InterfaceStatus
from virtbus.schemas.seed import CloudInit
from virtbus.schemas.vm import VmRecord


def seed_files(
    record: VmRecord, seed: CloudInit, interfaces: Sequence[InterfaceStatus]
) -> dict[str, bytes]:
    """Return the contents of the files by name.

    A YAML dumper writes all values that virtbus adds (INJ-10). Without added values, user data
    stays unchanged.
    """
    hostname = seed.hostname or record.name
    meta = seed.more_meta | {"instance-id": record.uid, "local-hostname": seed.fqdn or hostname}
    defaults: dict[str, Any] = {"hostname": hostname}
    if seed.fqdn:
        defaults["fqdn"] = seed.fqdn
    if seed.ssh_keys:
        meta["public-keys"] = defaults["ssh_authorized_keys"] = list(seed.ssh_keys)
    added = cloud_config_lists(seed, record.spec.domain.devices)
    user, vendor = user_and_vendor(seed, defaults, added)
    files = {
        "meta-data": to_yaml(meta),
        "user-data": user or b"",
        "network-config": _network(seed, interfaces, record.spec.dns_config),
    }
    if vendor is not None:
        files["vendor-data"] = vendor
    return files


def _network(
    seed: CloudInit, interfaces: Sequence[InterfaceStatus], dns: DnsConfig | None
) -> bytes:
    """Return network-config v2: the user's text, or DHCP on each interface by MAC.

    With DHCP, the text repeats the VM's DNS settings, because systemd-networkd takes no search
    domains from DHCP. It omits DNS settings without a name server, because cloud-init fails on
    search domains alone (measured: 22.4).
    """
    if (network := seed.network_bytes) is not None:
        return network
    more: dict[str, Any] = {}
    if dns is not None and dns.nameservers:
        named = {"addresses": list(dns.nameservers), "search": list(dns.searches)}
        more = {"nameservers": named}
    ethernets = {
        f"vb{index}": {"match": {"macaddress": interface.mac}, "dhcp4": True, **more}
        for index, interface in enumerate(interfaces)
    }
    return to_yaml({"version": 2, "ethernets": ethernets})
