"""Converts a guest agent's answers to KubeVirt's API."""

from typing import Any

from virtbus.kubebridge.core.vmi.status import guest_os
from virtbus.schemas.guest import GuestFilesystem, GuestInfo, GuestUser

API_VERSION = "subresources.kubevirt.io/v1"


def os_info(info: GuestInfo) -> dict[str, Any]:
    """Return the answer of `guestosinfo`: system, users and file systems."""
    os = info.os
    return {
        "apiVersion": API_VERSION,
        "kind": "VirtualMachineInstanceGuestAgentInfo",
        "hostname": info.hostname,
        "os": guest_os(info),
        "timezone": f"{os.timezone}, {os.utc_offset_s}" if os is not None else "",
        "userList": [_user(one) for one in info.users],
        "fsInfo": {"disks": [_filesystem(one) for one in info.filesystems]},
    }


def users(info: GuestInfo) -> dict[str, Any]:
    """Return the answer of `userlist`."""
    return _list("VirtualMachineInstanceGuestOSUserList", [_user(one) for one in info.users])


def filesystems(info: GuestInfo) -> dict[str, Any]:
    """Return the answer of `filesystemlist`."""
    return _list(
        "VirtualMachineInstanceFileSystemList", [_filesystem(one) for one in info.filesystems]
    )


def _list(kind: str, listed: list[dict[str, Any]]) -> dict[str, Any]:
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": {}, "items": listed}


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
