"""Derives `vm.create` requests from a backup of the bus, even from a backup of virtbus 0.1."""

from collections.abc import Iterator, Mapping
from typing import Any

from virtbus.bus.provisioning.backup import Backup
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.image import parse_image_ref
from virtbus.schemas.subjects import vm_secret
from virtbus.schemas.wire import decode

_KEPT = ("name", "namespace", "labels", "annotations", "spec")
_CLOUD_INIT = ("cloud_init_no_cloud", "cloud_init_config_drive")
_FILES = ("files", "sysprep")

Json = dict[str, Any]


def specs(backup: Backup) -> Iterator[Json]:
    """Yield a `vm.create` request, with secrets, for each VM that is not being deleted.

    A request keeps the VM's name, namespace, labels, annotations and spec. It loses the VM's uid,
    node, addresses, disk contents and power state.
    """
    for key in backup.records:
        record = _plain(backup.values[key])
        if not isinstance(record.get("spec"), dict) or record.get("deleting"):
            continue
        request = {name: record[name] for name in _KEPT if record.get(name)}
        secrets = backup.values.get(vm_secret(key.split(".")[2], str(record["uid"])))
        if secrets is not None:
            request["spec"] = _with_secrets(request["spec"], _plain(secrets))
        yield request


def _plain(value: bytes) -> Json:
    try:
        found = decode(value)
    except VirtbusError:
        return {}
    return found if isinstance(found, dict) else {}


def _with_secrets(spec: Json, secrets: Json) -> Json:
    volumes = [_volume(dict(volume), secrets) for volume in spec.get("volumes") or ()]
    whole = spec | {"volumes": volumes}
    if secrets.get("ignition"):
        whole["ignition"] = secrets["ignition"]
    return whole


def _volume(volume: Json, secrets: Mapping[str, Json]) -> Json:
    name = volume.get("name", "")
    for kind in _CLOUD_INIT:
        if kind in volume:
            volume[kind] = secrets.get("cloud_init", {}).get(name, volume[kind])
    for kind in _FILES:
        if kind in volume:
            volume[kind] = secrets.get("files", {}).get(name, volume[kind])
    pull = secrets.get("image_pull", {}).get(name)
    if pull and volume.get("container_disk"):
        volume["container_disk"] = volume["container_disk"] | {"image_pull_secret": pull}
    if pull and volume.get("image"):
        source = parse_image_ref(volume["image"]["ref"])
        locator = f"{source.locator.partition('?')[0]}?{pull}"
        volume["image"] = volume["image"] | {"ref": source._replace(locator=locator).ref}
    return volume
