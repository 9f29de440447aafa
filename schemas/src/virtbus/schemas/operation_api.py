"""Requests and answers of the public API about operations, `virtbus.api.v1.operation.<verb>`."""

from typing import Literal

from pydantic import Field

from virtbus.schemas.errors import ErrorBody
from virtbus.schemas.ids import Id, Uid
from virtbus.schemas.model import LenientModel, StrictModel
from virtbus.schemas.operation import ExportFormat, ExportResult, OperationKind, OperationPhase
from virtbus.schemas.paging import Paged
from virtbus.schemas.quantity import Count


class OperationExport(StrictModel):
    """`operation.export`: write a disk to a file on its node.

    The disk belongs to a VM that is off (`vm`), or is a `volume` that no VM holds. Give exactly one
    of `vm` and `volume`. `disk` names the VM's disk; the default is its first. Without `id` the
    server generates one. Send your own UUID to make the request repeatable.
    """

    namespace: Id = "default"
    vm: Id | None = None
    disk: Id | None = None
    volume: Id | None = None
    format: ExportFormat = ExportFormat.QCOW2
    id: Uid | None = None


class OperationFlatten(StrictModel):
    """`operation.flatten`: make disks rest on no layers. They still rest on their images.

    The disks are those of a VM, which may run (`vm`), or the disk is a `volume` whose VM is off.
    Give exactly one of `vm` and `volume`. Without `id` the server generates one.
    """

    namespace: Id = "default"
    vm: Id | None = None
    volume: Id | None = None
    id: Uid | None = None


class OperationAsk(StrictModel):
    """`operation.get`, `operation.cancel` and `operation.delete`.

    A cancel takes effect before the final step only, a delete after the end only.
    """

    id: Uid


class OperationList(StrictModel):
    """`operation.list`. Send the `continue` of a page to request the next page."""

    namespace: Id | None = None
    limit: Count = Field(100, ge=1, le=500)
    continue_: str | None = Field(None, alias="continue", max_length=256)


class OperationView(LenientModel):
    """An operation as the API shows it."""

    id: Uid
    kind: OperationKind
    namespace: Id
    owner: str = ""
    resource: Literal["vm", "volume"]
    name: Id
    """The name of the VM or the volume."""
    uid: Uid
    node: str
    disk: str = ""
    backup: str = ""
    """The backup that the operation verifies."""
    format: ExportFormat = ExportFormat.QCOW2
    phase: OperationPhase = OperationPhase.ACCEPTED
    step: str = ""
    message: str = ""
    """The reason for a wait, and the next step; empty if the operation does not wait."""
    cancel: bool = False
    done_bytes: int = 0
    total_bytes: int = 0
    error: ErrorBody | None = None
    result: ExportResult | None = None
    created_ns: int
    begun_ns: int = 0
    ended_ns: int = 0
    expires_ns: int = 0
    """The time at which the operation and its file are removed; 0 before its end."""


class OperationPage(Paged):
    """A page of `operation.list`, the oldest operation first."""

    items: tuple[OperationView, ...] = ()
