"""Updates the interfaces of a running VMI from its VM's template, as KubeVirt does (ADR 0066).

An interface that the template adds is plugged in. An interface with `state: absent` is unplugged.
Once the guest has released it, the interface is removed from the VMI and the template. A changed
link state takes effect at once. All other changes need a restart.
"""

from collections.abc import Sequence
from typing import Any

from virtbus.kubebridge.core.objects.unstructured import Object, items, part, text
from virtbus.kubebridge.core.runtime.controller import VMI, Action, Key, Merge, Patch
from virtbus.kubebridge.core.translation.mapping import defaulted_template
from virtbus.kubebridge.core.translation.nics import is_absent
from virtbus.kubebridge.core.vm.model import Vm
from virtbus.kubebridge.core.vmi.model import FINAL, Vmi

NICS = ("domain", "devices", "interfaces")
_ABSENT_S = 0.5


def follow(vm: Vm, vmi: Vmi | None) -> list[Action]:
    """Return the writes that bring the interfaces of the VMI and of the template up to date."""
    alive = vmi if vmi is not None and not vmi.deleting and vmi.phase not in FINAL else None
    if vmi is not None and (alive is None or vmi.made_of == str(vm.generation)):
        return []  # a VMI that ends keeps its interfaces; the other case has those of the template
    plan: list[Action] = []
    if alive is not None and (spec := _changed(part(defaulted_template(vm.raw), "spec"), alive)):
        key = Key(VMI, alive.namespace, alive.name)
        changes = {"metadata": {"resourceVersion": alive.version}, "spec": spec}
        plan.append(Merge(key, changes, _ABSENT_S))
    left = {text(nic, "name") for nic in items(alive.spec, *NICS)} if alive is not None else set()
    own = part(vm.raw, "spec", "template", "spec")
    done = {text(nic, "name") for nic in items(own, *NICS) if is_absent(nic)} - left
    if done:
        plan.append(Patch({"spec": {"template": {"spec": _without(own, done)}}}))
    return plan


def _changed(wanted: Object, vmi: Vmi) -> dict[str, Any]:
    here = {text(one, "name"): one for one in vmi.interfaces}
    had = {text(nic, "name"): nic for nic in items(vmi.spec, *NICS)}
    due = {text(nic, "name"): nic for nic in items(wanted, *NICS)}
    stays = {
        name: nic if name not in due else _with_state(nic, due[name]) for name, nic in had.items()
    }
    stays = {name: nic for name, nic in stays.items() if not is_absent(nic) or name in here}
    more = {name: nic for name, nic in due.items() if name not in had and not is_absent(nic)}
    names = _ordered([*due], [*stays], [*more])
    nics = [dict(stays.get(name) or more[name]) for name in names]
    if nics == [dict(nic) for nic in items(vmi.spec, *NICS)]:
        return {}
    networks = {text(one, "name"): dict(one) for one in items(wanted, "networks")}
    networks |= {text(one, "name"): dict(one) for one in items(vmi.spec, "networks")}
    return {
        "domain": {"devices": {"interfaces": nics}},
        "networks": [networks[name] for name in names if name in networks],
    }


def _ordered(due: Sequence[str], stays: Sequence[str], more: Sequence[str]) -> list[str]:
    """Return `stays` and `more` in the order of the template, `due`.

    `stays` must keep its order. If the template's order differs, return `stays` and then `more`.
    """
    names = {*stays, *more}
    if [name for name in due if name in stays] == list(stays):
        return [name for name in due if name in names]
    return [*stays, *more]


def _with_state(nic: Object, wanted: Object) -> Object:
    state = text(wanted, "state")
    if text(nic, "state") == state:
        return nic
    others = {key: value for key, value in nic.items() if key != "state"}
    return others | ({"state": state} if state else {})


def _without(spec: Object, names: set[str]) -> dict[str, Any]:
    devices = part(spec, "domain", "devices")
    kept = [dict(nic) for nic in items(spec, *NICS) if text(nic, "name") not in names]
    networks = [dict(one) for one in items(spec, "networks") if text(one, "name") not in names]
    domain = {**part(spec, "domain"), "devices": {**devices, "interfaces": kept}}
    return {**spec, "domain": domain, "networks": networks}
