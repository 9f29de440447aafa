"""Defines the actions of a reconcile. Each is safe to repeat, and they run in order.

A write at the version that was read may conflict. A conflict or a refusal ends the actions, and the
newer object is reconciled instead.
"""

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple

from virtbus.kubebridge.core.runtime.kinds import Key, Kind
from virtbus.schemas.api import VmCreated
from virtbus.schemas.errors import Code
from virtbus.schemas.model import Command
from virtbus.schemas.vm import VmView

AT_ONCE_S = 0.01
"""Seconds before the next reconcile if it needs the result of this one."""


class Refused(NamedTuple):
    """The last refusal of a create or call. The next reconcile reports it."""

    code: int
    reason: str
    message: str


class OnRefusal(Enum):
    """The effect of a refusal by the bus."""

    RETRY = auto()
    REPORT = auto()
    """The next reconcile gets it as its input."""
    IGNORE = auto()


@dataclass(frozen=True, slots=True)
class Create:
    """Create an object. An existing one of that name counts as success. A refusal is reported."""

    kind: Kind
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Replace:
    """Replace an object at the version in `body`."""

    kind: Kind
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Patch:
    """Change the reconciled object at the version that was read.

    Each part outside of `metadata` and `spec` is replaced as a whole, such as `status`. Within
    them, labels and other maps are added to; other values are replaced.
    """

    changes: dict[str, Any]
    sub: str = ""


@dataclass(frozen=True, slots=True)
class Merge:
    """Merge fields that only the bridge writes into an object of any version."""

    key: Key
    changes: dict[str, Any]
    absent_s: float = 0.0
    """Seconds before the next reconcile if the object does not exist."""


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete an object of this uid, and of this version if one is given. A missing one is fine."""

    key: Key
    uid: str
    version: str = ""


@dataclass(frozen=True, slots=True)
class Call:
    """Send a verb of the bus' API about a VM, such as `create`.

    The code `gone` means that the VM certainly does not exist.
    """

    verb: str
    request: Command
    gone: Code | None = None
    refusal: OnRefusal = OnRefusal.RETRY
    answer: type[VmCreated | VmView] = VmView


@dataclass(frozen=True, slots=True)
class RecordEvent:
    """Record an Event on an object, by default on the reconciled one, if it exists.

    With `code`, the message is also logged, as a warning of this code.
    """

    reason: str
    message: str
    warning: bool = False
    on: Key | None = None
    code: str = ""


@dataclass(frozen=True, slots=True)
class Requeue:
    """Reconcile again after `after_s` seconds, even if nothing changes."""

    after_s: float


@dataclass(frozen=True, slots=True)
class Await:
    """Reconcile again if one of these objects changes. It holds until the next reconcile."""

    references: frozenset[Key]


Action = Create | Replace | Patch | Merge | Delete | Call | RecordEvent | Requeue | Await
