"""Decides about creates, changes and deletes of networks, and makes their API views (ADR 0055)."""

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from ipaddress import ip_address, ip_network

from virtbus.controller.core import named_creates
from virtbus.controller.core.image_name_changes import ADMINS
from virtbus.controller.core.mutations import changed_paths
from virtbus.controller.core.named_creates import CreateStep, refuse_deleting
from virtbus.controller.core.network_pools import subnet_problems, within
from virtbus.controller.core.networks import Networks, link_of, subnets_of
from virtbus.controller.core.vm_keys import StoredNetwork
from virtbus.schemas.address_pool import Net, overlapping
from virtbus.schemas.cni_config import plugins_in
from virtbus.schemas.errors import Code, Detail, VirtbusError
from virtbus.schemas.network_api import NeededRoute, NetworkObjectView, NetworkRef, NetworkUpdate
from virtbus.schemas.network_object import (
    BUILT_IN,
    EVERYWHERE,
    NetworkKind,
    NetworkRecord,
    NetworkSpec,
    NetworkState,
    NetworkTarget,
)
from virtbus.schemas.node import NodeRecord
from virtbus.schemas.overlay import VNI_MAX
from virtbus.schemas.wire import invalid

USERS_SHOWN = 8
POOL = frozenset({"subnet6", "ranges", "excluded", "pool"})
"""The fields of an address pool other than the IPv4 subnet."""
NAMES = frozenset({"dns", "share_names"})  # fields of kinds whose gateway resolves names
_OF_NAT = frozenset({"subnet", "gateway", "gateway6", *NAMES, "mtu", *POOL})
_ON_SEGMENT = _OF_NAT - {"pool", "share_names"}
_FIELDS = {
    NetworkKind.NAT: _OF_NAT,
    NetworkKind.ROUTED: frozenset({"subnets", "subnets6", "excluded", *NAMES, "mtu"}),
    NetworkKind.ISOLATED: frozenset({"subnet", "dns", "mtu", *POOL}),
    NetworkKind.OVERLAY: _OF_NAT - {"pool"},
    NetworkKind.BRIDGE: _ON_SEGMENT | {"link", "vlan"},
    NetworkKind.MACVTAP: _ON_SEGMENT | {"link", "mode"},
    NetworkKind.CNI: frozenset({"conflist", "config", "dns", "mtu"}),
}
"""The fields of each kind, in addition to `kind` and `protected`."""
_ALL_FIELDS = frozenset[str]().union(*_FIELDS.values())
_NEEDED = {
    NetworkKind.NAT: "subnet",
    NetworkKind.ROUTED: "subnets",
    NetworkKind.ISOLATED: "subnet",
    NetworkKind.OVERLAY: "subnet",
    NetworkKind.BRIDGE: "link",
    NetworkKind.MACVTAP: "link",
    NetworkKind.CNI: "conflist",
}
_SUCH_AS = {"conflist": "or spec.config", "link": "such as br-lan, a bridge or interface of nodes"}


def choose_vni(uid: str, networks: Networks) -> int:
    """Return the number of a new overlay: a hash of its uid, or the next free number.

    Two simultaneous creates may choose the same number. A host then takes only the first of the two
    overlays (`vni_taken`), so their frames never mix.
    """
    taken = {held.record.vni for held in networks.listed(None)}
    start = int.from_bytes(hashlib.sha256(uid.encode()).digest()[:3], "big")
    return next(
        vni for step in range(VNI_MAX) if (vni := (start + step) % VNI_MAX + 1) not in taken
    )


def create_step(there: NetworkRecord | None, ended: str, wanted: NetworkRecord) -> CreateStep:
    """Return the next step of a create; raise VirtbusError as `named_creates.create_step` does."""
    paths: Iterable[str] = ()
    if there is not None:
        before, after = (one.spec.model_dump(mode="json") for one in (there, wanted))
        paths = changed_paths(before, after, "spec")
    differences = tuple(Detail(path=path, message="is another") for path in paths)
    return named_creates.create_step(there, ended, wanted, "network", differences)


# --- what users may ask for -------------------------------------------------------------------
def refuse_spec(name: str, spec: NetworkSpec) -> None:
    """Raise 400 for fields that are missing or wrong, or that the kind of network does not have."""
    found = list(_problems(spec))
    if name == BUILT_IN:
        hint = "choose another: VMs use the built-in network without an object"
        found.append(Detail(path="name", message=f"{BUILT_IN} is built in", hint=hint))
    if found:
        raise invalid(tuple(found))


