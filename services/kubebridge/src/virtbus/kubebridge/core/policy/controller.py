"""Reconciles a NetworkPolicy and its security groups on the bus."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from virtbus.kubebridge.core.objects.unstructured import read
from virtbus.kubebridge.core.policy.model import Policy
from virtbus.kubebridge.core.policy.translation import POLICY_LABEL, Translated, groups_of, short
from virtbus.kubebridge.core.runtime.controller import (
    BUS_GROUP,
    NETWORK_POLICY,
    Action,
    Controller,
    GroupCall,
    Inputs,
    Key,
    KeyMapping,
    Lister,
    RecordEvent,
    Requeue,
)
from virtbus.schemas.security_group import GroupSpec
from virtbus.schemas.security_group_api import (
    SecurityGroupCreate,
    SecurityGroupDelete,
    SecurityGroupUpdate,
    SecurityGroupView,
)

DENIED = "NotTranslated"
"""Reason of the Event about parts of a policy that virtbus cannot express. These parts allow
nothing."""
REFUSED = "NotApplied"
"""Reason of the Event about a group that the bus refused. The refused rules have no effect."""
RETRY_S = 60.0
EVENT_CHARACTERS = 1024


class GroupLister(Protocol):
    """Reads the security groups that this bridge owns on the bus."""

    current: bool

    def of(self, namespace: str, label: str) -> Mapping[str, SecurityGroupView]:
        """Return the groups of a policy by name; `label` is the value of POLICY_LABEL."""


class Policies(NamedTuple):
    """The caches that a policy's reconcile reads, and the last Events of each policy (`told`)."""

    policies: Lister
    groups: GroupLister
    told: dict[Key, str]

    def controller(self) -> Controller:
        watches = (KeyMapping(NETWORK_POLICY), KeyMapping(BUS_GROUP, self.of_group))
        return Controller(NETWORK_POLICY, self._reconcile, watches, workers=4, gather_s=0.2)

    def of_group(self, key: Key) -> set[Key]:
        """Return the policy of a group; `key` has the group's label in place of a name.

        If no policy has the label, return the label as the name of a policy. The reconcile of this
        absent policy deletes the group.
        """
        prefix = f"{key.namespace}/"
        found = (one for one in self.policies if one.startswith(prefix))
        names = {name for one in found if short(name := one.removeprefix(prefix)) == key.name}
        return {Key(NETWORK_POLICY, key.namespace, name) for name in names or {key.name}}

    def _reconcile(self, key: Key, inputs: Inputs) -> list[Action]:
        """Return Events, and the calls that make the groups on the bus equal to the policy's.

        A deleted policy has no groups. Until the groups on the bus are listed, return only a
        Requeue.
        """
        if not self.groups.current:
            return [Requeue(1.0)]
        wanted = Translated({})
        if inputs.obj is not None:
            policy = read(Policy, inputs.obj)
            wanted = groups_of(policy)
        elif any(short(name) == short(key.name) for name in self._names(key.namespace)):
            return []  # the key is the label of a policy with a longer name
        label = short(key.name)
        there = self.groups.of(key.namespace, label)
        actions: list[Action] = []
        for name, spec in wanted.groups.items():
            actions += _written(key, name, label, spec, there.get(name))
        for name, view in there.items():
            if name not in wanted.groups:
                ended = SecurityGroupDelete(name=name, namespace=key.namespace, uid=view.uid)
                actions.append(GroupCall("delete", ended))
        if actions:
            actions.append(Requeue(RETRY_S))
        return [*self._events(key, wanted, inputs), *actions]

    def _names(self, namespace: str) -> list[str]:
        prefix = f"{namespace}/"
        return [one.removeprefix(prefix) for one in self.policies if one.startswith(prefix)]

    def _events(self, key: Key, wanted: Translated, inputs: Inputs) -> list[Action]:
        """Return Events about parts without a translation, and about a refusal by the bus.

        Return none if the last Events of the policy were the same.
        """
        if inputs.obj is None:
            self.told.pop(key, None)
            return []
        found: list[tuple[str, str]] = []
        if wanted.denied:
            message = f"denied, because virtbus cannot express it: {'; '.join(wanted.denied)}"
            found.append((DENIED, message))
        if inputs.refused is not None:
            found.append((REFUSED, f"the bus refused its rules: {inputs.refused.message}"))
        text = repr(found)
        if self.told.get(key, "[]") == text:
            return []
        self.told[key] = text
        return [
            RecordEvent(reason, message[:EVENT_CHARACTERS], warning=True)
            for reason, message in found
        ]


def _written(
    key: Key, name: str, label: str, spec: GroupSpec, there: SecurityGroupView | None
) -> list[Action]:
    asked: dict[str, Any] = {"name": name, "namespace": key.namespace, "spec": spec}
    labels = {POLICY_LABEL: label}
    if there is None:
        return [GroupCall("create", SecurityGroupCreate(**asked, labels=labels))]
    if there.spec == spec and there.labels == labels:
        return []
    return [GroupCall("update", SecurityGroupUpdate(**asked, uid=there.uid, labels=labels))]
