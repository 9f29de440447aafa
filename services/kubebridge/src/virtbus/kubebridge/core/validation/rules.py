"""Rules between fields, as in KubeVirt's validating webhooks.

A rule about a single field is in the table of fields (`core/fields`). `number` is virtbus's number
of a rule of KubeVirt's webhooks; rules of virtbus itself have 0. `cel` marks rules that the CEL of
a CRD can check. The rules expect objects with filled-in defaults.
"""

from collections.abc import Iterator
from typing import NamedTuple

from virtbus.kubebridge.core.fields.placement import TERMS, terms
from virtbus.kubebridge.core.objects.status_errors import Cause, Reason
from virtbus.kubebridge.core.objects.unstructured import Object, at, items, part, text
from virtbus.kubebridge.core.translation import mapping
from virtbus.kubebridge.core.translation.contents import SEEDS
from virtbus.kubebridge.core.translation.defaults import of_vmi
from virtbus.kubebridge.core.validation import rules_checks as checks
from virtbus.kubebridge.core.validation.rules_checks import (
    DISKS,
    NICS,
    Check,
    given,
    names_twice,
    other_than_one,
    over_limit,
    too_many,
    unpartnered,
    when,
)


class Rule(NamedTuple):
    """A rule about an object. Paths of violations are relative to the checked object.

    By default, the checked object is the spec. With `of`, it is each item of a list (`volumes[]`),
    or this field of each item (`volumes[].secret`).
    """

    number: int
    field: str
    message: str
    check: Check
    reason: Reason = Reason.INVALID
    cel: bool = True
    of: str = ""


NAMELESS = "must be the name of the object whose keys are the files"
TWICE = "{} is used twice; give each a name of its own"
HOST_DISK = "volumes[].hostDisk"
REQUIRED, DUPLICATE, UNSUPPORTED = Reason.REQUIRED, Reason.DUPLICATE, Reason.NOT_SUPPORTED

VM_RULES = (
    Rule(
        1,
        "template",
        "missing virtual machine template.",
        lambda spec: when(not given(spec, "template"), "template"),
        REQUIRED,
    ),
    Rule(
        2,
        "running",
        "Running and RunStrategy are mutually exclusive. Note that Running is deprecated, please"
        " use RunStrategy instead",
        lambda spec: when(len(given(spec, "running", "runStrategy")) > 1, "running"),
    ),
    Rule(
        3,
        "running",
        "RunStrategy must be specified",
        lambda spec: when(not given(spec, "running", "runStrategy"), "running"),
        REQUIRED,
    ),
)
"""Rules below a VM's `spec`."""

CROWD = "{} list exceeds the 256 element limit in length"
CROWD_RULES = tuple(
    Rule(48, path, CROWD, too_many(path)) for path in ("volumes", "networks", DISKS, NICS)
)
"""Rules below a VMI's spec that bound its lists. If one is broken, no other rule is checked. This
bounds the cost of an object."""


_OF_SEEDS = (
    (64, "must have only one {} source set", checks.data_twice, Reason.INVALID),
    (
        65,
        "must have at least one userdatasource or one networkdatasource set.",
        checks.no_data,
        REQUIRED,
    ),
    (
        66,
        "{} exceeds 2048 byte limit; put it into a Secret, and name that in {}",
        checks.inline_size,
        Reason.INVALID,
    ),
)
"""The rules of each kind of seed: number, message, check and reason."""

