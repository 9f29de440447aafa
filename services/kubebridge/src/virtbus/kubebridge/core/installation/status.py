"""Builds the status of the `kubevirt` object, which tells clients the served version of the API."""

from collections.abc import Mapping
from typing import Any

from virtbus.kubebridge.core.api.discovery import KUBEVIRT

SHOWN = 10
_CONDITIONS = {"Available": True, "Created": True, "Degraded": False, "Progressing": False}


def status(generation: int, orphans: Mapping[str, str]) -> dict[str, Any]:
    """Return the status, the same for the same arguments, so that it is written once.

    `orphans` has the VMs on the bus that have no VMI: names by uid (ADR 0033).
    """
    return {
        "phase": "Deployed",
        "observedGeneration": generation,
        "observedKubeVirtVersion": KUBEVIRT,
        "targetKubeVirtVersion": KUBEVIRT,
        "operatorVersion": KUBEVIRT,
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
    said = {"type": "OrphanedVirtualMachines", "status": str(bool(orphans))}
    if not orphans:
        return said | {"reason": "None", "message": "every VM of this cluster has its VMI"}
    shown = ", ".join(f"{key} ({uid})" for uid, key in list(orphans.items())[:SHOWN])
    message = (
        f"{len(orphans)} VM(s) of virtbus have no VirtualMachineInstance here, and no delete of "
        f"them was reported; they are kept until a person decides: {shown}"
    )
    return said | {"reason": "VirtualMachineInstancesAbsent", "message": message}
