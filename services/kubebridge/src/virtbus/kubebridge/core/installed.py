"""What the one `kubevirt` object says: that KubeVirt's API is served, and which version's."""

from typing import Any

from virtbus.kubebridge.core.discovery import KUBEVIRT

_CONDITIONS = {"Available": True, "Created": True, "Degraded": False, "Progressing": False}


def status(generation: int) -> dict[str, Any]:
    """Its status; always the same of one version, so that it is written once."""
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
        ],
    }