def _problems(spec: NetworkSpec) -> Iterator[Detail]:
    allowed = _FIELDS[spec.kind]
    for field in sorted(_ALL_FIELDS - allowed):
        if getattr(spec, field):
            hint = f"leave it out, or choose a kind with it; {spec.kind} has {_words(allowed)}"
            message = f"is no field of the kind {spec.kind}"
            yield Detail(path=f"spec.{field}", message=message, hint=hint)
    needed = _NEEDED[spec.kind]
    if not getattr(spec, needed) and not (spec.kind is NetworkKind.CNI and spec.config):
        hint = _SUCH_AS.get(needed, "such as 10.200.0.0/24")
        yield Detail(path=f"spec.{needed}", message=f"is needed by {spec.kind}", hint=hint)
    yield from subnet_problems(spec)
    yield from _config(spec)


def _config(spec: NetworkSpec) -> Iterator[Detail]:
    if not spec.config:
        return
    if spec.conflist:
        yield Detail(path="spec.config", message="excludes conflist", hint="give one of them")
    try:
        plugins_in(spec.config)
    except ValueError as error:
        yield Detail(path="spec.config", message=str(error))


def _words(fields: Collection[str]) -> str:
    return ", ".join(sorted(fields))


def refuse_client(
    namespace: str, spec: NetworkSpec | None, account: str, free: Sequence[Net]
) -> None:
    """Raise 403 if the account may not make or change this network.

    Clients may choose only subnets within `free`, because hosts get routes to them. Clients may not
    give a link, which leads to an operator's segment, nor a conflist, which runs programs on nodes.
    If `spec` is None, only the namespace is checked.
    """
    if account.lower() in ADMINS:
        return
    if namespace == EVERYWHERE:
        raise _admin_only("a network of all namespaces", "use a namespace")
    if spec is None:
        return
    if spec.link:
        raise _admin_only(f"the link {spec.link} of hosts", "ask an operator to make the network")
    if spec.config:
        raise _admin_only("a conflist in a network", "name a conflist of the node")
    record = NetworkRecord(uid=_NO_UID, namespace=namespace, name="x", spec=spec, created_ns=0)
    for path, subnet in subnets_of(record):
        if not any(within(subnet, one) for one in free):
            choice = ", ".join(map(str, free))
            way_out = f"choose one within {choice}" if free else "use an isolated network"
            raise _admin_only(f"{path} {subnet}", f"{way_out} (setting client_subnets)")


_NO_UID = "00000000-0000-0000-0000-000000000000"


def _admin_only(what: str, way_out: str) -> VirtbusError:
    message = f"{what} needs the credentials admin; {way_out}"
    return VirtbusError(Code.DENIED, "admin_only", message)


def refuse_overlap(
    record: NetworkRecord, networks: Networks, nodes: Mapping[str, NodeRecord]
) -> None:
    """Raise 409 for subnets that overlap a network, a node's `default` or a host's address.

    On a segment of a LAN, only other networks of that segment count.
    """
    found = tuple(
        Detail(path=path, message=f"{subnet} overlaps {other}", hint="choose another subnet")
        for path, subnet in subnets_of(record)
        if (other := _taken(subnet, record, networks, nodes))
    )
    if found:
        message = f"{found[0].path}: {found[0].message}; {found[0].hint}"
        raise VirtbusError(Code.CONFLICT, "subnet_taken", message, details=found)


def _taken(
    subnet: Net,
    record: NetworkRecord,
    networks: Networks,
    nodes: Mapping[str, NodeRecord],
) -> str:
    link = link_of(record.spec)
    for other, owner in networks.subnets(link):
        if owner.uid != record.uid and overlapping(subnet, other):
            return f"{other} of the network {owner.namespace}/{owner.name}"
    # hosts may have addresses on a segment, so only other networks count there
    for name, node in sorted(nodes.items() if not link else ()):
        for guest in filter(None, (node.guest_subnet, node.guest_subnet6)):
            if overlapping(subnet, guests := ip_network(guest, strict=False)):
                return f"{guests}, the network {BUILT_IN} of {name}"
        for text in node.addresses:
            if (address := ip_address(text)) in subnet:
                return f"the address {address} of {name}"
    return ""


# --- changes ----------------------------------------------------------------------------------
def updated(record: NetworkRecord, want: NetworkUpdate) -> NetworkRecord:
    """Return the network with the changes of a request.

    Raises:
        VirtbusError: 400: the kind has no such field. 409: the network is being deleted.
    """
    refuse_deleting(record, "network")
    fields = {"dns": want.dns, "mtu": want.mtu, "protected": want.protected}
    spec = record.spec.model_copy(
        update={field: value for field, value in fields.items() if value is not None}
    )
    refuse_spec(record.name, spec)
    labels = record.labels if want.labels is None else dict(want.labels)
    if spec == record.spec and labels == record.labels:
        return record
    generation = record.generation + (spec != record.spec)
    return record.model_copy(update={"spec": spec, "labels": labels, "generation": generation})


