"""Decides about changes of image names, and makes their API views (ADR 0046)."""

from virtbus.controller.core.vm_keys import StoredImageName
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.image import ImageTarget
from virtbus.schemas.image_name import FLEET, ImageNameRecord
from virtbus.schemas.image_name_api import ImageNameAsk, ImageNameSet, ImageNameView

ADMINS = frozenset({"", "ctl"})
"""The accounts, in lower case, that may change image names of the whole fleet."""


def refuse_fleet(want: ImageNameAsk, account: str) -> None:
    """Raise 403 if the request is for a name of the whole fleet, and the account is no admin's."""
    if want.namespace == FLEET and account.lower() not in ADMINS:
        message = (
            f"the name {want.name} of the whole fleet needs the credentials admin; use a namespace"
        )
        raise VirtbusError(Code.DENIED, "admin_only", message)


def changed(
    there: StoredImageName | None, want: ImageNameSet, new: ImageNameRecord
) -> ImageNameRecord:
    """Return the record after a request to set a name; `new` is the record of a new name.

    Raises:
        VirtbusError: 409 `stale_revision`: the request expects another revision of the name.
    """
    revision = there.revision if there is not None else 0
    if want.revision not in {None, revision}:
        message = (
            f"{want.name} has revision {revision}, not {want.revision}; get it again and repeat "
            "the change"
        )
        raise VirtbusError(Code.CONFLICT, "stale_revision", message)
    if there is None:
        return new
    if there.record.spec == want.spec:
        return there.record
    return there.record.model_copy(
        update={
            "spec": want.spec,
            "generation": there.record.generation + 1,
            "changed_ns": new.changed_ns,
        }
    )


def target_of(record: ImageNameRecord) -> ImageTarget:
    """Return the present meaning of the name, as the record of a VM or volume keeps it."""
    spec = record.spec
    return ImageTarget(
        url=spec.url,
        digest=spec.digest,
        transport=spec.transport or "",
        pull_policy=spec.pull_policy,
        namespace=record.namespace,
        generation=record.generation,
    )


def not_found(want: ImageNameAsk) -> VirtbusError:
    """Return the error 404 for the requested name."""
    where = "the whole fleet" if want.namespace == FLEET else f"namespace {want.namespace}"
    message = (
        f"there is no image name {want.name} of {where} on the bus; `virtbus imagename list` shows "
        "what there is, and names in images.d of nodes are not on the bus"
    )
    return VirtbusError(Code.NOT_FOUND, "image_name_not_found", message)


def shown(held: StoredImageName) -> ImageNameView:
    """Return the API view of an image name."""
    record = held.record
    return ImageNameView(
        uid=record.uid,
        namespace=record.namespace,
        name=record.name,
        spec=record.spec,
        generation=record.generation,
        revision=held.revision,
        created_ns=record.created_ns,
        changed_ns=record.changed_ns,
    )
