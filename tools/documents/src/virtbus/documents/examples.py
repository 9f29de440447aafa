"""Generates one full and one minimal instance of every message from its fields.

`_VALUES` gives the value of a field, by `Model.field` or by the field's name. If it has no value,
the field's type gives one, so that a new field appears in the golden bytes automatically.

In a full instance, a field has its default only if the other fields permit no other value. A full
instance may be refused as a request, because models accept more combinations than requests.
"""

import types
from collections.abc import Callable
from enum import Enum
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from virtbus.schemas.model import SCHEMA_VERSION

M = TypeVar("M", bound=BaseModel)

UID = "0192f0c1-2d3e-7abc-8def-0123456789ab"
OTHER_UID = "0192f0c1-2d3e-7abc-8def-ba9876543210"
DIGEST = "sha256:" + "5e" * 32
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
SSH_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIOMqqnkVzrm0SdG6UOoqKLsabgH5C9okWi0dh2l9GKJl web"
NOW_NS = 1_790_000_000_123_456_789

_FILES = {
    "volume_label": "app",
    "data": {"app.conf": "on = yes\n"},
    "binary_data": {"key.der": "AAEC"},
}
_LOGINS = '{"auths": {"quay.io": {"auth": "dXNlcjpodW50ZXIy"}}}'
_FIRST_BOOT = {
    "user_data_parts": [
        {"data": "#!/bin/sh\n"},
        {"data_base64": "AP8=", "content_type": "application/x-own"},
    ],
    "vendor_data": "#cloud-config\n",
    "environment": {"COLOR": "light blue"},
    "fqdn": "web.shop.example",
    "meta_data": '{"colour": "blue"}',
    "host_aliases": [{"ip": "192.0.2.7", "hostnames": ["db.example", "db"]}],
    "write_files": [
        {"path": "/etc/app", "content": "a\n", "mode": "0600", "owner": "app:app"},
        {"path": "/etc/key", "content_base64": "AAEC"},
    ],
    "mounts": [{"volume": "data", "path": "/data", "filesystem": "ext4", "partition": 1}],
}
_IGNITION = '{"ignition": {"version": "3.4.0"}}'
_VALUES: dict[str, Any] = {
    "uid": UID,
    "parent": UID,
    "uuid": OTHER_UID,
    "job": OTHER_UID,
    "session": "s-1",
    "namespace": "shop",
    "name": "web",
    "hostname": "web",
    "node": "n1",
    "nodes": ["n1", "n2"],
    "network": "blue",
    "networks": ["blue"],
    "ref": f"debian/12@{DIGEST}",
    "image": "tiny",
    "digest": DIGEST,
    "image_digest": DIGEST,
    "ImageList.continue_": DIGEST,
    "ImageList.continue": DIGEST,
    "NodeImages.keys": ["9ad0c0ffee0ddba1"],
    "image_keys": ["9ad0c0ffee0ddba1"],
    "former_pool": "local",
    "spec_hash": "ab" * 32,
    "sec_digest": "cd" * 32,
    "traceparent": TRACEPARENT,
    "trace_id": "0af7651916cd43dd8448eb211c80319c",
    "span_id": "b7ad6b7169203331",
    "parent_id": "00f067aa0ba902b7",
    "mac": "02:00:5e:10:00:01",
    "mac_address": "02:00:5e:10:00:01",
    "addresses": ["10.127.0.9/16"],
    "AddressClaim.vm": UID,
    "ClaimedAddresses.network": OTHER_UID,
    "ClaimedAddresses.addresses": ["10.127.0.9"],
    "Interface.addresses": ["10.127.0.9"],
    "subnet6": "fd00:127::/64",
    "subnets6": {"n1": "fd00:128::/64"},
    "gateway6": "fd00:127::1",
    "ranges": ["10.127.0.9-10.127.0.99"],
    "excluded": ["10.127.0.50"],
    "gateway": "10.127.0.1",
    "subnet": "10.127.0.0/16",
    "entry": UID,
    "adopted": UID,
    "made_by": OTHER_UID,
    "layers": [f"{UID}.root.qcow2"],
    "UnneededLayers.names": [f"{UID}.root.qcow2"],
    "new_uid": UID,
    "mtu": 1400,
    "tap": "vb0192f0c12d3e",
    "netns": "vb-0192f0c12d3e",
    "cpus": 4,
    "sockets": 2,
    "cores": 4,
    "threads": 2,
    "guest": 512 * 1024**2,
    "memory": 512 * 1024**2,
    "disk": 8 * 1024**3,
    "size": 8 * 1024**3,
    "capacity": 1024**3,
    "memory_bytes": 64 * 1024**3,
    "logical_bytes": 4096,
    "physical_bytes": 4096,
    "size_bytes": 31_457_280,
    "virtual_size_bytes": 1024**3,
    "committed_memory_bytes": 2 * 1024**3,
    "user_data": "#cloud-config\npackages: [nginx]\n",
    "network_data": "version: 2\nethernets: {}\n",
    "user_data_base64": "I2Nsb3VkLWNvbmZpZwo=",
    "network_data_base64": "e30K",
    "CloudInitConfigDrive.network_data": "{}",
    "FilesVolume.binary_data": {"key.der": "AAEC"},
    "ssh_keys": [SSH_KEY],
    "HostAlias.ip": "192.0.2.7",
    "HostAlias.hostnames": ["db.example", "db"],
    "DnsConfig.nameservers": ["10.96.0.10", "fd00:96::a"],
    "DnsConfig.searches": ["default.svc.cluster.local"],
    "labels": {"app": "web"},
    "annotations": {"example.org/owner": "größe@team-a"},
    "node_selector": {"zone": "a"},
    "serial": "disk-0001",
    "Cpu.model": "Skylake-Client",
    "NicLimit.bytes_per_s": 50 * 1024**2,
    "NicLimit.burst_bytes": 1024**2,
    "plugins_digest": "ab" * 32,
    "guest_addresses": ["10.0.2.2/24"],
    "vm_network_cidr": "10.0.2.0/24",
    "vm_ipv6_network_cidr": "fd10:0:2::/120",
    "GuestPort.last_port": 8080,
    "PublishedPort.host_address": "192.0.2.7",
    "published": ["192.0.2.7:8080->80/tcp"],
    "path": "/var/lib/virtbus/disks/web/root.qcow2",
    "source": "controller",
    "type": "virtbus.vm.create.v1",
    "subject": "virtbus.api.v1.vm.create",
    "time": "2026-11-21T10:00:00.123+00:00",
    "after": "42-17-1790000000",
    "renew": "virtbus.api.v1.watch.renew.c1.1",
    "input_subject": "virtbus.node.n1.rpc.agent.console.s-1",
    "accelerator": "kvm",
    "accept_unsigned": [f"n1/{UID}", "n2"],
    "accept_groups": [f"n1/default/web@{'0a' * 16}"],
    "lose_volumes": ["shop/data"],
    "accelerators": ["kvm", "tcg"],
    "code": 503,
    "reason": "image_pulling",
    "message": "the image is still being fetched; ask again",
    "schema_version": SCHEMA_VERSION,
    "EventList.after": 42,
    "Envelope.data": {"name": "web", "image": "tiny"},
    "StreamData.data": b"login: \x00\xff",
    "VolumeAttach.disk": "logs",
    "VolumeDetach.gone": UID,
    "source_uid": UID,
    "keep_uid": OTHER_UID,
    "lose_snapshots": ["shop/web-1"],
    "SnapshotWork.id": OTHER_UID,
    "every_s": 86_400,
    "BackupCreate.id": OTHER_UID,
    "BackupCreate.mode": "full",
    "BackupAsk.id": OTHER_UID,
    "BackupFinish.id": OTHER_UID,
    "ScratchWork.id": OTHER_UID,
    "BackupServe.id": OTHER_UID,
    "FlattenWork.id": OTHER_UID,
    "OperationFlatten.id": OTHER_UID,
    "BackupServe.since": UID,
    "BackupVerify.id": OTHER_UID,
    "BackupVerify.operation": UID,
    "BackupView.id": OTHER_UID,
    "BackupView.spec": {"volumes": [{"name": "root"}]},
    "BackupView.children": [UID],
    "BackupManifest.id": OTHER_UID,
    "BackupManifest.spec": {"volumes": [{"name": "root"}]},
    "BackupCheck.operation": UID,
    "BackupDisk.volume_uid": UID,
    "HeldBackup.id": OTHER_UID,
    "HeldBackup.children": [UID],
    "BackupWork.id": OTHER_UID,
    "BackupWork.mode": "full",
    "BackupWork.spec": {"volumes": [{"name": "root"}]},
    "BackupWork.chain": 9,
    "VerifyWork.id": OTHER_UID,
    "VerifyWork.backup": UID,
    "BackupsAsk.id": OTHER_UID,
    "OperationRecord.mode": "full",
    "VolumeSource.backup": None,  # exclusive with other sources
    "ExportWork.id": OTHER_UID,
    "FillWork.id": OTHER_UID,
    "VolumeFill.operation": OTHER_UID,
    "fill_operation": OTHER_UID,
    "VolumeSpec.access": "one",  # a shared volume has no source
    "VolumeSource.volume": None,  # exclusive with `image`
    "VolumeSource.vm": None,
    "VolumeSource.snapshot": None,
    "VolumeSource.disk": None,
    "FillSource.vm": OTHER_UID,
    "FillSource.disk": "root",
    "OperationRecord.id": OTHER_UID,
    "OperationStatus.id": OTHER_UID,
    "OperationExport.id": OTHER_UID,
    "ExportLinkAsk.id": OTHER_UID,
    "VolumeMove.source": "n1",
    "VolumeMove.export": UID,
    "VolumeMove.fill": OTHER_UID,
    "ExportLink.url": "https://10.0.0.5:8480/exports/x/disk.raw?expires=1&token=5e",
    "OperationAsk.id": OTHER_UID,
    "OperationView.id": OTHER_UID,
    "ExportWork.disk": "root",
    "OperationRecord.disk": "root",
    "OperationExport.disk": "root",
    "OperationView.disk": "root",
    "VmStatus.state": "Running",
    "VmView.state": "Running",
    "VmSpec.volumes": [
        {"name": "root", "image": {"ref": f"debian/12@{DIGEST}", "size": 8 * 1024**3}},
        {
            "name": "tools",
            "container_disk": {
                "image": "quay.io/team/tools:2",
                "path": "/disk/tools.qcow2",
                "image_pull_policy": "Always",
                "image_pull_secret": _LOGINS,
            },
        },
        {"name": "data", "empty_disk": {"capacity": 1024**3}},
        {"name": "device", "host_device": {"path": "/dev/loop0"}},
        {"name": "file", "host_disk": {"path": "/srv/vms/data.img", "capacity": 1024**3}},
        {
            "name": "cloudinit",
            "cloud_init_no_cloud": {
                "user_data": "#cloud-config\n",
                "network_data": "version: 2\n",
                "hostname": "web",
                "ssh_keys": [SSH_KEY],
                **_FIRST_BOOT,
            },
        },
        {
            "name": "drive",
            "cloud_init_config_drive": {
                "user_data_base64": "I2Nsb3VkLWNvbmZpZwo=",
                "network_data_base64": "e30K",
                "hostname": "web",
                "ssh_keys": [SSH_KEY],
            },
        },
        {"name": "settings", "files": _FILES},
        {"name": "answers", "sysprep": {"data": {"autounattend.xml": "<unattend/>\n"}}},
    ],
    "VmSecrets.cloud_init": {
        "cloudinit": {
            "user_data": "#cloud-config\n",
            "network_data": "version: 2\n",
            "ssh_keys": [SSH_KEY],
            **_FIRST_BOOT,
        },
        "drive": {"user_data_base64": "I2Nsb3VkLWNvbmZpZwo=", "hostname": "web"},
    },
    "ImageNameSpec.url": "https://images.example/bookworm.qcow2",
    "Resources.cpus": "0-3,8",
    "Resources.cpu_shares": 512,
    "Resources.cpu_quota_us": 150_000,
    "Resources.cpu_period_us": 100_000,
    "Resources.memory_bytes": 256 * 1024**2,
    "ResourcesInForce.cpus": "0-3,8",
    "ImageTarget.url": "https://images.example/bookworm.qcow2",
    "NetworkSpec.subnet": "10.200.0.0/24",
    "NetworkSpec.subnets": {"n1": "10.201.0.0/24"},
    "NetworkSpec.gateway": "10.200.0.1",
    "NetworkSpec.dns": ["192.0.2.53"],
    "NetworkSpec.conflist": "lan",
    "NetworkUpdate.dns": ["192.0.2.53"],
    "transport": "corp",
    "ContainerDisk.image": "quay.io/team/tools:2",
    "image_pull_secret": _LOGINS,
    "pull_secret": _LOGINS,
    "HostDevice.path": "/dev/loop0",
    "HostDisk.path": "/srv/vms/data.img",
    "Filesystem.directory": "/srv/shared/www",
    "NodeRecord.directories": {"/srv/shared": ["default"]},
    "NodeView.directories": {"/srv/shared": ["default"]},
    "ImagePull.ref": "docker://quay.io/team/tools:2",
    "Ignition.config": _IGNITION,
    "CloudInitNoCloud.network_data_base64": "dmVyc2lvbjogMgo=",
    "vendor_data_base64": "I2Nsb3VkLWNvbmZpZwo=",
    "UserDataPart.data_base64": None,  # exclusive with `data`
    "GuestFile.content_base64": None,
    "meta_data": '{"rack": "b4"}',
    "content_type": "application/x-own",
    "mode": "0600",
    "OverlayPeer.network": UID,
    "OverlayPeer.members": [{"mac": "02:00:5e:10:00:01", "addresses": ["10.210.0.9"]}],
    "vni": 4242,
    "NetworkSpec.mode": "vepa",
    "NetworkSpec.link": "br-lan",
    "LabelExpression.key": "tier",
    "LabelExpression.operator": "In",
    "LabelExpression.values": ["front", "back"],
    "SecurityRule.protocol": "tcp",
    "SecurityRule.ports": ["80", "8000-8080"],
    "SecurityRule.cidrs": ["10.0.0.0/8", "fd00::/8"],
    "SecurityRule.groups": ["lb"],
    "NodeGroup.peers": {"lb": {"default": ["10.127.0.9"]}},
    "links": {"br-lan": "bridge"},
    "SysprepVolume.data": {"autounattend.xml": "<unattend/>\n"},
    "SysprepVolume.binary_data": {"key.der": "AAEC"},
    "VmSecrets.files": {"settings": _FILES},
}


