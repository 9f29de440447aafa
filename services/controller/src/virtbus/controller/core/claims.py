"""Decides how a create claims its name and addresses, and commits its uid (ADR 0003, 0064).

Each decision depends only on the last message of a key. The tables below correspond to the table
of crashes in ADR 0003.
"""

from collections.abc import Iterator
from enum import StrEnum

from virtbus.controller.core.mutations import changed_paths
from virtbus.controller.core.secret_inputs import secret_paths
from virtbus.schemas import subjects
from virtbus.schemas.address_claim import AddressClaim
from virtbus.schemas.errors import Code, Detail, VirtbusError
from virtbus.schemas.vm import NameClaim, Tombstone, VmRecord

SECRETS_DIFFER = "its secret inputs differ"


class UidState(StrEnum):
    """The state of a uid, by the last message of `$KV.vm.*.<uid>`."""

    NOTHING = "nothing"
    RECORD = "record"
    TOMBSTONE = "tombstone"
    MARKER = "marker"
    """Purged: the uid was deleted and may never be committed again."""
    UNREADABLE = "unreadable"
    """An unreadable value: the uid and its name stay taken."""


class NameStep(StrEnum):
    """The action for a create whose name or address is claimed by another uid."""

    REFUSE = "refuse"
    BURY_THEN_TAKE = "bury then take"
    """Write a tombstone first, so that a paused controller can no longer commit the other uid."""
    TAKE = "take"


class CommitStep(StrEnum):
    """The action for a commit of a uid that already has a message."""

    SAME = "same"
    """The VM exists already: answer 200."""
    ENDING = "ending"
    """The VM exists and is being deleted: 409."""
    REFUSE = "refuse"
    MOVE = "move"
    """Commit as a move from `_`: purge the tombstone in the same atomic batch."""
    GONE = "gone"
    """The uid was deleted: 410."""
    RETRY = "retry"


_NAME_STEPS: dict[UidState, NameStep] = {
    UidState.NOTHING: NameStep.BURY_THEN_TAKE,
    UidState.RECORD: NameStep.REFUSE,
    UidState.TOMBSTONE: NameStep.BURY_THEN_TAKE,
    UidState.MARKER: NameStep.TAKE,
    UidState.UNREADABLE: NameStep.REFUSE,
}

_COMMIT_STEPS: dict[UidState, CommitStep] = {
    UidState.NOTHING: CommitStep.RETRY,
    UidState.TOMBSTONE: CommitStep.MOVE,
    UidState.MARKER: CommitStep.GONE,
    UidState.UNREADABLE: CommitStep.REFUSE,
}


def standing(last: VmRecord | Tombstone | None, *, purged: bool) -> UidState:
    """Return a uid's state by its last message, if that message is readable.

    `last` is the record or tombstone in the message, or None. `purged` is True for a purge marker.
    """
    if purged:
        return UidState.MARKER
    if last is None:
        return UidState.NOTHING
    return UidState.TOMBSTONE if isinstance(last, Tombstone) else UidState.RECORD


def name_step(where: UidState, last: VmRecord | Tombstone | None, wanted: VmRecord) -> NameStep:
    """Return the action for a create of `wanted` whose name another uid claims.

    `where` and `last` are the state and message of the other uid. If the other uid's record has
    another name, that uid can never be committed under this name.
    """
    if isinstance(last, VmRecord) and not bears(last, wanted.namespace, wanted.name):
        return NameStep.TAKE
    return _NAME_STEPS[where]


def claims_of(record: VmRecord) -> list[str]:
    """Return the keys that a VM's record claims: its name, then its addresses."""
    return [subjects.name_claim(record.namespace, record.name), *addresses_of(record)]


def addresses_of(record: VmRecord) -> list[str]:
    """Return the keys of the addresses that a VM's record claims."""
    return [
        subjects.address_claim(claims.network, address)
        for claims in record.address_claims.values()
        for address in (*claims.addresses, *((claims.mac,) if claims.mac else ()))
    ]


def is_address(key: str) -> bool:
    """Return True for the claim of an address."""
    return key.startswith(subjects.ADDRESS_KEYS)


def claim_value(key: str, uid: str) -> NameClaim | AddressClaim:
    """Return the value with which `uid` claims a name or an address."""
    return AddressClaim(vm=uid) if is_address(key) else NameClaim(uid=uid)


def address_step(where: UidState) -> NameStep:
    """Return the action for a VM that asks for an address which another uid claims.

    `where` is the state of the other uid. The claim stands even if the other uid's record lacks the
    address. The update that adds the address may not be committed yet.
    """
    return _NAME_STEPS[where]


