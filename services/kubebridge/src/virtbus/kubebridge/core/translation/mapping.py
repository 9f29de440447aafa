"""Maps a VMI to the `vm.create` of the bus by the table of fields.

A VMI is one run of a guest. Its VM on the bus therefore has the run strategy Once; the controller
in `core/vm` decides about the next run. The VMI and its VM on the bus share a uid, so a repeated
create finds the existing VM.
"""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from pydantic import ValidationError

from virtbus.kubebridge.core.fields import placement
from virtbus.kubebridge.core.fields.row import Verdict
from virtbus.kubebridge.core.fields.table import ANNOTATIONS, VM, VMI
from virtbus.kubebridge.core.fields.translator import Translation, walk
from virtbus.kubebridge.core.fields.vm import IGNITION
from virtbus.kubebridge.core.objects.metadata import NODE_LABEL, VM_LABEL
from virtbus.kubebridge.core.objects.status_errors import Cause, Reason
from virtbus.kubebridge.core.objects.unstructured import Object, at, items, part, text
from virtbus.kubebridge.core.translation import annotations as notes
from virtbus.kubebridge.core.translation import bindings
from virtbus.kubebridge.core.translation.contents import SEEDS, Given, fill
from virtbus.kubebridge.core.translation.defaults import of_vm, of_vmi
from virtbus.kubebridge.core.translation.networks import attachments, network_of
from virtbus.kubebridge.core.translation.nics import without_absent
from virtbus.schemas.api import VmCreate
from virtbus.schemas.disk_rules import disk_problems
from virtbus.schemas.nic import QUEUES_MAX
from virtbus.schemas.nic_rules import nic_problems
from virtbus.schemas.vm import RunStrategy
from virtbus.schemas.wire import problems

CREATED_BY = "kubevirt.io/created-by"
"""Label with the VMI's uid. KubeVirt puts this label on the objects that it creates for a VMI."""
CLUSTER = "virtbus.io/cluster"
"""Label with the cluster of the bridge that created a VM. A bridge acts only on VMs of its cluster.
"""
OWN_LABELS = (CREATED_BY, CLUSTER, NODE_LABEL, VM_LABEL)
"""Labels that a VM on the bus can have in addition to those of its VMI."""
SEED, NO_CLOUD = "cloudinit", "cloudInitNoCloud"
_SIZE = re.compile(r"(?<![\w.])[0-9]{7,20}(?![\w.])")
BY_RULES = (".readonly", ".boot_order")
"""Endings of disk fields whose problems the rules of `core/validation` report."""
UNNAMED = "unnamed"
"""A placeholder for a name that the API server has not generated yet."""


class Translated(NamedTuple):
    """The result of a translation. `create` is None if there are `causes`.

    `whole` is the VMI with defaults.
    """

    create: VmCreate | None
    causes: tuple[Cause, ...]
    whole: Object


def defaulted_template(vm: Object) -> Object:
    """Return the VMI that a VM's template makes, with defaults and the VM's name and namespace."""
    template = part(of_vm(vm), "spec", "template")
    named = {key: text(vm, "metadata", key) for key in ("name", "namespace")}
    return of_vmi({**template, "metadata": {**part(template, "metadata"), **named}})


def field_causes(vmi: Object, prefix: str = "spec", meta: str = "metadata") -> list[Cause]:
    """Return the problems of all fields of a VMI. `prefix` and `meta` place them in a manifest."""
    walked = walk(part(vmi, "spec"), VMI, prefix)
    _finish(walked, vmi, None, prefix)
    _networks(walked, vmi, None, prefix)
    _named(walked, vmi, meta)
    walked.ours["labels"] |= dict.fromkeys(OWN_LABELS, UNNAMED)  # they count towards the limit
    return [*walked.causes, *_bounded(walked)[1], *_annotations(vmi, meta)]


