"""Declares the fields of a VM that rules read."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from virtbus.kubebridge.core.objects.plain import Object
from virtbus.kubebridge.core.objects.typed import Condition, at
from virtbus.kubebridge.core.translation.annotations import SIZE
from virtbus.schemas.vm import RunStrategy


@dataclass(frozen=True, slots=True)
class Request:
    """A requested start or stop. `raw` is written back while it is unmet."""

    raw: Object = at()
    action: str = at("action")
    uid: str = at("uid")
    paused: str = at("data", "paused")


def _strategy(spec: Any) -> RunStrategy:
    """Return `spec.runStrategy`, or what `spec.running` means; Halted if neither is valid."""
    if not isinstance(spec, Mapping):
        return RunStrategy.HALTED
    if (said := spec.get("runStrategy")) in set(RunStrategy):
        return RunStrategy(said)
    return RunStrategy.ALWAYS if spec.get("running") is True else RunStrategy.HALTED


@dataclass(frozen=True, slots=True)
class Vm:
    """A VM. `raw` is the whole object, of which its VMI is made."""

    raw: Object = at()
    name: str = at("metadata", "name")
    namespace: str = at("metadata", "namespace")
    uid: str = at("metadata", "uid")
    generation: int = at("metadata", "generation")
    deleting: bool = at("metadata", "deletionTimestamp")
    finalizers: tuple[str, ...] = at("metadata", "finalizers")
    names_strategy: bool = at("spec", "runStrategy")
    strategy: RunStrategy = at("spec", make=_strategy)
    annotation_bytes: int = at("spec", "template", "metadata", SIZE)
    status: Object = at("status")
    followed: str = at("status", "runStrategy")
    requests: tuple[Request, ...] = at("status", "stateChangeRequests")
    conditions: tuple[Condition, ...] = at("status", "conditions")
    start_failure: Object = at("status", "startFailure")
    failures: int = at("status", "startFailure", "consecutiveFailCount")
    failed_uid: str = at("status", "startFailure", "lastFailedVMIUID")
    retry_at: datetime | None = at("status", "startFailure", "retryAfterTimestamp")
