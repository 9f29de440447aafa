"""Decides which of the two runtimes a pod or an image belongs to.

A pod belongs to the runtime of VMs if its RuntimeClass or Virtlet's annotation says so. An image
belongs to the runtime of VMs if its pod does, or if its own handler, its annotation, or the prefix
of its name says so. Contradictions are refused, because the pod could never start.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

from virtbus.schemas.errors import Code, VirtbusError

Name = Literal["containers", "vms"]
"""The name of a runtime, in settings, conditions, logs and files."""
CONTAINERS: Name = "containers"
VMS: Name = "vms"

IMAGE_PREFIX = "virtlet.cloud/"
TARGET = "kubernetes.io/target-runtime"
"""Virtlet's annotation that names the runtime of a pod."""
VM_TARGET = "virtlet.cloud"


class PodAsked(NamedTuple):
    """The part of a call that is about its pod."""

    handler: str = ""
    annotations: Mapping[str, str] = {}
    uid: str = ""


class ImageAsked(NamedTuple):
    """The part of a call that is about an image.

    `name` may be an id. `given` is the image's name in the manifest, if known.
    """

    name: str = ""
    given: str = ""
    handler: str = ""
    annotations: Mapping[str, str] = {}

    @property
    def of_vm(self) -> bool:
        return self.name.startswith(IMAGE_PREFIX) or self.given.startswith(IMAGE_PREFIX)


def runtime_of_pod(asked: PodAsked, vm_handlers: tuple[str, ...]) -> Name:
    """Return the runtime for a pod to run.

    Raises:
        VirtbusError: 400 `runtime_unknown`: the annotation names an unknown runtime. 400
            `runtime_unclear`: the annotation names the runtime of VMs, and the handler is another
            runtime's.
    """
    target = asked.annotations.get(TARGET, "")
    by_handler = asked.handler in vm_handlers
    if target not in {"", VM_TARGET}:
        message = (
            f"annotations[{TARGET}]: no runtime of this node is named {target!r:.80}; "
            f"write {VM_TARGET} for a VM, or remove it"
        )
        raise VirtbusError(Code.INVALID, "runtime_unknown", message)
    if target and asked.handler and not by_handler:
        message = (
            f"annotations[{TARGET}] asks for a VM, and the RuntimeClass has the handler "
            f"{asked.handler!r:.80}, which is no VM's; remove one of them"
        )
        raise VirtbusError(Code.INVALID, "runtime_unclear", message)
    return VMS if target or by_handler else CONTAINERS


def runtime_of_image(
    image: ImageAsked, pod: PodAsked, owner: Name | None, vm_handlers: tuple[str, ...]
) -> Name | None:
    """Return the runtime of an image; None if nothing in the call decides it.

    `owner` is the runtime of the pod that the call is for, if it is known.

    Raises:
        VirtbusError: 400 `image_of_other_runtime`: as in `check_image`.
    """
    if owner is not None:
        check_image(image, owner)
        return owner
    targets = {image.annotations.get(TARGET), pod.annotations.get(TARGET)}
    if image.of_vm or image.handler in vm_handlers or VM_TARGET in targets:
        return VMS
    return CONTAINERS if image.handler or pod.uid else None


def check_image(image: ImageAsked, owner: Name) -> None:
    """Refuse a VM's image in a pod of containers.

    Raises VirtbusError 400 `image_of_other_runtime`.
    """
    if owner == CONTAINERS and image.of_vm:
        message = (
            f"image: {(image.given or image.name)!r:.200} is a VM's image, and the pod is no VM; "
            f"give the pod the RuntimeClass of virtbus, or the annotation {TARGET}={VM_TARGET}"
        )
        raise VirtbusError(Code.INVALID, "image_of_other_runtime", message)