def vm_field_causes(vm: Object) -> list[Cause]:
    """Return the problems of all fields of a VM and of its template."""
    return [
        *walk(part(vm, "spec"), VM, "spec").causes,
        *notes.causes(vm),
        *field_causes(defaulted_template(vm), "spec.template.spec", "spec.template.metadata"),
    ]


def translate(vmi: Object, given: Given, cluster: str, *, contents: bool = True) -> Translated:
    """Translate a VMI. `given` has the objects to which the VMI refers (`needs`, `attachments`).

    Without `contents`, the contents of Secrets and ConfigMaps are left out.
    """
    vmi = without_absent(of_vmi(vmi))
    walked = walk(part(vmi, "spec"), VMI, "spec")
    _finish(walked, vmi, given if contents else None, "spec")
    _networks(walked, vmi, given, "spec")
    _named(walked, vmi, "metadata")
    uid = text(vmi, "metadata", "uid")
    walked.put(("uid",), uid, "metadata.uid")
    walked.ours["labels"] |= {CREATED_BY: uid, CLUSTER: cluster}
    create, wrong = _bounded(walked)
    causes = (*walked.causes, *wrong, *_annotations(vmi, "metadata"))
    return Translated(None if causes else create, causes, vmi)


def _named(walked: Translation, vmi: Object, meta: str) -> None:
    for name in ("name", "namespace"):
        given = text(vmi, "metadata", name) or UNNAMED
        walked.put((name,), given, f"metadata.{name}")
    walked.put(("labels",), dict(part(vmi, "metadata", "labels")), f"{meta}.labels")
    ignition = text(vmi, "metadata", "annotations", IGNITION)
    if 0 < len(ignition) <= notes.IGNITION_CHARS:
        walked.put(("spec", "ignition", "config"), ignition, f"{meta}.annotations.{IGNITION}")


def _bounded(walked: Translation) -> tuple[VmCreate | None, tuple[Cause, ...]]:
    """Validate `walked.ours` as a VmCreate. Errors are reported under the manifest's fields.

    An error of a field is left out if this field, or a field below it, already has a cause.
    """
    try:
        create = VmCreate.model_validate(walked.ours)
    except ValidationError as error:
        reported = tuple(cause.field for cause in walked.causes)
        found = dict.fromkeys(  # messages show sizes as Kubernetes' quantities
            Cause(
                walked.where(one.path),
                _SIZE.sub(_quantity, one.message).replace("Input should", "must", 1),
            )
            for one in problems(error, model=VmCreate)
        )
    else:
        return create, tuple(_device_causes(walked, create))
    return None, tuple(
        one for one in found if not any(_is_within(field, one.field) for field in reported)
    )


def _is_within(field: str, outer: str) -> bool:
    return field.startswith(outer) and field[len(outer) :][:1] in {"", ".", "["}


def _device_causes(walked: Translation, create: VmCreate) -> Iterator[Cause]:
    """Yield the problems of disks and interfaces that no rule of KubeVirt's webhooks finds."""
    if create.spec is None:
        return
    domain = create.spec.domain
    disks, nics = dict(enumerate(domain.devices.disks)), dict(enumerate(domain.devices.interfaces))
    for one in disk_problems(disks, domain.io_threads):
        if not one.path.endswith(BY_RULES):
            yield Cause(walked.where(one.path), one.message)
    for one in nic_problems(nics, disks):
        yield Cause(walked.where(one.path), one.message)


def _quantity(found: re.Match[str]) -> str:
    size_bytes = int(found[0])
    for unit, power in (("Ti", 40), ("Gi", 30), ("Mi", 20)):
        if size_bytes % 2**power == 0:
            return f"{size_bytes >> power}{unit}"
    return found[0]


