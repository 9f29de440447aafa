"""Checks of the rules: each yields the path of a violation and the values for its message."""
# ruff: noqa: D103  the rule of each check describes it

from collections.abc import Callable, Iterator
from decimal import Decimal

from virtbus.kubebridge.core.fields.devices import mac_address
from virtbus.kubebridge.core.objects import quantity
from virtbus.kubebridge.core.objects.metadata import RESERVED_LABELS
from virtbus.kubebridge.core.objects.plain import Object, at, items, part, text
from virtbus.kubebridge.core.translation import affinity

Found = tuple[str, tuple[str, ...]]
"""The path of a violation, and the values for the message."""
MAX_ITEMS = 256
BINDINGS = (
    *("bridge", "masquerade", "sriov", "binding", "passtBinding", "passt", "slirp", "macvtap"),
)
RESERVED_MAC = "02:00:00:00:00:00"
DISKS, NICS = "domain.devices.disks", "domain.devices.interfaces"


def _disks(spec: Object) -> list[Object]:
    return items(spec, "domain", "devices", "disks")


def _nics(spec: Object) -> list[Object]:
    return items(spec, "domain", "devices", "interfaces")


# --- a VM --------------------------------------------------------------------------------------
def no_template(spec: Object) -> Iterator[Found]:
    if at(spec, "template") is None:
        yield "template", ()


def both_strategies(spec: Object) -> Iterator[Found]:
    if at(spec, "running") is not None and at(spec, "runStrategy") is not None:
        yield "running", ()


def no_strategy(spec: Object) -> Iterator[Found]:
    if at(spec, "running") is None and at(spec, "runStrategy") is None:
        yield "running", ()


# --- sizes -------------------------------------------------------------------------------------
def _amount(spec: Object, *path: str) -> Decimal | None:
    try:
        return quantity.parse(at(spec, *path))
    except ValueError:  # absent, or reported by the field's row
        return None


def no_memory(spec: Object) -> Iterator[Found]:
    if at(spec, "domain", "memory", "guest") is None:
        yield "domain.memory.guest", ()


def _over(spec: Object, what: tuple[str, ...], resource: str) -> Iterator[Found]:
    asked = _amount(spec, *what)
    limit = _amount(spec, "domain", "resources", "limits", resource)
    if asked is not None and limit is not None and asked > limit:
        yield ".".join(what), (str(at(spec, *what)),)


def memory_over_limit(spec: Object) -> Iterator[Found]:
    return _over(spec, ("domain", "resources", "requests", "memory"), "memory")


def cpu_over_limit(spec: Object) -> Iterator[Found]:
    return _over(spec, ("domain", "resources", "requests", "cpu"), "cpu")


def too_many(*path: str) -> Callable[[Object], Iterator[Found]]:
    """Make the check of the length of one list."""

    def check(spec: Object) -> Iterator[Found]:
        if len(items(spec, *path)) > MAX_ITEMS:
            yield ".".join(path), (path[-1],)

    return check


# --- names -------------------------------------------------------------------------------------
def names_twice(*path: str) -> Callable[[Object], Iterator[Found]]:
    """Make the check for duplicate names in one list."""

    def check(spec: Object) -> Iterator[Found]:
        seen: set[str] = set()
        for index, one in enumerate(items(spec, *path)):
            name = text(one, "name")
            if name and name in seen:
                yield f"{'.'.join(path)}[{index}].name", (name,)
            seen.add(name)

    return check


def _unpartnered(spec: Object, mine: tuple[str, ...], partners: tuple[str, ...]) -> Iterator[Found]:
    names = {text(one, "name") for one in items(spec, *partners)}
    for index, one in enumerate(items(spec, *mine)):
        name = text(one, "name")
        if name and name not in names:
            yield f"{'.'.join(mine)}[{index}].name", (name,)


def without_volume(spec: Object) -> Iterator[Found]:
    """Find disks without a volume. A CD-ROM drive may be empty."""
    names = {text(one, "name") for one in items(spec, "volumes")}
    for index, disk in enumerate(_disks(spec)):
        name = text(disk, "name")
        if name and name not in names and at(disk, "cdrom") is None:
            yield f"{DISKS}[{index}].name", (name,)


def interfaces_without_network(spec: Object) -> Iterator[Found]:
    return _unpartnered(spec, ("domain", "devices", "interfaces"), ("networks",))