def full(model: type[M]) -> M:
    """Return the instance in which every field is set."""
    return model.model_validate(_plain(model, required_only=False))


def minimal(model: type[M]) -> M:
    """Return the instance with required fields only."""
    return model.model_validate(_plain(model, required_only=True))


def _plain(model: type[BaseModel], *, required_only: bool) -> dict[str, Any]:
    return {
        str(field.validation_alias or name): _field(model, name, field, required_only=required_only)
        for name, field in model.model_fields.items()
        if field.is_required() or not required_only
    }


def _field(model: type[BaseModel], name: str, field: FieldInfo, *, required_only: bool) -> Any:
    for key in (f"{model.__name__}.{name}", name):
        if key in _VALUES and (key != name or not _holds_models(field.annotation)):
            return _VALUES[key]
    if field.annotation is bool:
        return not field.default
    return _of_type(field.annotation, name, required_only=required_only)


def _inner(annotation: Any) -> Any:
    """Return the type inside Annotated and Optional."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _inner(get_args(annotation)[0])
    if origin in {Union, types.UnionType}:
        return _inner(next(one for one in get_args(annotation) if one is not type(None)))
    return annotation


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _holds_models(annotation: Any) -> bool:
    kind = _inner(annotation)
    return _is_model(kind) or any(_is_model(_inner(one)) for one in get_args(kind))


_SCALARS: dict[Any, Callable[[str], Any]] = {
    int: lambda name: NOW_NS if name.endswith("_ns") else 7,
    float: lambda _: 1.5,
    str: lambda name: name,
    bytes: lambda _: b"\x00bytes",
    bool: lambda _: True,
}


def _of_type(annotation: Any, name: str, *, required_only: bool) -> Any:
    kind = _inner(annotation)
    if _is_model(kind):
        return _plain(kind, required_only=required_only)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return list(kind)[-1].value
    match get_origin(kind):
        case origin if origin is tuple:
            return [_of_type(get_args(kind)[0], name, required_only=required_only)]
        case origin if origin is dict:
            return {"root": _of_type(get_args(kind)[1], name, required_only=required_only)}
        case origin if origin is Literal:
            return get_args(kind)[-1]
    make = _SCALARS.get(kind)
    return make(name) if make is not None else name
