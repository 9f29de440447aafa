"""Checks of the rules between fields (`rules.py`).

Each check returns its violations: a path, and the values for the message.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal

from virtbus.kubebridge.core.fields import placement
from virtbus.kubebridge.core.fields.devices import mac_address
from virtbus.kubebridge.core.objects import quantity
from virtbus.kubebridge.core.objects.metadata import RESERVED_LABELS
from virtbus.kubebridge.core.objects.unstructured import Object, at, items, part, text

Found = tuple[str, ...]
"""The path of a violation, followed by the values for the message."""
Check = Callable[[Object], Iterable[Found]]
"""Returns the violations in an object. Paths begin at the object."""
MAX_ITEMS = 256
BINDINGS = (
    *("bridge", "masquerade", "sriov", "binding", "passtBinding", "passt", "slirp", "macvtap"),
)
RESERVED_MAC = "02:00:00:00:00:00"
DISKS, NICS = "domain.devices.disks", "domain.devices.interfaces"
REQUESTS, LIMITS = "domain.resources.requests", "domain.resources.limits"


def when(violated: object, *found: str) -> list[Found]:
    """Return the violation `found` if the condition is true."""
    return [found] if violated else []


def listed(spec: Object, path: str) -> list[Object]:
    """Return the list at a dotted path."""
    return items(spec, *path.split("."))


def given(one: Object, *names: str) -> list[str]:
    """Return those of `names` that the object has."""
    return [name for name in names if at(one, name) is not None]


def other_than_one(names: list[str], separator: str = ", ") -> list[Found]:
    """Return a violation of the item itself if the number of `names` is not one."""
    return when(len(names) != 1, "", separator.join(names) or "none")


def amount(spec: Object, path: str) -> Decimal | None:
    """Return a quantity. An absent or invalid quantity is None; another check reports the error."""
    try:
        return quantity.parse(at(spec, *path.split(".")))
    except ValueError:
        return None


def over_limit(resource: str) -> Check:
    """Find a request that is greater than its limit."""

    def check(spec: Object) -> list[Found]:
        path = f"{REQUESTS}.{resource}"
        asked, limit = amount(spec, path), amount(spec, f"{LIMITS}.{resource}")
        over = asked is not None and limit is not None and asked > limit
        return when(over, path, str(at(spec, *path.split("."))))

    return check


def too_many(path: str) -> Check:
    """Find a list with too many items."""
    return lambda spec: when(len(listed(spec, path)) > MAX_ITEMS, path, path.rpartition(".")[2])


# --- names -------------------------------------------------------------------------------------
def unnamed(*path: str) -> Check:
    """Find an object without a name at the path."""
    return lambda one: when(not text(one, *path), f".{path[0]}")


def names_twice(path: str) -> Check:
    """Find duplicate names in a list."""

    def check(spec: Object) -> list[Found]:
        names = [(index, text(one, "name")) for index, one in enumerate(listed(spec, path))]
        first = {name: index for index, name in reversed(names)}
        return [(f"{path}[{i}].name", name) for i, name in names if name and first[name] < i]

    return check


def unpartnered(path: str, partners: str, besides: str = "") -> Check:
    """Find items of `path` without an item of the same name in `partners`.

    Items with the field `besides` are exempt.
    """

    def check(spec: Object) -> Iterator[Found]:
        names = {"", *(text(one, "name") for one in listed(spec, partners))}
        for index, one in enumerate(listed(spec, path)):
            name, free = text(one, "name"), bool(besides) and at(one, besides) is not None
            if name not in names and not free:
                yield f"{path}[{index}].name", name

    return check


# --- devices -----------------------------------------------------------------------------------
def device_types(disk: Object) -> list[Found]:
    """Find a disk with more than one type."""
    kinds = given(disk, "disk", "cdrom", "lun")
    return when(len(kinds) > 1, "", ", ".join(kinds))


def readonly_sata(disk: Object) -> list[Found]:
    """Find a read-only disk on the SATA bus. This bus has only writable disks."""
    sata, readonly = at(disk, "disk", "bus") == "sata", at(disk, "disk", "readonly") is True
    return when(sata and readonly, ".disk.readonly")


def boot_orders(spec: Object) -> list[Found]:
    """Find boot orders below 1, and boot orders that an earlier disk already has."""
    orders = [(index, at(disk, "bootOrder")) for index, disk in enumerate(listed(spec, DISKS))]
    numbers = [(index, order) for index, order in orders if type(order) is int]
    first = {order: index for index, order in reversed(numbers)}
    wrong = [(i, order) for i, order in numbers if order < 1 or first[order] < i]
    return [(f"{DISKS}[{index}].bootOrder", str(order)) for index, order in wrong]


def masquerade_off_pod(spec: Object) -> list[Found]:
    """Find interfaces with masquerade outside of the pod network."""
    pods = {text(net, "name") for net in items(spec, "networks") if at(net, "pod") is not None}
    return [
        (f"{NICS}[{index}].name",)
        for index, nic in enumerate(listed(spec, NICS))
        if at(nic, "masquerade") is not None and text(nic, "name") not in pods
    ]


def reserved_mac(nic: Object) -> list[Found]:
    """Find an interface with masquerade whose MAC address is reserved for its gateway."""
    reserved = mac_address(text(nic, "macAddress")) == RESERVED_MAC
    return when(reserved and at(nic, "masquerade") is not None, ".macAddress")


def pod_networks(spec: Object) -> list[Found]:
    """Find the second and each further pod network."""
    pods = [i for i, net in enumerate(items(spec, "networks")) if at(net, "pod") is not None]
    return [(f"networks[{index}].pod",) for index in pods[1:]]


# --- nodes -------------------------------------------------------------------------------------
def affinity_values(spec: Object) -> list[Found]:
    """Find node affinity expressions that do not have exactly one value."""
    found = placement.expressions(spec)
    return [(f"{path}.values",) for path, one in found if placement.value_of(one) is None]


def no_terms(spec: Object) -> list[Found]:
    """Find required node affinity without a term."""
    affinity = part(spec, "affinity", "nodeAffinity")
    required = given(affinity, placement.REQUIRED)
    return when(required and not at(spec, *placement.TERMS.split(".")), placement.TERMS)


def contradictions(spec: Object) -> Iterator[Found]:
    """Find expressions that require a second value of the same label."""
    selector = part(spec, "nodeSelector")
    wanted = {key: {value} for key, value in selector.items() if isinstance(value, str)}
    for path, one in placement.expressions(spec):
        value = placement.value_of(one)
        if value is not None and value not in wanted.setdefault(text(one, "key"), {value}):
            yield f"{path}.values", text(one, "key")


# --- metadata ----------------------------------------------------------------------------------
def reserved_labels(vmi: Object) -> list[Found]:
    """Find labels that only the bridge may set."""
    found = sorted(set(part(vmi, "metadata", "labels")) & set(RESERVED_LABELS))
    return when(found, "metadata.labels", ", ".join(found))


INLINE_BYTES = 2048
_DATA = {
    "userdata": ("userData", "userDataBase64", "secretRef"),
    "networkdata": ("networkData", "networkDataBase64", "networkDataSecretRef"),
}
_OF_WAYS = {"noCloud": "cloudInitNoCloud", "configDrive": "cloudInitConfigDrive"}
"""The kind of seed that carries the SSH keys, for each propagation method."""


def data_twice(seed: Object) -> list[Found]:
    """Find user data or network data from several sources."""
    counts = {kind: sum(bool(at(seed, one)) for one in fields) for kind, fields in _DATA.items()}
    return [("", kind) for kind, count in counts.items() if count > 1]


def no_data(seed: Object) -> list[Found]:
    """Find a seed without user data and network data."""
    return when(not any(at(seed, one) for fields in _DATA.values() for one in fields), "")


def inline_size(seed: Object) -> list[Found]:
    """Find data that is too large for the manifest."""
    return [
        ("", kind, ref)
        for kind, (inline, encoded, ref) in _DATA.items()
        if len(text(seed, inline).encode()) > INLINE_BYTES
        or _decoded_bytes(text(seed, encoded)) > INLINE_BYTES
    ]


def _decoded_bytes(encoded: str) -> int:
    """Return the length of Base64 text when decoded. Line breaks and padding do not count."""
    digits = encoded.replace("\n", "").replace("\r", "").rstrip("=")
    return len(digits) * 3 // 4


def answers(sysprep: Object) -> list[Found]:
    """Find a sysprep volume without exactly one source."""
    named = [kind for kind in ("configMap", "secret") if text(sysprep, kind, "name")]
    return other_than_one(named, " and ")


def ways_of_keys(keys: Object) -> list[Found]:
    """Find SSH keys without exactly one propagation method."""
    ways = part(keys, "propagationMethod")
    found = other_than_one(given(ways, *ways), " and ")
    return [(".propagationMethod", *shown) for _, *shown in found]


def keys_without_seed(spec: Object) -> Iterator[Found]:
    """Find SSH keys for a kind of seed that no volume has."""
    volumes = items(spec, "volumes")
    seeds = {seed for volume in volumes for seed in given(volume, *_OF_WAYS.values())}
    for index, credential in enumerate(items(spec, "accessCredentials")):
        for way in given(part(credential, "sshPublicKey", "propagationMethod"), *_OF_WAYS):
            if _OF_WAYS[way] not in seeds:
                path = f"accessCredentials[{index}].sshPublicKey.propagationMethod"
                yield path, _OF_WAYS[way], way


# --- ignored fields ----------------------------------------------------------------------------
# virtbus ignores these fields, but refuses what KubeVirt refuses. Such a manifest would fail when
# it is moved to a KubeVirt cluster.
EFFECTS = ("", "NoSchedule", "PreferNoSchedule", "NoExecute")
VALUES_OF = {
    "In": True,
    "NotIn": True,
    "Exists": False,
    "DoesNotExist": False,
    "Gt": True,
    "Lt": True,
}
"""Operators of a node selector. True means that the operator needs values."""
WEIGHTS, PORTS = range(1, 101), range(1, 65536)
_PREFIX = r"([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?"
_KEY = re.compile(rf"{_PREFIX}[A-Za-z0-9]([A-Za-z0-9._-]{{0,61}}[A-Za-z0-9])?")
"""A qualified name (apimachinery, validation.IsQualifiedName)."""


def toleration(one: Object) -> Iterator[Found]:
    """Find problems of a toleration."""
    key, operator = text(one, "key"), text(one, "operator") or "Equal"
    if key and _KEY.fullmatch(key) is None:
        yield ".key", "must be the key of a taint, such as example.com/dedicated"
    if operator not in {"Exists", "Equal"}:
        yield ".operator", "must be Exists or Equal"
    elif not key and operator != "Exists":
        yield ".operator", "must be Exists where key is empty"
    elif operator == "Exists" and text(one, "value"):
        yield ".value", "must be empty where operator is Exists"
    if text(one, "effect") not in EFFECTS:
        yield ".effect", "must be NoSchedule, PreferNoSchedule or NoExecute"
    if at(one, "tolerationSeconds") is not None and text(one, "effect") != "NoExecute":
        yield ".effect", "must be NoExecute where tolerationSeconds is set"


def preferred(spec: Object) -> Iterator[Found]:
    """Find problems of the weights and terms of preferred nodes and pods."""
    for kind, inner, check in _PREFERENCES:
        path = f"affinity.{kind}.{placement.PREFERRED}"
        for index, one in enumerate(listed(spec, path)):
            if at(one, "weight") not in WEIGHTS:
                yield f"{path}[{index}].weight", "must be 1 to 100"
            for below, why in check(part(one, inner)):
                yield f"{path}[{index}].{inner}{below}", why


def _preference(term: Object) -> Iterator[tuple[str, str]]:
    for field in ("matchExpressions", "matchFields"):
        for index, one in enumerate(items(term, field)):
            yield from ((f".{field}[{index}]{below}", why) for below, why in _expression(one))


def _expression(one: Object) -> Iterator[tuple[str, str]]:
    operator, values = text(one, "operator"), at(one, "values")
    values = values if isinstance(values, list) else []
    if _KEY.fullmatch(text(one, "key")) is None:
        yield ".key", "must be the key of a label, such as topology.kubernetes.io/zone"
    if operator not in VALUES_OF:
        yield ".operator", f"must be one of {', '.join(VALUES_OF)}"
    elif VALUES_OF[operator] != bool(values):
        wanted = "must be given" if VALUES_OF[operator] else "must be empty"
        yield ".values", f"{wanted} where operator is {operator}"
    elif operator in {"Gt", "Lt"} and len(values) != 1:
        yield ".values", f"must be one number where operator is {operator}"


def _pod_term(term: Object) -> Iterator[tuple[str, str]]:
    if _KEY.fullmatch(text(term, "topologyKey")) is None:
        yield ".topologyKey", "must be the key of a label of nodes"


_PREFERENCES: tuple[tuple[str, str, Callable[[Object], Iterable[tuple[str, str]]]], ...] = (
    ("nodeAffinity", "preference", _preference),
    ("podAffinity", "podAffinityTerm", _pod_term),
    ("podAntiAffinity", "podAffinityTerm", _pod_term),
)


def ports(nic: Object) -> Iterator[Found]:
    """Find invalid port numbers and repeated port names of an interface."""
    twice = "is used twice; give each port a name of its own"
    odd = (index for index, one in enumerate(items(nic, "ports")) if at(one, "port") not in PORTS)
    yield from ((f".ports[{index}].port", "must be 1 to 65535") for index in odd)
    yield from ((f".{path}", twice) for path, _ in names_twice("ports")(nic))


def host_disk(one: Object) -> list[Found]:
    """Find missing and superfluous fields of a disk that is a file of the node."""
    found: list[Found] = [
        (f".{name}", "must be given") for name in ("path", "type") if not text(one, name)
    ]
    makes, sized = text(one, "type") == "DiskOrCreate", bool(given(one, "capacity"))
    if makes != sized:
        found.append((".capacity", "must be given for the type DiskOrCreate, and for no other"))
    return found