def networks_without_interface(spec: Object) -> Iterator[Found]:
    return _unpartnered(spec, ("networks",), ("domain", "devices", "interfaces"))


# --- disks and volumes -------------------------------------------------------------------------
def sources_of_volume(spec: Object) -> Iterator[Found]:
    for index, volume in enumerate(items(spec, "volumes")):
        sources = [key for key, value in volume.items() if key != "name" and value is not None]
        if len(sources) != 1:
            yield f"volumes[{index}]", (", ".join(sources) or "none",)


def device_types(spec: Object) -> Iterator[Found]:
    for index, disk in enumerate(_disks(spec)):
        kinds = [kind for kind in ("disk", "cdrom", "lun") if at(disk, kind) is not None]
        if len(kinds) > 1:
            yield f"{DISKS}[{index}]", (", ".join(kinds),)


def virtio_cdrom(spec: Object) -> Iterator[Found]:
    for index, disk in enumerate(_disks(spec)):
        if text(disk, "cdrom", "bus") == "virtio":
            yield f"{DISKS}[{index}].cdrom.bus", ("virtio",)


def readonly_sata(spec: Object) -> Iterator[Found]:
    for index, disk in enumerate(_disks(spec)):
        device = part(disk, "disk")
        if device.get("bus") == "sata" and device.get("readonly") is True:
            yield f"{DISKS}[{index}].disk.readonly", ()


def boot_orders(spec: Object) -> Iterator[Found]:
    seen: set[int] = set()
    for index, disk in enumerate(_disks(spec)):
        order = at(disk, "bootOrder")
        if not isinstance(order, int) or isinstance(order, bool):
            continue
        if order < 1 or order in seen:
            yield f"{DISKS}[{index}].bootOrder", (str(order),)
        seen.add(order)


# --- networks ----------------------------------------------------------------------------------
def bindings(spec: Object) -> Iterator[Found]:
    for index, nic in enumerate(_nics(spec)):
        if sum(at(nic, binding) is not None for binding in BINDINGS) != 1:
            yield f"{NICS}[{index}]", (text(nic, "name"),)


def masquerade_off_pod(spec: Object) -> Iterator[Found]:
    pods = {text(net, "name") for net in items(spec, "networks") if at(net, "pod") is not None}
    for index, nic in enumerate(_nics(spec)):
        if at(nic, "masquerade") is not None and text(nic, "name") not in pods:
            yield f"{NICS}[{index}].name", ()


def reserved_mac(spec: Object) -> Iterator[Found]:
    for index, nic in enumerate(_nics(spec)):
        if (
            mac_address(text(nic, "macAddress")) == RESERVED_MAC
            and at(nic, "masquerade") is not None
        ):
            yield f"{NICS}[{index}].macAddress", ()


def pod_networks(spec: Object) -> Iterator[Found]:
    pods = [i for i, net in enumerate(items(spec, "networks")) if at(net, "pod") is not None]
    for index in pods[1:]:
        yield f"networks[{index}].pod", ()


def network_kinds(spec: Object) -> Iterator[Found]:
    for index, net in enumerate(items(spec, "networks")):
        kinds = [kind for kind in ("pod", "multus", "resourceClaim") if at(net, kind) is not None]
        if len(kinds) != 1:
            yield f"networks[{index}]", (", ".join(kinds) or "none",)


# --- nodes -------------------------------------------------------------------------------------
def affinity_terms(spec: Object) -> Iterator[Found]:
    if len(affinity.terms(spec)) > 1:
        yield ".".join(affinity.TERMS), ()


def affinity_values(spec: Object) -> Iterator[Found]:
    for path, one in affinity.expressions(spec):
        if affinity.value_of(one) is None:
            yield f"{path}.values", ()


def contradictions(spec: Object) -> Iterator[Found]:
    selector = part(spec, "nodeSelector")
    wanted = {key: {value} for key, value in selector.items() if isinstance(value, str)}
    for path, one in affinity.expressions(spec):
        value = affinity.value_of(one)
        if value is not None and value not in wanted.setdefault(text(one, "key"), {value}):
            yield f"{path}.values", (text(one, "key"),)


# --- metadata ----------------------------------------------------------------------------------
def reserved_labels(vmi: Object) -> Iterator[Found]:
    found = sorted(set(part(vmi, "metadata", "labels")) & set(RESERVED_LABELS))
    if found:
        yield "metadata.labels", (", ".join(found),)
