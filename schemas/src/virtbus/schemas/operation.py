"""Operations: durable records of long work, with their states (ADR 0048)."""

from enum import StrEnum
from typing import Literal, NamedTuple

from pydantic import Field

from virtbus.schemas.backup import CHAIN_BACKUPS, MAX_CHAIN, BackupMode
from virtbus.schemas.errors import ErrorBody
from virtbus.schemas.ids import Id, Uid
from virtbus.schemas.model import SCHEMA_VERSION, LenientModel
from virtbus.schemas.snapshot import SnapshotRef
from virtbus.schemas.volume_ref import FillSource, VolumeRef


class OperationPhase(StrEnum):
    """The phase of an operation. The last three are its ends."""

    ACCEPTED = "Accepted"
    """The operation is stored, and its node has not begun it."""
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    """The operation ended without effect on its VM or volume."""
    CANCELLED = "Cancelled"
    """The operation ended without effect, at a client's request."""


OperationEvent = Literal["begin", "succeed", "fail", "cancel"]
TABLE: dict[tuple[OperationPhase, OperationEvent], OperationPhase] = {
    (OperationPhase.ACCEPTED, "begin"): OperationPhase.RUNNING,
    (OperationPhase.ACCEPTED, "fail"): OperationPhase.FAILED,
    (OperationPhase.ACCEPTED, "cancel"): OperationPhase.CANCELLED,
    (OperationPhase.RUNNING, "succeed"): OperationPhase.SUCCEEDED,
    (OperationPhase.RUNNING, "fail"): OperationPhase.FAILED,
    (OperationPhase.RUNNING, "cancel"): OperationPhase.CANCELLED,
}
"""The next phase by phase and event. An event without a row changes nothing."""
ENDED = frozenset(OperationPhase) - {OperationPhase.ACCEPTED, OperationPhase.RUNNING}


class Step(NamedTuple):
    """A step of an operation. Each step may be repeated.

    Before the `final` step, failure and cancel leave everything as it was. From the final step on,
    the operation only goes forward, and a cancel is refused.
    """

    name: str
    final: bool = False


OperationKind = Literal[
    "export", "fill", "snapshot", "restore", "backup", "verify", "serve", "flatten"
]
STEPS: dict[OperationKind, tuple[Step, ...]] = {
    "export": (Step("convert"), Step("pack"), Step("publish", final=True)),
    "fill": (Step("fetch"), Step("copy"), Step("publish", final=True)),
    "snapshot": (Step("copy"), Step("layer"), Step("publish", final=True)),
    "restore": (Step("copy"), Step("replace", final=True)),
    "backup": (Step("stage"), Step("push"), Step("store"), Step("publish", final=True)),
    "verify": (Step("read"), Step("note", final=True)),
    "flatten": (Step("merge"), Step("publish", final=True)),
    "serve": (Step("stage"), Step("serve"), Step("close", final=True)),
}
"""The steps of an operation in order, by its kind."""


class ExportFormat(StrEnum):
    """The format of an exported disk."""

    QCOW2 = "qcow2"
    RAW = "raw"
    RAW_GZ = "raw.gz"
    """gzip of raw."""


class OperationRecord(LenientModel):
    """`$KV.vm.<node>._op.<id>`: an operation, which the node of its VM or volume carries out.

    Controllers write the record. A controller removes it at most a day after the operation's end.
    """

    schema_version: int = SCHEMA_VERSION
    id: Uid
    kind: OperationKind
    node: Id
    namespace: Id
    resource: Literal["vm", "volume"]
    uid: Uid
    """The uid of the VM or the volume."""
    name: Id
    """The name of the VM or the volume."""
    epoch: int = 0
    """The epoch of the VM at the request. If the VM has another epoch by now, it has left the
    node."""
    disk: str = ""
    """The exported disk of the VM, by the name of its volume in the spec; otherwise empty."""
    ref: VolumeRef | None = None
    """The volume, if the work concerns one disk that is a volume."""
    source: FillSource | None = None
    """The source of a fill."""
    format: ExportFormat = ExportFormat.QCOW2
    snapshot: SnapshotRef | None = None
    """The snapshot that the operation makes. A restore first makes a snapshot of the disks that it
    replaces."""
    restored: SnapshotRef | None = None
    """The snapshot that the operation restores."""
    layered: bool = False
    """If True, the files of the disks become layers, also if the VM is off (ADR 0061)."""
    mode: BackupMode = BackupMode.AUTO
    """The kind of backup that the operation makes."""
    chain: int = Field(CHAIN_BACKUPS, ge=1, le=MAX_CHAIN)
    """The longest chain of backups."""
    schedule: str = ""
    """The schedule that requested the backup; empty if a person requested it."""
    backup: str = ""
    """The backup that the operation verifies; otherwise empty."""
    since: str = ""
    """An earlier reading, whose bitmap marks the clusters written since then; empty if none."""
    within_s: int = Field(0, ge=0)
    """The seconds that a reader has. After that time the operation fails."""
    finish: bool = False
    """True once the reader has read all data. Then the operation succeeds."""
    cancel: bool = False
    """If True and the final step has not begun, the operation ends without effect."""
    created_ns: int
    owner: str = ""
    """The bridge that requested the operation, or empty, as `VmRecord.owner`."""


class ExportResult(LenientModel):
    """The file of an export on the node, with the digest of the file."""

    path: str
    size_bytes: int = Field(ge=0)
    digest: str = Field(pattern=r"^sha256:[0-9a-f]{64}$")


class OperationStatus(LenientModel):
    """`$KV.st.<node>._op.<id>`: the progress and the end of an operation.

    The operation's node writes the status. A controller writes the status only to end an operation
    that the node has not begun, or whose node was forgotten.
    """

    schema_version: int = SCHEMA_VERSION
    id: Uid
    node: Id
    phase: OperationPhase = OperationPhase.ACCEPTED
    step: str = ""
    message: str = ""
    """The reason for a wait; empty if the operation does not wait."""
    done_bytes: int = Field(0, ge=0)
    total_bytes: int = Field(0, ge=0)
    """An estimate; 0 if it is unknown."""
    error: ErrorBody | None = None
    result: ExportResult | None = None
    virtual_size_bytes: int = Field(0, ge=0)
    """The size of the disk that a fill has made."""
    begun_ns: int = 0
    ended_ns: int = 0

    @property
    def ended(self) -> bool:
        return self.phase in ENDED

    @property
    def is_final(self) -> bool:
        steps = (step for each in STEPS.values() for step in each)
        return any(step.final and step.name == self.step for step in steps)

    def after(self, event: OperationEvent, now_ns: int, **fields: object) -> "OperationStatus":
        """Return the status after an event; unchanged if TABLE has no row for phase and event."""
        phase = TABLE.get((self.phase, event))
        if phase is None:
            return self
        times = {"ended_ns": now_ns} if phase in ENDED else {"begun_ns": now_ns}
        return self.model_copy(update={"phase": phase, "message": "", **times, **fields})
