"""Registers the controller of `kubevirt` objects. Their status tells clients the API's version."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from virtbus.kubebridge.core.api.discovery import KUBEVIRT as RELEASE
from virtbus.kubebridge.core.objects.unstructured import Object, path, read
from virtbus.kubebridge.core.runtime.controller import (
    KUBEVIRT,
    ORPHAN,
    Action,
    Controller,
    Inputs,
    Key,
    KeyMapping,
    Lister,
    Patch,
    key_of,
)
from virtbus.kubebridge.core.vmi.orphans import Orphans


@dataclass(frozen=True, slots=True)
class KubeVirt:
    """The object that stands for the installation."""

    generation: int = path("metadata", "generation")
    status: Object = path("status")


def controller(kubevirts: Lister, orphans: Orphans) -> Controller:
    """Return the controller, which reconciles all objects at each change of `orphans`.

    `orphans` has the VMs on the bus that have no VMI (ADR 0033).
    """

    def run(_: Key, inputs: Inputs) -> list[Action]:
        if inputs.obj is None:
            return []
        kubevirt = read(KubeVirt, inputs.obj)
        wanted = status(kubevirt.generation, orphans.kept)
        return [Patch({"status": wanted}, "status")] if kubevirt.status != wanted else []

    every = KeyMapping(ORPHAN, lambda _: [key_of(KUBEVIRT, path) for path in kubevirts])
    return Controller(KUBEVIRT, run, (KeyMapping(KUBEVIRT), every), workers=1)


SHOWN = 10
"""Maximum number of VMs without a VMI that the condition names."""
_CONDITIONS = {"Available": True, "Created": True, "Degraded": False, "Progressing": False}


def status(generation: int, orphans: Mapping[str, str]) -> dict[str, Any]:
    """Return the status. Equal arguments give an equal status, so that it is written once.

    `orphans` has the names of the VMs on the bus that have no VMI, by uid.
    """
    return {
        "phase": "Deployed",
        "observedGeneration": generation,
        "observedKubeVirtVersion": RELEASE,
        "targetKubeVirtVersion": RELEASE,
        "operatorVersion": RELEASE,
        "defaultArchitecture": "amd64",
        "conditions": [
            {
                "type": kind,
                "status": str(holds),
                "reason": "AllComponentsReady",
                "message": "virtbus serves KubeVirt's API",
            }
            for kind, holds in _CONDITIONS.items()
        ]
        + [_orphaned(orphans)],
    }


def _orphaned(orphans: Mapping[str, str]) -> dict[str, str]:
    condition = {"type": "OrphanedVirtualMachines", "status": str(bool(orphans))}
    if not orphans:
        return condition | {"reason": "None", "message": "every VM of this cluster has its VMI"}
    shown = ", ".join(f"{key} ({uid})" for uid, key in list(orphans.items())[:SHOWN])
    message = (
        f"{len(orphans)} VM(s) of virtbus have no VirtualMachineInstance here, and no delete of "
        f"them was reported; they are kept until a person decides: {shown}"
    )
    return condition | {"reason": "VirtualMachineInstancesAbsent", "message": message}
