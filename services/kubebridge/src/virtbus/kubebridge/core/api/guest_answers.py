"""Converts a guest agent's answers to KubeVirt's API."""

from typing import Any

from virtbus.kubebridge.core.vmi.status import guest_os
from virtbus.schemas.guest import GuestFilesystem, GuestInfo, GuestUser

API_VERSION = "subresources.kubevirt.io/v1"


def os_info(told: GuestInfo) -> dict[str, Any]:
    """Return the answer of `guestosinfo`: system, users and file systems."""
    return {
        "apiVersion": API_VERSION,
        "kind": "VirtualMachineInstanceGuestAgentInfo",
        "hostname": told.hostname,
        "os": guest_os(told),
        "timezone": _zone(told),
        "userList": [_user(one) for one in told.users],
        "fsInfo": {"disks": [_filesystem(one) for one in told.filesystems]},
    }


def users(told: GuestInfo) -> dict[str, Any]:
    """Return the answer of `userlist`."""
    return _list("VirtualMachineInstanceGuestOSUserList", [_user(one) for one in told.users])


def filesystems(told: GuestInfo) -> dict[str, Any]:
    """Return the answer of `filesystemlist`."""
    listed = [_filesystem(one) for one in told.filesystems]
    return _list("VirtualMachineInstanceFileSystemList", listed)


def _list(kind: str, listed: list[dict[str, Any]]) -> dict[str, Any]:
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": {}, "items": listed}


def _zone(told: GuestInfo) -> str:
    """Return the time zone as KubeVirt writes it: `CET, 3600`."""
    return f"{told.os.timezone}, {told.os.utc_offset_s}" if told.os is not None else ""


def _user(one: GuestUser) -> dict[str, Any]:
    return {"userName": one.name, "domain": one.domain, "loginTime": one.login_time_s}


def _filesystem(one: GuestFilesystem) -> dict[str, Any]:
    return {
        "diskName": one.name,
        "mountPoint": one.mountpoint,
        "fileSystemType": one.type,
        "usedBytes": one.used_bytes or 0,
        "totalBytes": one.total_bytes or 0,
    }
