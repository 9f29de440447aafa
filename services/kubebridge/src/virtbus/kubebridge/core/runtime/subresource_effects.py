"""Types for subresources: a call, its effects, and the verb that decides about a call."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from virtbus.kubebridge.core.objects.status_errors import Refusal, of_http
from virtbus.kubebridge.core.objects.unstructured import Object, text
from virtbus.schemas.guest import GuestQuestion

VM, VMI = "virtualmachines", "virtualmachineinstances"
KINDS = {VM: "virtualmachine", VMI: "virtualmachineinstance"}


@dataclass(frozen=True, slots=True)
class SubresourceCall:
    """A call of a subresource. `vm` and `vmi` have the name of the call; a missing one is None.

    `options` is the request body. For a stream, `options` has the `port` and the `protocol`.
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
        """The uid of the VMI, which is also the uid of its VM on the bus."""
        return text(self.vmi, "metadata", "uid")

    @property
    def dry_run(self) -> bool:
        """True if the call must change nothing. Patches are then sent as a dry run."""
        return self.options.get("dryRun") == ["All"]


@dataclass(frozen=True, slots=True)
class JsonPatch:
    """A JSON patch (RFC 6902). Its `test` operations detect a concurrent change of the object.

    If a test fails, the API server refuses the patch with 422. The bridge then answers 409.
    """

    of: Literal["vm", "vm/status", "vmi"]
    operations: tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True)
class BusVerb:
    """A verb of the bus for the VM of this uid, such as `pause`. A refusal becomes the answer.

    Only `freeze` uses `timeout_s`.
    """

    verb: str
    uid: str
    timeout_s: int | None = None


@dataclass(frozen=True, slots=True)
class AskGuest:
    """Questions to the guest agent. `guest_answers` converts the answers to KubeVirt's API."""

    uid: str
    questions: tuple[GuestQuestion, ...]


@dataclass(frozen=True, slots=True)
class GuestStream:
    """A websocket `plain.kubevirt.io` to the guest. `screenshot` instead answers with one PNG."""

    what: Literal["console", "portforward", "vnc", "screenshot"]
    uid: str
    port: int = 0
    protocol: str = ""


@dataclass(frozen=True, slots=True)
class Give:
    """Answer with an object."""

    what: dict[str, Any]


Effect = JsonPatch | BusVerb | AskGuest | GuestStream | Give

Outcome = Refusal | tuple[Effect, ...]


Decide = Callable[[SubresourceCall], Outcome]
"""Decides about a call. The object of the call's `resource` (VM or VMI) exists. In a call for a VM,
the VMI may be missing."""


class Verb(NamedTuple):
    """A verb of a subresource. `success` is the HTTP code of a success.

    `missing` is the text of the refusal of an unsupported verb. It is empty for a supported verb.
    """

    method: str
    resource: str
    name: str
    decide: Decide
    success: int = 202
    missing: str = ""

    @property
    def access(self) -> str:
        return "get" if self.method == "GET" else "update"


def missing(method: str, resource: str, name: str, what: str) -> Verb:
    """Return a verb that is not supported yet. `what` names the missing feature."""
    message = f"{name} is not supported yet: {what}"
    return Verb(method, resource, name, lambda _: of_http(501, message), missing=message)
