"""Manifests for tests: KubeVirt's smoke VM, with changes."""

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from virtbus.kubebridge.core.translation.defaults import of_vmi

UID = "0192f0c1-2d3e-7abc-8def-0123456789ab"
VM_UID = "0192f0c1-2d3e-7abc-8def-00000000000a"
SEED = yaml.safe_load((Path(__file__).parent / "kubevirt-smoke-fedora.yaml").read_text())


def vm(**spec: Any) -> dict[str, Any]:
    """Return the smoke VM with some fields of its spec replaced. None removes a field."""
    whole: dict[str, Any] = copy.deepcopy(SEED)
    whole["metadata"] |= {"namespace": "default", "uid": VM_UID, "generation": 1}
    return put(whole, {f"spec.{key}": value for key, value in spec.items()})


def template(changes: dict[str, Any]) -> dict[str, Any]:
    """Return the smoke VM with changes to its template's spec, by path. None removes a field."""
    return put(vm(), {f"spec.template.spec.{key}": value for key, value in changes.items()})


def vmi(changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a VMI of the smoke VM with its defaults."""
    made = {
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachineInstance",
        "metadata": {"name": "smoke", "namespace": "default", "uid": UID},
        "spec": copy.deepcopy(SEED["spec"]["template"]["spec"]),
    }
    return of_vmi(put(made, {f"spec.{key}": value for key, value in (changes or {}).items()}))


def put(whole: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Set values by path, such as `spec.volumes.0.name`. None removes a field."""
    for path, value in changes.items():
        here: Any = whole
        *way, last = path.split(".")
        for name in way:
            here = here[int(name)] if isinstance(here, list) else here.setdefault(name, {})
        if isinstance(here, list) and int(last) == len(here):
            here.append(value)
        elif isinstance(here, list):
            here[int(last)] = value
        elif value is None:
            here.pop(last, None)
        else:
            here[last] = value
    return whole


def find(conditions: Iterable[Mapping[str, Any]], kind: str) -> Mapping[str, Any]:
    """Return the condition of a type, or an empty one."""
    return next((one for one in conditions if one.get("type") == kind), {})
