"""Registers the controller of `kubevirt` objects. Their status tells clients the API's version."""

from dataclasses import dataclass

from virtbus.kubebridge.core.installation.status import status
from virtbus.kubebridge.core.objects.plain import Object
from virtbus.kubebridge.core.objects.typed import at, read
from virtbus.kubebridge.core.runtime.actions import Action, Patch
from virtbus.kubebridge.core.runtime.controller import Controller, Inputs, Lister, Watch
from virtbus.kubebridge.core.runtime.kinds import KUBEVIRT, ORPHAN, Key, key_of
from virtbus.kubebridge.core.vmi.orphans import Orphans


@dataclass(frozen=True, slots=True)
class KubeVirt:
    """The object that stands for the installation."""

    generation: int = at("metadata", "generation")
    status: Object = at("status")


def controller(kubevirts: Lister, orphans: Orphans) -> Controller:
    """Return the controller. Each change of the orphans changes all `kubevirt` objects."""

    def run(_: Key, inputs: Inputs) -> list[Action]:
        if inputs.obj is None:
            return []
        kubevirt = read(KubeVirt, inputs.obj)
        said = status(kubevirt.generation, orphans.kept)
        return [Patch({"status": said}, "status")] if kubevirt.status != said else []

    def every(_: Key) -> list[Key]:
        return [key_of(KUBEVIRT, path) for path in kubevirts]

    return Controller(KUBEVIRT, run, (Watch(KUBEVIRT), Watch(ORPHAN, every)), workers=1)