def bears(record: VmRecord, namespace: str, name: str) -> bool:
    """Return True if the record has this namespace and name."""
    return (record.namespace, record.name) == (namespace, name)


def commit_step(where: UidState, last: VmRecord | Tombstone | None, wanted: VmRecord) -> CommitStep:
    """Return the action for a commit of `wanted`, given its uid's state."""
    if where is not UidState.RECORD or not isinstance(last, VmRecord):
        return _COMMIT_STEPS[where]
    if not bears(last, wanted.namespace, wanted.name):
        return CommitStep.REFUSE
    if last.deleting:
        return CommitStep.ENDING
    return CommitStep.REFUSE if differences(last, wanted) else CommitStep.SAME


def differences(last: VmRecord, wanted: VmRecord) -> tuple[Detail, ...]:
    """Return the differences between a create and the existing VM of its uid, by field path.

    Secrets are compared by digest, because a record contains only the digest.
    """
    found = []
    if last.spec != wanted.spec:
        before, after = (one.spec.model_dump(mode="json") for one in (last, wanted))
        found = [
            Detail(path=path, message="differs") for path in changed_paths(before, after, "spec")
        ]
    if last.sec_digest != wanted.sec_digest:
        found += [Detail(path=path, message=SECRETS_DIFFER) for path in secret_paths(wanted.spec)]
    return tuple(found)


def unchanged(holder: VmRecord, wanted: VmRecord) -> bool:
    """Return True if a VM of another uid seems to match the request.

    The result is only a hint: after an update, `spec_hash` does not cover the secrets, and the
    digests of secrets include the uid.
    """
    secret = [one.sec_digest is not None for one in (holder, wanted)]
    return holder.spec_hash == wanted.spec_hash and secret[0] == secret[1]


def name_taken(wanted: VmRecord, holder: VmRecord | Tombstone | None, uid: str) -> VirtbusError:
    """Return 409 for a name that `uid` has; `holder` is the record of `uid`, if readable."""
    if isinstance(holder, VmRecord) and holder.deleting:
        message = f"{wanted.name} (uid {holder.uid}) is being deleted; repeat after vm.deleted"
        return VirtbusError(Code.CONFLICT, "deleting", message)
    if isinstance(holder, VmRecord) and unchanged(holder, wanted):
        message = f"{wanted.name} exists, unchanged, with uid {holder.uid}"
        return VirtbusError(Code.CONFLICT, "exists_unchanged", message)
    message = (
        f"the name {wanted.name} is taken in namespace {wanted.namespace} by uid {uid}; "
        "choose another, or delete that VM first"
    )
    return VirtbusError(Code.CONFLICT, "name_taken", message)


class AddressTakenError(VirtbusError):
    """The error 409: another VM has an address.

    `named` is True if the spec asks for the address, and False if the controller chose it.
    """

    def __init__(self, wanted: VmRecord, key: str, uid: str) -> None:
        _, address = subjects.claimed_address(key)
        message = f"VM {uid} has {address} on this network; choose another, or delete that VM first"
        details = tuple(
            Detail(path=path, message=message) for path in _paths_of(wanted, key, address)
        )
        shown = f"{details[0].path}: {message}" if details else message
        super().__init__(Code.CONFLICT, "address_taken", shown, details=details)
        self.named = bool(details)


def _paths_of(record: VmRecord, key: str, address: str) -> Iterator[str]:
    """Yield the fields of a spec that ask for the address of a claim."""
    for index, nic in enumerate(record.spec.domain.devices.interfaces):
        path = f"spec.domain.devices.interfaces[{index}]"
        claims = record.address_claims.get(nic.name)
        if claims is None or not key.startswith(f"{subjects.ADDRESS_KEYS}{claims.network}."):
            continue
        if nic.mac_address == address:
            yield f"{path}.mac_address"
        if address in nic.addresses:
            yield f"{path}.addresses[{nic.addresses.index(address)}]"


def uid_taken(wanted: VmRecord, holder: VmRecord | Tombstone | None) -> VirtbusError:
    """Return 409 for a uid that an existing VM has.

    If that VM has the wanted name, the details list its differences from the request.
    """
    if isinstance(holder, VmRecord) and bears(holder, wanted.namespace, wanted.name):
        message = f"uid {wanted.uid} is {wanted.name} already, and differs from this request"
        details = differences(holder, wanted)
        return VirtbusError(Code.CONFLICT, "uid_taken", message, details=details)
    message = f"uid {wanted.uid} belongs to another VM; leave uid out to get a new one"
    return VirtbusError(Code.CONFLICT, "uid_taken", message)