def deleting(record: NetworkRecord, users: Sequence[str], now_ns: int) -> NetworkRecord:
    """Return the network after a delete request.

    Raises:
        VirtbusError: 409: the network is protected, or VMs use it.
    """
    if record.deleting:
        return record
    if users:
        raise in_use(record, users)
    if record.spec.protected:
        message = (
            f"{record.name} is protected; `virtbus network update {record.name} --no-protected` "
            "clears that"
        )
        raise VirtbusError(Code.CONFLICT, "protected", message)
    update = {"deleting": True, "deleting_since_ns": now_ns, "kept_for": ""}
    return record.model_copy(update=update)


def kept(record: NetworkRecord, users: Sequence[str]) -> NetworkRecord:
    """Return the network after its delete was reverted, because VMs use it."""
    update = {"deleting": False, "deleting_since_ns": 0, "kept_for": _use(users)}
    return record.model_copy(update=update)


def in_use(record: NetworkRecord, users: Sequence[str]) -> VirtbusError:
    """Return the error 409 with the VMs that use the network."""
    details = tuple(Detail(path=f"vm/{user}", message="uses it") for user in users[:USERS_SHOWN])
    message = f"{record.name} is in use: {_use(users)}; delete them first, then repeat"
    return VirtbusError(Code.CONFLICT, "network_in_use", message, details=details)


def _use(users: Sequence[str]) -> str:
    more = f" and {len(users) - USERS_SHOWN} more" if len(users) > USERS_SHOWN else ""
    return f"{', '.join(users[:USERS_SHOWN])}{more} use it"


def mended(
    want: NetworkRef, known: NetworkRecord | None, users: Sequence[str], uid: str, now_ns: int
) -> NetworkRecord:
    """Return a record with a delete request, which replaces an unreadable record.

    `known` is the network's last readable record. If it is None, the network gets the requested
    uid, or `uid` if the request has none. `users` are the VMs that name the network.

    Raises:
        VirtbusError: the errors of `deleting`. 409: `known` has another uid than the requested uid.
    """
    if known is None:
        known = NetworkRecord(
            uid=want.uid or uid,
            namespace=want.namespace,
            name=want.name,
            spec=NetworkSpec(kind=NetworkKind.ISOLATED),
            created_ns=0,
        )
    named_creates.refuse_other(want.uid, known, "network")
    return deleting(known, users, now_ns)


def restored(target: NetworkTarget, now_ns: int) -> NetworkRecord:
    """Return the network that a VM's record describes, to replace one that the bus has lost.

    A VM's record has no labels of networks, so the labels are lost.
    """
    return NetworkRecord(
        uid=target.uid,
        namespace=target.namespace,
        name=target.name,
        spec=target.spec,
        generation=target.generation,
        created_ns=now_ns,
        vni=target.vni,
    )


# --- answers ----------------------------------------------------------------------------------
def not_found(want: NetworkRef) -> VirtbusError:
    """Return the error 404 for the requested name."""
    where = "all namespaces" if want.namespace == EVERYWHERE else f"namespace {want.namespace}"
    message = (
        f"there is no network object {want.name} of {where}; `virtbus network list` shows what "
        "there is"
    )
    return VirtbusError(Code.NOT_FOUND, "network_not_found", message)


def shown(
    held: StoredNetwork, users: Sequence[str], nodes: Mapping[str, NodeRecord], given: int
) -> NetworkObjectView:
    """Return the API view of a network with `given` claimed addresses."""
    record = held.record
    state = NetworkState.IN_USE if users else NetworkState.READY
    message = f"a delete was reverted: {record.kept_for}" if record.kept_for else ""
    if record.deleting:
        state, message = NetworkState.DELETING, "it ends within seconds unless a VM uses it"
    return NetworkObjectView(
        uid=record.uid,
        namespace=record.namespace,
        name=record.name,
        labels=record.labels,
        spec=record.spec,
        state=state,
        message=message,
        routes=tuple(_routes(record.spec, nodes)),
        users=tuple(users[:USERS_SHOWN]),
        user_count=len(users),
        given=given,
        generation=record.generation,
        revision=held.revision,
        created_ns=record.created_ns,
    )


def _routes(spec: NetworkSpec, nodes: Mapping[str, NodeRecord]) -> Iterator[NeededRoute]:
    for subnets, six in ((spec.subnets, False), (spec.subnets6, True)):
        for name, subnet in sorted(subnets.items()):
            node = nodes.get(name)
            there = node.addresses if node is not None else ()
            via = tuple(one for one in there if (":" in one) is six)
            yield NeededRoute(destination=subnet, node=name, via=via)
