"""Fields of a VirtualMachine that the bridge reads."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from virtbus.kubebridge.core.objects.unstructured import Condition, Object, path
from virtbus.kubebridge.core.translation.annotations import SIZE
from virtbus.schemas.vm import RunStrategy


@dataclass(frozen=True, slots=True)
class StateChange:
    """A requested start or stop, from `status.stateChangeRequests`.

    `raw` is the whole entry. The bridge keeps the entry in the status until the request is met.
    """

    raw: Object = path()
    action: str = path("action")
    uid: str = path("uid")
    paused: str = path("data", "paused")


def _strategy(spec: Any) -> RunStrategy:
    if not isinstance(spec, Mapping):
        return RunStrategy.HALTED
    if (strategy := spec.get("runStrategy")) in set(RunStrategy):
        return RunStrategy(strategy)
    return RunStrategy.ALWAYS if spec.get("running") is True else RunStrategy.HALTED


@dataclass(frozen=True, slots=True)
class Vm:
    """A VirtualMachine. `raw` is the whole object, from which its VMI is made."""

    raw: Object = path()
    name: str = path("metadata", "name")
    namespace: str = path("metadata", "namespace")
    uid: str = path("metadata", "uid")
    generation: int = path("metadata", "generation")
    deleting: bool = path("metadata", "deletionTimestamp")
    finalizers: tuple[str, ...] = path("metadata", "finalizers")
    names_strategy: bool = path("spec", "runStrategy")
    strategy: RunStrategy = path("spec", make=_strategy)
    annotation_bytes: int = path("spec", "template", "metadata", SIZE)
    status: Object = path("status")
    followed: str = path("status", "runStrategy")
    requests: tuple[StateChange, ...] = path("status", "stateChangeRequests")
    conditions: tuple[Condition, ...] = path("status", "conditions")
    start_failure: Object = path("status", "startFailure")
    failures: int = path("status", "startFailure", "consecutiveFailCount")
    failed_uid: str = path("status", "startFailure", "lastFailedVMIUID")
    retry_at: datetime | None = path("status", "startFailure", "retryAfterTimestamp")
