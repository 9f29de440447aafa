"""A VMI as the VM of virtbus that its guest is: `vm.create`, by the table of fields.

A VMI is one run of a guest, so its VM runs once; what comes after an end is the VM controller's
(`vm_rules`). Its uid is the VM's: a create that is repeated finds what it made.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from pydantic import ValidationError

from virtbus.kubebridge.core import affinity, notes
from virtbus.kubebridge.core.causes import Cause, Reason
from virtbus.kubebridge.core.defaults import of_vm, of_vmi
from virtbus.kubebridge.core.fields.row import Verdict
from virtbus.kubebridge.core.fields.table import ANNOTATIONS, VM, VMI
from virtbus.kubebridge.core.given import fill
from virtbus.kubebridge.core.metadata import NODE_LABEL, VM_LABEL
from virtbus.kubebridge.core.needs import SEEDS, Given
from virtbus.kubebridge.core.plain import Object, at, items, part, text
from virtbus.kubebridge.core.walk import Walked, walk
from virtbus.schemas.api import VmCreate
from virtbus.schemas.vm import RunStrategy
from virtbus.schemas.wire import problems

CREATED_BY = "kubevirt.io/created-by"
"""The VMI's uid, as KubeVirt labels what it makes for one."""
CLUSTER = "virtbus.io/cluster"
"""Which cluster's bridge made a VM: none touches another's, nor what others made."""
OWN_LABELS = (CREATED_BY, CLUSTER, NODE_LABEL, VM_LABEL)
"""Those that a VM of virtbus has beside the VMI's own, sooner or later."""
SEED, NO_CLOUD = "cloudinit", "cloudInitNoCloud"
_SIZE = re.compile(r"(?<![\w.])[0-9]{7,20}(?![\w.])")
UNNAMED = "unnamed"
"""In place of a name that the API server is still to generate."""


class Translated(NamedTuple):
    """`create` is None where `causes` say why."""

    create: VmCreate | None
    causes: tuple[Cause, ...]

    @property
    def waits(self) -> bool:
        """True where nothing is wrong but that something does not exist yet."""
        return bool(self.causes) and all(one.reason is Reason.NOT_FOUND for one in self.causes)


def defaulted_template(vm: Object) -> Object:
    """The VMI that a VM's template makes, as far as its fields go."""
    template = part(of_vm(vm), "spec", "template")
    named = {key: text(vm, "metadata", key) for key in ("name", "namespace")}
    return of_vmi({**template, "metadata": {**part(template, "metadata"), **named}})


def field_causes(vmi: Object, prefix: str = "spec", meta: str = "metadata") -> list[Cause]:
    """All that the fields of a VMI, or of a VM's template, say that virtbus cannot do."""
    walked = walk(part(vmi, "spec"), VMI, prefix)
    _finish(walked, vmi, None, prefix)
    _named(walked, vmi, meta)
    walked.ours["labels"] |= dict.fromkeys(OWN_LABELS, UNNAMED)  # there is room for them, too
    return [*walked.causes, *_bounded(walked)[1], *_annotations(vmi, meta)]


def vm_field_causes(vm: Object) -> list[Cause]:
    """The same of a VM: its own fields, and its template's."""
    return [
        *walk(part(vm, "spec"), VM, "spec").causes,
        *notes.causes(vm),
        *field_causes(defaulted_template(vm), "spec.template.spec", "spec.template.metadata"),
    ]


def translate(vmi: Object, given: Given, cluster: str) -> Translated:
    """The VM to create for a VMI whose `needs` were read."""
    vmi = of_vmi(vmi)
    walked = walk(part(vmi, "spec"), VMI, "spec")
    _finish(walked, vmi, given, "spec")
    _named(walked, vmi, "metadata")
    uid = text(vmi, "metadata", "uid")
    walked.put(("uid",), uid, "metadata.uid")
    walked.ours["labels"] |= {CREATED_BY: uid, CLUSTER: cluster}
    create, wrong = _bounded(walked)
    causes = (*walked.causes, *wrong, *_annotations(vmi, "metadata"))
    return Translated(None if causes else create, causes)


def _named(walked: Walked, vmi: Object, meta: str) -> None:
    for name in ("name", "namespace"):
        given = text(vmi, "metadata", name) or UNNAMED
        walked.put((name,), given, f"metadata.{name}")
    walked.put(("labels",), dict(part(vmi, "metadata", "labels")), f"{meta}.labels")


def _bounded(walked: Walked) -> tuple[VmCreate | None, tuple[Cause, ...]]:
    """Our model, or what it refuses under the fields of theirs that it came from.

    What is missing of ours because theirs was refused is no problem of its own.
    """
    try:
        return VmCreate.model_validate(walked.ours), ()
    except ValidationError as error:
        told = tuple(cause.field for cause in walked.causes)
        found = [
            Cause(walked.where(one.path), _plain(one.message))
            for one in problems(error, model=VmCreate)
        ]
    own = dict.fromkeys(found)
    return None, tuple(one for one in own if not any(field.startswith(one.field) for field in told))


def _plain(message: str) -> str:
    """A message of our models in Kubernetes' terms: sizes are quantities."""
    return _SIZE.sub(_quantity, message).replace("Input should", "must", 1)


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


# --- what is not one field's matter ------------------------------------------------------------
def _finish(walked: Walked, vmi: Object, given: Given | None, prefix: str) -> None:
    """Nodes by affinity; seeds with host name and secrets, which `given` None leaves out."""
    spec = part(vmi, "spec")
    walked.put(("spec", "run_strategy"), str(RunStrategy.ONCE), prefix)
    walked.put(("spec", "domain", "devices", "autoattach_graphics_device"), True, prefix)
    for key, value in affinity.selector(spec).items():
        walked.put(("spec", "node_selector", key), value, f"{prefix}.{'.'.join(affinity.TERMS)}")
    keys = fill(walked, spec, given, prefix) if given is not None else {}
    volumes = items(spec, "volumes")
    seeds = [(i, seed) for i, one in enumerate(volumes) for seed in SEEDS if at(one, seed)]
    if not seeds:
        seeds = [(len(volumes), NO_CLOUD)]
        walked.put(("spec", "volumes", len(volumes), "name"), _free(spec), prefix)
    hostname = text(spec, "hostname")
    told = f"{prefix}.hostname" if hostname else "metadata.name"
    hostname = hostname or text(vmi, "metadata", "name") or UNNAMED
    for index, seed in seeds:
        place = ("spec", "volumes", index, SEEDS[seed])
        walked.put((*place, "hostname"), hostname, told)
        for number, (key, origin) in enumerate(keys.get(seed, ())):
            walked.put((*place, "ssh_keys", number), key, origin)


def _free(spec: Object) -> str:
    """A name for a seed that the manifest does not name."""
    taken = {text(volume, "name") for volume in items(spec, "volumes")}
    return next(name for n in range(len(taken) + 1) if (name := f"{SEED}{n or ''}") not in taken)
