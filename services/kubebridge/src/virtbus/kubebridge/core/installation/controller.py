"""Registers the controller of `kubevirt` objects. Their status tells clients the API's version."""

from virtbus.kubebridge.core.installation.status import status
from virtbus.kubebridge.core.objects.plain import number, part
from virtbus.kubebridge.core.runtime.actions import Action, Patch
from virtbus.kubebridge.core.runtime.controller import Controller, Inputs, Lister, Watch
from virtbus.kubebridge.core.runtime.kinds import KUBEVIRT, ORPHAN, Key, key_of
from virtbus.kubebridge.core.vmi.orphans import Orphans


def controller(kubevirts: Lister, orphans: Orphans) -> Controller:
    """Return the controller. Each change of the orphans changes all `kubevirt` objects."""

    def run(_: Key, inputs: Inputs) -> list[Action]:
        if inputs.obj is None:
            return []
        said = status(number(inputs.obj, "metadata", "generation"), orphans.kept)
        return [Patch({"status": said}, "status")] if part(inputs.obj, "status") != said else []

    def every(_: Key) -> list[Key]:
        return [key_of(KUBEVIRT, path) for path in kubevirts]

    return Controller(KUBEVIRT, run, (Watch(KUBEVIRT), Watch(ORPHAN, every)), workers=1)
