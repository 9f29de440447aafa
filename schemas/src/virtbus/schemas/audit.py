"""Comparisons of a host with the records of its VMs, and their findings."""

from virtbus.schemas.model import LenientModel


class AuditFinding(LenientModel):
    """Something on a host or the bus that no record accounts for, or something missing there.

    `kind` is domain, network, disk, volume, snapshot, file, status, record, service, bus or fault.
    `repair` says what a repair does about the finding; empty if a repair does nothing. `repaired`
    is True if the finding is gone. `namespace` and `name` are set for data that a person may adopt.
    """

    kind: str
    uid: str = ""
    namespace: str = ""
    name: str = ""
    what: str
    repair: str = ""
    repaired: bool = False


class Audit(LenientModel):
    """`rpc.agent.audit`: compare the host with the records; `repair` removes orphans.

    `statuses` are the uids that have a status of this node and no record.
    """

    repair: bool = False
    statuses: tuple[str, ...] = ()


class Audited(LenientModel):
    """The findings of an audit; empty if all is well."""

    findings: tuple[AuditFinding, ...] = ()