SPEC_RULES = (
    Rule(
        20,
        "domain.resources.requests.memory",
        "{} is greater than domain.resources.limits.memory",
        over_limit("memory"),
    ),
    Rule(
        26,
        "domain.resources.requests.cpu",
        "{} is greater than domain.resources.limits.cpu",
        over_limit("cpu"),
    ),
    Rule(46, "volumes[].name", TWICE, names_twice("volumes"), DUPLICATE),
    Rule(
        47,
        "volumes[]",
        "must have exactly one source type set; it has {}",
        lambda one: other_than_one(given(one, *(name for name in one if name != "name"))),
        of="volumes[]",
    ),
    Rule(
        50,
        f"{DISKS}[].name",
        "no volume is named {}; add one to volumes, or remove the disk",
        unpartnered(DISKS, "volumes", besides="cdrom"),
        cel=False,
    ),
    Rule(51, f"{DISKS}[].name", TWICE, names_twice(DISKS), DUPLICATE),
    Rule(
        52,
        f"{DISKS}[]",
        "must have only one device type; it has {}",
        checks.device_types,
        of=f"{DISKS}[]",
    ),
    Rule(
        55,
        f"{DISKS}[].cdrom.bus",
        "Bus type {} is not supported for a CD-ROM; write sata or scsi",
        lambda disk: when(text(disk, "cdrom", "bus") == "virtio", ".cdrom.bus", "virtio"),
        of=f"{DISKS}[]",
    ),
    Rule(
        56,
        f"{DISKS}[].disk.readonly",
        "a SATA disk cannot be read-only; write bus: virtio or scsi, or make it a cdrom",
        checks.readonly_sata,
        of=f"{DISKS}[]",
    ),
    Rule(
        58,
        f"{DISKS}[].bootOrder",
        "{}: orders begin with 1, and each is given once",
        checks.boot_orders,
    ),
    *(
        Rule(number, f"volumes[].{seed}", message, check, reason, of=f"volumes[].{seed}")
        for seed in SEEDS
        for number, message, check, reason in _OF_SEEDS
    ),
    *(
        Rule(
            70,
            f"volumes[].{kind}.{name}",
            NAMELESS,
            checks.unnamed(name),
            REQUIRED,
            of=f"volumes[].{kind}",
        )
        for kind, name in (("configMap", "name"), ("secret", "secretName"))
    ),
    Rule(
        70,
        "volumes[].sysprep",
        "must name a configMap or a secret, and not both; it has {}",
        checks.answers,
        of="volumes[].sysprep",
    ),
    Rule(
        73,
        "networks[].name",
        "no interface is named {}; add one to domain.devices.interfaces",
        unpartnered("networks", NICS),
        cel=False,
    ),
    Rule(
        73,
        f"{NICS}[].name",
        "no network is named {}; add one to networks",
        unpartnered(NICS, "networks"),
        cel=False,
    ),
    Rule(74, "networks[].name", TWICE, names_twice("networks"), DUPLICATE),
    Rule(
        75,
        f"{NICS}[].name",
        "Only one interface can be connected to one specific network; {} has two",
        names_twice(NICS),
        DUPLICATE,
    ),
    Rule(
        76,
        f"{NICS}[]",
        "logical {} interface must have exactly one binding method; write bridge: {{}} or"
        " masquerade: {{}}",
        lambda nic: when(len(given(nic, *checks.BINDINGS)) != 1, "", text(nic, "name")),
        of=f"{NICS}[]",
    ),
    Rule(
        77,
        f"{NICS}[].name",
        "Masquerade interface only implemented with pod network",
        checks.masquerade_off_pod,
        cel=False,
    ),
    Rule(
        79,
        f"{NICS}[].macAddress",
        "The requested MAC address is reserved for the in-pod bridge. Please choose another one.",
        checks.reserved_mac,
        of=f"{NICS}[]",
    ),
    Rule(
        81,
        "networks[].pod",
        "more than one interface is connected to a pod network",
        checks.pod_networks,
        DUPLICATE,
    ),
    Rule(
        81,
        "networks[]",
        "should have exactly one network type; it has {}",
        lambda net: other_than_one(given(net, "pod", "multus", "resourceClaim")),
        of="networks[]",
    ),
    Rule(
        95,
        "accessCredentials[].sshPublicKey.propagationMethod",
        "requires a {} volume to exist when {} is in use",
        checks.keys_without_seed,
    ),
    Rule(
        95,
        "accessCredentials[].sshPublicKey",
        "must have exactly one propagationMethod; it has {}",
        checks.ways_of_keys,
        of="accessCredentials[].sshPublicKey",
    ),
    Rule(
        95,
        "accessCredentials[]",
        "must have exactly one of sshPublicKey and userPassword; it has {}",
        lambda one: other_than_one(given(one, "sshPublicKey", "userPassword"), " and "),
        cel=False,
        of="accessCredentials[]",
    ),
    Rule(
        95,
        "accessCredentials[].sshPublicKey.source",
        "must name the secret with the keys in secret.secretName",
        checks.unnamed("source", "secret", "secretName"),
        REQUIRED,
        cel=False,
        of="accessCredentials[].sshPublicKey",
    ),
    Rule(
        0,
        TERMS,
        "a node is chosen by one term; write one, or nodeSelector",
        lambda spec: when(len(terms(spec)) > 1, TERMS),
        cel=False,
    ),
    Rule(
        0,
        f"{TERMS}[].matchExpressions[].values",
        "must have one value; give the nodes a label that they share, and ask for that",
        checks.affinity_values,
        cel=False,
    ),
    Rule(
        0,
        "nodeSelector",
        "no node has two values of the label {}; ask for one",
        checks.contradictions,
        cel=False,
    ),
    Rule(
        0,
        TERMS.rpartition(".")[0],
        "must have at least one node selector term",
        checks.no_terms,
        REQUIRED,
        cel=False,
    ),
    Rule(68, HOST_DISK, "{}", checks.host_disk, cel=False, of=HOST_DISK),
    Rule(0, "tolerations[]", "{}", checks.toleration, cel=False, of="tolerations[]"),
    Rule(0, "affinity", "{}", checks.preferred, cel=False),
    Rule(0, f"{NICS}[].ports[]", "{}", checks.ports, cel=False, of=f"{NICS}[]"),
)
"""Rules below a VMI's `spec`, or below a VM's `spec.template.spec`."""

