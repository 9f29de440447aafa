"""Records, statuses and nodes for the tests of the controller."""

from typing import Any

from virtbus.controller.core.admission import admit
from virtbus.schemas.node import NodeRecord, NodeState
from virtbus.schemas.states import VmState
from virtbus.schemas.vm import VmRecord, VmSpec
from virtbus.schemas.vm_status import VmStatus

GIB = 1024**3
SSH_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIOMqqnkVzrm0SdG6UOoqKLsabgH5C9okWi0dh2l9GKJl web"


def uid(number: int) -> str:
    """Return a UUID that contains its number."""
    return f"0192f0c1-2d3e-7abc-8def-{number:012x}"


def record(number: int = 1, name: str = "web", **more: Any) -> VmRecord:
    """Return a record as a create of the tiny image makes it."""
    admitted = admit({"name": name, "image": "tiny", "uid": uid(number)}, uid(number))
    values: dict[str, Any] = {
        "uid": admitted.uid,
        "namespace": admitted.namespace,
        "name": name,
        "spec": admitted.spec,
        "spec_hash": admitted.spec_hash,
        "node": "n1",
        "created_ns": number,
    }
    return VmRecord(**(values | more))


def status(of: VmRecord, state: VmState = VmState.RUNNING, **more: Any) -> VmStatus:
    """Return the status that the record's node would write."""
    values: dict[str, Any] = {
        "uid": of.uid,
        "node": of.node,
        "epoch": of.epoch,
        "generation": of.generation,
        "power_epoch": of.power_epoch,
        "state": state,
    }
    return VmStatus(**(values | more))


def node(name: str = "n1", **more: Any) -> NodeRecord:
    """Return a node that is ready, with 8 CPUs and 16 GiB."""
    values: dict[str, Any] = {
        "node": name,
        "hostname": name,
        "instance": f"{name}-1",
        "state": NodeState.READY,
        "cpus": 8,
        "memory_bytes": 16 * GIB,
    }
    return NodeRecord(**(values | more))


def spec(**more: Any) -> VmSpec:
    """Return a spec from plain values."""
    return VmSpec.model_validate(more)
