"""Defaults of manifests, as KubeVirt's mutating webhooks set them.

A default fills only a missing field. Filling in the defaults again therefore has no effect.
"""

import copy
import uuid
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from virtbus.kubebridge.core.objects import quantity
from virtbus.kubebridge.core.objects.metadata import VM_FINALIZER, VMI_FINALIZER
from virtbus.kubebridge.core.objects.unstructured import Object, at, items, part, pointer, text

FIRMWARE_NAMESPACE = uuid.UUID("6a1a24a1-4061-4607-8bf4-a3963d0c5895")
"""KubeVirt's UUID namespace for firmware. A VM's name gives the same firmware uuid in both
products."""

DEFAULT_BUS = "sata"
"""KubeVirt's default on amd64 (pkg/defaults, setDefaultAmd64DisksBus)."""
WATCHDOG_ACTION = "reset"

Plain = dict[str, Any]


class Default(NamedTuple):
    """A default of the field `path`. `what` is its value for the docs; `fill` sets it in a spec."""

    path: str
    what: str
    fill: Callable[[Plain], None]


def into(spec: Plain, *path: str) -> Plain:
    """Return the object at the path. Missing objects are created.

    If a value on the path is not an object, return an object outside of `spec`.
    """
    here = spec
    for name in path:
        below = here.get(name)
        if below is None:
            below = here[name] = {}
        if not isinstance(below, dict):
            return {}
        here = below
    return here


def _fixed(path: str, value: str) -> Default:
    *above, name = path.split(".")

    def fill(spec: Plain) -> None:
        holder = into(spec, *above)
        holder[name] = holder.get(name) or value

    return Default(path, value, fill)


ARCHITECTURE = _fixed("architecture", "amd64")
MACHINE = _fixed("domain.machine.type", "q35")


def _topology(spec: Plain) -> None:
    cpu = into(spec, "domain", "cpu")
    if any(cpu.get(name) for name in ("sockets", "cores", "threads")):
        return
    resources = part(spec, "domain", "resources")
    asked = at(resources, "limits", "cpu") or at(resources, "requests", "cpu")
    try:
        sockets = max(1, quantity.whole(asked)) if asked else 1
    except ValueError:  # the check of the field itself reports this error
        sockets = 1
    cpu |= {"sockets": sockets, "cores": 1, "threads": 1}


def _memory(spec: Plain) -> None:
    resources = part(spec, "domain", "resources")
    asked = at(resources, "requests", "memory") or at(resources, "limits", "memory")
    memory = into(spec, "domain", "memory")
    if memory.get("guest") is None and asked:
        memory["guest"] = asked


def _pull_policy(spec: Plain) -> None:
    for volume in items(spec, "volumes"):
        disk = at(volume, "containerDisk")
        if isinstance(disk, dict) and not disk.get("imagePullPolicy"):
            image = text(disk, "image")
            tag = "" if "@" in image else image.rpartition("/")[2].partition(":")[2] or "latest"
            disk["imagePullPolicy"] = "Always" if tag == "latest" else "IfNotPresent"


def _nic(spec: Plain) -> None:
    devices = into(spec, "domain", "devices")
    if devices.get("autoattachPodInterface") is False:
        return
    if not spec.get("networks") and not devices.get("interfaces"):
        spec["networks"] = [{"name": "default", "pod": {}}]
        devices["interfaces"] = [{"name": "default", "bridge": {}}]


def _disks(spec: Plain) -> None:
    devices = into(spec, "domain", "devices")
    if devices.get("disks") is None:
        devices["disks"] = []
    named = {"", *(text(disk, "name") for disk in items(devices, "disks"))}
    missing = dict.fromkeys(text(volume, "name") for volume in items(spec, "volumes"))
    if isinstance(devices["disks"], list):
        fresh = ({"name": name, "disk": {"bus": DEFAULT_BUS}} for name in missing)
        devices["disks"] += [disk for disk in fresh if disk["name"] not in named]


def _buses(spec: Plain) -> None:
    for disk in items(spec, "domain", "devices", "disks"):
        if isinstance(disk, dict) and not {"disk", "cdrom", "lun"} & set(disk):
            disk["disk"] = {"bus": DEFAULT_BUS}
        for kind in ("disk", "cdrom"):
            device = at(disk, kind)
            if isinstance(device, dict) and not device.get("bus"):
                device["bus"] = DEFAULT_BUS


