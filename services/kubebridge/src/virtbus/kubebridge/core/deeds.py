"""A call of a subresource, and its effects."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from virtbus.kubebridge.core.plain import Object, text
from virtbus.schemas.guest import GuestQuestion


@dataclass(frozen=True, slots=True)
class Call:
    """What was asked, with the objects of that name as they are (None: there is none).

    `options` is the body, or a stream's `port` and `protocol`.
    """

    method: str
    resource: str
    verb: str
    name: str
    vm: Object | None = None
    vmi: Object | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def uid(self) -> str:
        """Of the VMI, and so of its VM of virtbus."""
        return text(self.vmi, "metadata", "uid")

    @property
    def dry_run(self) -> bool:
        """True where nothing shall be done: patches are only tried."""
        return self.options.get("dryRun") == ["All"]


@dataclass(frozen=True, slots=True)
class Patch:
    """A JSON patch (RFC 6902); its tests make a change meanwhile a 409."""

    of: Literal["vm", "vm/status", "vmi"]
    operations: tuple[dict[str, Any], ...]
    is_a_patch: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class Bus:
    """A verb of the bus on the VM of this uid; its refusal is the answer's."""

    verb: str
    uid: str
    is_a_patch: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class AskGuest:
    """Questions to the guest's agent; `guest_answers` makes KubeVirt's answer of its own."""

    uid: str
    questions: tuple[GuestQuestion, ...]
    is_a_patch: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class Stream:
    """A websocket `plain.kubevirt.io` to the guest; of a screenshot the answer is a PNG."""

    what: Literal["console", "portforward", "vnc", "screenshot"]
    uid: str
    port: int = 0
    protocol: str = ""
    is_a_patch: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class Give:
    """An object as the answer."""

    what: dict[str, Any]
    is_a_patch: ClassVar[bool] = True


Deed = Patch | Bus | AskGuest | Stream | Give
