"""Decides about creates and changes of security groups, and makes their API views (ADR 0069)."""

from collections.abc import Sequence

from virtbus.controller.core import named_creates
from virtbus.controller.core.mutations import changed_paths
from virtbus.controller.core.named_creates import CreateStep
from virtbus.controller.core.vm_keys import StoredGroup
from virtbus.schemas.errors import Code, Detail, VirtbusError
from virtbus.schemas.security_group import Direction, SecurityGroupRecord
from virtbus.schemas.security_group_api import (
    SecurityGroupRef,
    SecurityGroupUpdate,
    SecurityGroupView,
)

MEMBERS_SHOWN = 8


def create_step(
    there: SecurityGroupRecord | None, ended: str, wanted: SecurityGroupRecord
) -> CreateStep:
    """Return the next step of a create; raise VirtbusError as `named_creates.create_step` does."""
    paths: Sequence[str] = ()
    if there is not None:
        before, after = (one.spec.model_dump(mode="json") for one in (there, wanted))
        paths = list(changed_paths(before, after, "spec"))
    differences = tuple(Detail(path=path, message="is another") for path in paths)
    return named_creates.create_step(there, ended, wanted, "security group", differences)


def updated(held: StoredGroup, want: SecurityGroupUpdate) -> SecurityGroupRecord:
    """Return the changed group; raise VirtbusError 409 if `want` has another revision."""
    record = held.record
    if want.revision is not None and want.revision != held.revision:
        message = (
            f"{record.name} was changed: its revision is {held.revision}, not {want.revision}; "
            "read it again, then repeat"
        )
        raise VirtbusError(Code.CONFLICT, "stale_revision", message)
    changes: dict[str, object] = {}
    if want.labels is not None:
        changes["labels"] = dict(want.labels)
    if want.spec is not None and want.spec != record.spec:
        changes |= {"spec": want.spec, "generation": record.generation + 1}
    return record.model_copy(update=changes)


def not_found(want: SecurityGroupRef) -> VirtbusError:
    """Return the error 404 for the requested name."""
    message = (
        f"there is no security group {want.name} in namespace {want.namespace}; "
        "`virtbus security-group list` shows what there is"
    )
    return VirtbusError(Code.NOT_FOUND, "security_group_not_found", message)


def shown(held: StoredGroup, members: Sequence[str], missing: Sequence[str]) -> SecurityGroupView:
    """Return the API view of a group; `missing` are groups that its rules name but do not exist."""
    record = held.record
    return SecurityGroupView(
        uid=record.uid,
        namespace=record.namespace,
        name=record.name,
        labels=record.labels,
        spec=record.spec,
        isolates=tuple(one for one in Direction if one in record.spec.isolated),
        members=tuple(sorted(members)[:MEMBERS_SHOWN]),
        member_count=len(members),
        message=f"no group has the name {', '.join(missing)}" if missing else "",
        owner=record.owner,
        generation=record.generation,
        revision=held.revision,
        created_ns=record.created_ns,
    )