RUN_RULES = (
    Rule(
        17,
        "domain.memory.guest",
        "no memory requested, at least one of domain.resources.requests.memory and"
        " domain.memory.guest must be set",
        lambda spec: when(
            not given(part(spec, "domain", "memory"), "guest"), "domain.memory.guest"
        ),
        REQUIRED,
    ),
)
"""Rules below a VMI's `spec`. They do not apply to VM templates, which may be incomplete."""

VMI_RULES = (
    Rule(
        99,
        "metadata.labels",
        "creation of the following reserved kubevirt.io/ labels on a VMI object is prohibited: {}",
        checks.reserved_labels,
        UNSUPPORTED,
        cel=False,
    ),
)
"""Rules for a VMI that a user creates. Paths begin at the object, not at its spec."""


def vm_causes(vm: Object) -> list[Cause]:
    """Return all problems of a VM as a user sends it, each problem once."""
    spec = part(vm, "spec")
    found = list(_broken(VM_RULES, spec, "spec"))
    crowds = _broken(CROWD_RULES, part(spec, "template", "spec"), "spec.template.spec")
    if crowded := list(crowds):
        return [*found, *crowded]
    if at(spec, "template") is not None:
        template = part(mapping.defaulted_template(vm), "spec")
        found += _broken(SPEC_RULES, template, "spec.template.spec")
        found += mapping.vm_field_causes(vm)
    return _once(found)


def between_fields(vmi: Object) -> list[Cause]:
    """Return the violations of rules in a VMI with defaults."""
    return list(_broken((*RUN_RULES, *SPEC_RULES), part(vmi, "spec"), "spec"))


def vmi_causes(vmi: Object) -> list[Cause]:
    """Return all problems of a VMI as a user sends it, each problem once."""
    if crowded := list(_broken(CROWD_RULES, part(vmi, "spec"), "spec")):
        return crowded
    whole = of_vmi(vmi)
    return _once([*between_fields(whole), *mapping.field_causes(whole)])


def foreign_vmi_causes(vmi: Object) -> list[Cause]:
    """Return the additional problems of a VMI that the bridge did not create."""
    return list(_broken(VMI_RULES, vmi, ""))


def _broken(rules: tuple[Rule, ...], value: Object, prefix: str) -> Iterator[Cause]:
    for rule in rules:
        for place, one in _checked(value, rule.of):
            for field, *shown in rule.check(one):
                path = ".".join(name for name in (prefix, place + field) if name)
                yield Cause(path, rule.message.format(*shown), rule.reason)


def _checked(value: Object, of: str) -> Iterator[tuple[str, Object]]:
    if not of:
        yield "", value
        return
    path, _, name = of.partition("[]")
    for index, item in enumerate(items(value, *path.split("."))):
        if not name:
            yield f"{path}[{index}]", item
        elif at(item, name[1:]) is not None:
            yield f"{path}[{index}]{name}", part(item, name[1:])


def _once(causes: list[Cause]) -> list[Cause]:
    """Remove duplicates. A rule and the table of fields may find the same problem."""
    first = {(cause.field, cause.message): cause for cause in reversed(causes)}
    return [cause for cause in causes if first[cause.field, cause.message] is cause]
