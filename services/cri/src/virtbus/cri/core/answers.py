"""Builds CRI's answers about sandboxes and containers, as plain values with CRI's field names."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from virtbus.cri.core import pod_resources
from virtbus.cri.core.pod import Container, Pod, Sandbox

Plain = dict[str, Any]

STATES = {
    "created": "CONTAINER_CREATED",
    "starting": "CONTAINER_CREATED",
    "running": "CONTAINER_RUNNING",
    "exited": "CONTAINER_EXITED",
}
"""CRI's state of a container, by phase. No phase becomes CONTAINER_UNKNOWN, because kubelet ends a
container in that state."""


def sandbox_state(sandbox: Sandbox) -> str:
    """Return CRI's name of the state of a sandbox."""
    return "SANDBOX_READY" if sandbox.ready else "SANDBOX_NOTREADY"


def sandbox_item(sandbox: Sandbox) -> Plain:
    """Return a sandbox in the shape of ListPodSandbox."""
    return {
        "id": sandbox.id,
        "metadata": sandbox.config.metadata.model_dump(),
        "state": sandbox_state(sandbox),
        "created_at": sandbox.created_ns,
        "labels": sandbox.config.labels,
        "annotations": sandbox.config.annotations,
        "runtime_handler": sandbox.runtime_handler,
    }


def sandbox_status(pod: Pod, sandbox: Sandbox) -> Plain:
    """Return a sandbox in the shape of PodSandboxStatus, with the addresses of the VM.

    Without an address, the answer has no `network`, because kubelet replaces a sandbox whose
    address is empty.
    """
    addresses = pod.machine.addresses if pod.machine is not None and sandbox.ready else ()
    more = [{"ip": address} for address in addresses[1:]]
    network = {"network": {"ip": addresses[0], "additional_ips": more}} if addresses else {}
    modes = {"network": "POD", "pid": "POD", "ipc": "POD"}
    return {
        **sandbox_item(sandbox),
        **network,
        "linux": {"namespaces": {"options": modes}},
    }


def container_item(container: Container) -> Plain:
    """Return a container in the shape of ListContainers, with the image name of the manifest."""
    return {
        "id": container.id,
        "pod_sandbox_id": container.sandbox_id,
        "metadata": container.config.metadata.model_dump(),
        "image": {"image": container.config.image.name},
        "image_ref": container.image_id,
        "image_id": container.image_id,
        "state": STATES[container.phase],
        "created_at": container.created_ns,
        "labels": container.config.labels,
        "annotations": container.config.annotations,
    }


def container_status(pod: Pod, container: Container, log_path: str) -> Plain:
    """Return a container in the shape of ContainerStatus; `log_path` is absolute.

    For a running container, the answer has the resources that its node enforces.
    """
    resources = container.config.linux.resources
    if container.phase == "running" and pod.machine is not None:
        machine = pod.machine
        waits = bool(machine.resources_wait)
        resources = pod_resources.told(resources, machine.resources, waits=waits)
    item = container_item(container)
    del item["pod_sandbox_id"]
    ending = container.ending
    if ending is not None:
        item |= {
            "finished_at": ending.finished_ns,
            "exit_code": ending.exit_code,
            "reason": ending.reason,
            "message": ending.message,
        }
    return item | {
        "started_at": container.started_ns,
        "log_path": log_path,
        "mounts": [mount.model_dump() for mount in container.config.mounts],
        "resources": {"linux": resources.model_dump()},
    }


def machine_info(pod: Pod) -> Plain:
    """Return the `info` of a verbose status: JSON about the pod's VM. crictl shows it."""
    machine = pod.machine
    told = {} if machine is None else machine.model_dump(mode="json", exclude={"key"})
    return {"info": json.dumps({"virtbusVm": told}, sort_keys=True)}


# --- filters -----------------------------------------------------------------------------------
def sandboxes(pods: Mapping[str, Pod], wanted: Plain) -> Iterator[Sandbox]:
    """Yield the sandboxes that match all conditions of a `PodSandboxFilter`."""
    state = _state(wanted, "SANDBOX_READY")
    for pod in pods.values():
        for one in pod.sandboxes:
            named = one.id.startswith(wanted.get("id", ""))
            in_state = state in {"", sandbox_state(one)}
            if named and in_state and _labelled(one.config.labels, wanted):
                yield one


def containers(pods: Mapping[str, Pod], wanted: Plain) -> Iterator[Container]:
    """Yield the containers that match all conditions of a `ContainerFilter`."""
    state = _state(wanted, "CONTAINER_CREATED")
    for pod in pods.values():
        for one in pod.containers:
            named = one.id.startswith(wanted.get("id", ""))
            inside = one.sandbox_id.startswith(wanted.get("pod_sandbox_id", ""))
            in_state = state in {"", STATES[one.phase]}
            if named and inside and in_state and _labelled(one.config.labels, wanted):
                yield one


def _state(wanted: Plain, zero: str) -> str:
    """Return the state in a filter; empty if the filter has no state.

    protobuf omits a field with the value 0. So `zero` is the state whose number is 0.
    """
    state = wanted.get("state")
    return "" if state is None else str(state.get("state", zero))


def _labelled(labels: Mapping[str, str], wanted: Plain) -> bool:
    selector: Mapping[str, str] = wanted.get("label_selector", {})
    return selector.items() <= labels.items()
