"""Decides about creates of named objects, whose keys also claim their names (ADR 0045)."""

from enum import Enum
from typing import Protocol

from virtbus.schemas.errors import Code, Detail, VirtbusError


class CreateStep(Enum):
    """The next step of a create; the last message of the object's key decides it."""

    PUT = "put"
    """The name is free: write at the revision that was read."""
    SAME = "same"
    """The object exists as requested: write nothing."""


class NamedObject(Protocol):
    """A record with a name, a namespace, a uid and a flag for its delete."""

    @property
    def uid(self) -> str: ...
    @property
    def namespace(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def deleting(self) -> bool: ...


def create_step(
    there: NamedObject | None,
    ended: str,
    wanted: NamedObject,
    kind: str,
    differences: tuple[Detail, ...],
) -> CreateStep:
    """Return the next step of a create.

    `there` is the object that has the name. `ended` is the uid in the key's purge marker, or empty.
    `kind` is the word for the object in messages. `differences` compares `there` with `wanted`.

    Raises:
        VirtbusError: 409: another object has the name, or `there` differs from the request or is
            being deleted. 410: the object with the wanted uid was deleted.
    """
    if there is None:
        if ended == wanted.uid:
            message = f"uid {wanted.uid} was deleted; create the {kind} under a new uid"
            raise VirtbusError(Code.GONE, "deleted", message)
        return CreateStep.PUT
    refuse_deleting(there, kind)
    if there.uid != wanted.uid:
        message = (
            f"the name {there.name} is taken in namespace {there.namespace} by the {kind} "
            f"{there.uid}; choose another, or delete that {kind} first"
        )
        raise VirtbusError(Code.CONFLICT, "name_taken", message)
    if differences:
        message = f"uid {there.uid} is {there.name} already, and differs from this request"
        raise VirtbusError(Code.CONFLICT, "uid_taken", message, details=differences)
    return CreateStep.SAME


def refuse_deleting(record: NamedObject, kind: str) -> None:
    """Raise 409 while the object is being deleted."""
    if record.deleting:
        message = f"{record.name} is being deleted; repeat after {kind}.deleted"
        raise VirtbusError(Code.CONFLICT, "deleting", message)


def refuse_other(uid: str | None, record: NamedObject, kind: str) -> None:
    """Raise 409 if the requested `uid` is not the uid of the object with the requested name."""
    if uid is not None and uid != record.uid:
        message = f"{record.name} is the {kind} {record.uid}, not {uid}; leave uid out"
        raise VirtbusError(Code.CONFLICT, "not_its_uid", message)