def _cdroms(spec: Plain) -> None:
    for disk in items(spec, "domain", "devices", "disks"):
        cdrom = at(disk, "cdrom")
        if isinstance(cdrom, dict):
            cdrom.setdefault("readonly", True)
            cdrom.setdefault("tray", "closed")


def _watchdog(spec: Plain) -> None:
    watchdog = at(spec, "domain", "devices", "watchdog")
    if not isinstance(watchdog, dict) or watchdog.get("diag288") is not None:
        return
    _fixed("i6300esb.action", WATCHDOG_ACTION).fill(watchdog)


def _features(spec: Plain) -> None:
    into(spec, "domain", "features", "acpi").setdefault("enabled", True)


SPEC_DEFAULTS = (
    ARCHITECTURE,
    MACHINE,
    _fixed("domain.cpu.model", "host-model"),
    Default(
        "domain.cpu",
        "without sockets, cores and threads: one socket for each CPU of the limit or of the"
        " request, otherwise one socket",
        _topology,
    ),
    Default("domain.memory.guest", "the memory request, or the memory limit", _memory),
    Default(
        "volumes[].containerDisk.imagePullPolicy",
        "Always if the tag is latest or missing, otherwise IfNotPresent",
        _pull_policy,
    ),
    Default(
        "domain.devices.interfaces",
        "without networks: one on the pod network, unless autoattachPodInterface is false",
        _nic,
    ),
    Default("domain.devices.disks", "a sata disk for each volume without one", _disks),
    Default("domain.devices.disks[].disk.bus", "sata", _buses),
    Default("domain.devices.disks[].cdrom", "read-only, with a closed tray", _cdroms),
    Default("domain.devices.watchdog", "an i6300esb that resets the guest", _watchdog),
    Default("domain.features.acpi.enabled", "true", _features),
)


def of_vmi(vmi: Object) -> Plain:
    """Return the VMI as Kubernetes stores it: with defaults and, before its deletion, a finalizer.

    The status stays empty. The first status update sets the phase Pending.
    """
    whole: Plain = copy.deepcopy(dict(vmi))
    spec = into(whole, "spec")
    for default in SPEC_DEFAULTS:
        default.fill(spec)
    if not at(whole, "metadata", "deletionTimestamp"):
        _finalizer(whole, VMI_FINALIZER)
    return whole


def of_vm(vm: Object) -> Plain:
    """Return the VM as Kubernetes stores it. Only invariant fields of its template are filled in.

    All VMIs of the VM share these fields: the architecture, the machine type and the firmware's
    uuid.
    """
    whole: Plain = copy.deepcopy(dict(vm))
    if not isinstance(at(whole, "spec", "template"), dict):
        return whole
    spec = into(whole, "spec", "template", "spec")
    ARCHITECTURE.fill(spec)
    MACHINE.fill(spec)
    firmware = into(spec, "domain", "firmware")
    if not firmware.get("uuid") and (name := text(whole, "metadata", "name")):
        firmware["uuid"] = str(uuid.uuid5(FIRMWARE_NAMESPACE, name))
    if not at(whole, "metadata", "deletionTimestamp"):
        _finalizer(whole, VM_FINALIZER)
    return whole


def _finalizer(whole: Plain, name: str) -> None:
    metadata = into(whole, "metadata")
    there = metadata.get("finalizers") or []
    if isinstance(there, list) and name not in there:
        metadata["finalizers"] = [*there, name]


def json_patch(before: Object, after: Object) -> list[dict[str, Any]]:
    """Return the RFC 6902 operations from `before` to `after`, for a mutating webhook's answer."""
    return list(_patch(before, after, ""))


def _patch(before: Any, after: Any, path: str) -> Iterator[dict[str, Any]]:
    if not (isinstance(before, dict) and isinstance(after, dict)):
        if before != after:
            yield {"op": "replace", "path": path, "value": after}
        return
    for key in before.keys() - after.keys():
        yield {"op": "remove", "path": path + pointer(key)}
    for key, value in after.items():
        here = path + pointer(key)
        if key not in before:
            yield {"op": "add", "path": here, "value": value}
        else:
            yield from _patch(before[key], value, here)
