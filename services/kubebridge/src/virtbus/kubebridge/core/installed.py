"""Status of the `kubevirt` object: KubeVirt's API is served, in which version."""

from collections.abc import Mapping
from typing import Any

from virtbus.kubebridge.core.discovery import KUBEVIRT

SHOWN = 10
_CONDITIONS = {"Available": True, "Created": True, "Degraded": False, "Progressing": False}


def status(generation: int, orphans: Mapping[str, str]) -> dict[str, Any]:
    """Its status; the same of one version and the same orphans, so that it is written once.

    `orphans`: the VMs of the bus that no VMI stands for, names by uid (ADR 0033).
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
        f"{len(orphans)} VM(s) of virtbus have no VirtualMachineInstance here, and none was told "
        f"to be deleted; nothing ends them but a person: {shown}"
    )
    return said | {"reason": "VirtualMachineInstancesAbsent", "message": message}