def _annotations(vmi: Object, meta: str) -> Iterator[Cause]:
    for key, value in part(vmi, "metadata", "annotations").items():
        row = ANNOTATIONS.get(key)
        if row is not None and row.verdict is Verdict.REFUSED and value != "false":
            message = f"{row.why}; {row.instead}"
            yield Cause(f"{meta}.annotations.{key}", message, Reason.NOT_SUPPORTED)
    if len(text(vmi, "metadata", "annotations", IGNITION)) > notes.IGNITION_CHARS:
        message = f"has more than {notes.IGNITION_CHARS} characters; let it load a larger file"
        yield Cause(f"{meta}.annotations.{IGNITION}", message)


# --- fields that depend on others --------------------------------------------------------------
def _finish(walked: Translation, vmi: Object, given: Given | None, prefix: str) -> None:
    """Add fields that depend on others, such as queues, node affinity, and seeds with keys.

    Without `given`, the contents of references are left out.
    """
    spec = part(vmi, "spec")
    walked.put(("spec", "run_strategy"), str(RunStrategy.ONCE), prefix)
    walked.put(("spec", "domain", "devices", "autoattach_graphics_device"), True, prefix)
    for index, disk in enumerate(items(spec, "domain", "devices", "disks")):
        if at(disk, "io") == "native":  # as in KubeVirt
            cache = ("spec", "domain", "devices", "disks", index, "cache")
            walked.put(cache, "none", f"{prefix}.domain.devices.disks[{index}].io")
    _queues(walked, spec, prefix)
    bindings.fill(walked, spec, prefix)
    for key, value in placement.selector(spec).items():
        walked.put(("spec", "node_selector", key), value, f"{prefix}.{placement.TERMS}")
    keys = fill(walked, spec, given, prefix) if given is not None else {}
    volumes = items(spec, "volumes")
    seeds = [(i, seed) for i, one in enumerate(volumes) for seed in SEEDS if at(one, seed)]
    if not seeds:
        seeds = [(len(volumes), NO_CLOUD)]
        walked.put(("spec", "volumes", len(volumes), "name"), _free(spec), prefix)
    hostname = text(spec, "hostname")
    origin = f"{prefix}.hostname" if hostname else "metadata.name"
    hostname = hostname or text(vmi, "metadata", "name") or UNNAMED
    for index, seed in seeds:
        place = ("spec", "volumes", index, SEEDS[seed])
        walked.put((*place, "hostname"), hostname, origin)
        for number, (key, field) in enumerate(keys.get(seed, ())):
            walked.put((*place, "ssh_keys", number), key, field)


def _networks(walked: Translation, vmi: Object, given: Given | None, prefix: str) -> None:
    """Add to each multus network the network of the bus that it refers to."""
    own = text(vmi, "metadata", "namespace")
    for one in attachments(part(vmi, "spec")):
        field = f"{prefix}.networks[{one.place}].multus.networkName"
        found = network_of(one, own, given, field)
        if isinstance(found, Cause):
            walked.causes.append(found)
        else:
            place = ("spec", "networks", one.place)
            walked.put((*place, "network"), found.name, field)
            if found.plugins_digest:
                walked.put((*place, "plugins_digest"), found.plugins_digest, field)


def _queues(walked: Translation, spec: Object, prefix: str) -> None:
    devices = part(spec, "domain", "devices")
    if at(devices, "networkInterfaceMultiqueue") is not True:
        return
    topology = [at(spec, "domain", "cpu", name) for name in ("sockets", "cores", "threads")]
    vcpus = math.prod(number for number in topology if type(number) is int and number > 0)
    origin = f"{prefix}.domain.devices.networkInterfaceMultiqueue"
    for index, nic in enumerate(items(devices, "interfaces")):
        if at(nic, "model") in {None, "", "virtio"}:
            queues = ("spec", "domain", "devices", "interfaces", index, "queues")
            walked.put(queues, min(vcpus, QUEUES_MAX), origin)


def _free(spec: Object) -> str:
    taken = {text(volume, "name") for volume in items(spec, "volumes")}
    return next(name for n in range(len(taken) + 1) if (name := f"{SEED}{n or ''}") not in taken)
