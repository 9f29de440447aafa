"""A change of a guest reconciles only the Services that select it."""

from datetime import UTC, datetime
from typing import Any, cast

from virtbus.kubebridge.core.runtime.controller import (
    ENDPOINT_SLICE,
    SERVICE,
    VMI,
    Inputs,
    Key,
    RecordEvent,
)
from virtbus.kubebridge.core.service.controller import Services
from virtbus.kubebridge.core.service.endpoint_slices import MANAGED_BY
from virtbus.kubebridge.edge.runtime.store import ObjectStore
from virtbus.schemas.network import InterfaceStatus

NIC = InterfaceStatus(name="default", mac="02:00:00:00:00:01", addresses=("10.1.0.7/24",))
Json = dict[str, Any]


class Here:
    """The stores, and the Services that a change reconciles."""

    def __init__(self) -> None:
        self.interfaces = (NIC,)
        self.vmis, self.services, self.slices = ObjectStore(), ObjectStore(), ObjectStore()
        views = cast("Any", self)
        self.index = Services(self.services, self.vmis, self.slices, views)
        self._version = 0

    def get(self, _: str) -> Any:
        return self

    def put(self, store: ObjectStore, name: str, body: Json, **meta: Any) -> None:
        self._version += 1
        own = {"name": name, "namespace": "n", "uid": name, "resourceVersion": str(self._version)}
        store.put({"metadata": own | meta, **body})

    def service(self, name: str, **selector: str) -> set[str]:
        self.put(self.services, name, {"spec": {"selector": selector}})
        return named(self.index.service_changed(Key(SERVICE, "n", name)))

    def vmi(self, name: str, phase: str = "Running", **labels: str) -> set[str]:
        self.put(self.vmis, name, {"status": {"phase": phase}}, labels=labels)
        return self.changed(name)

    def changed(self, name: str) -> set[str]:
        return named(self.index.guest_changed(Key(VMI, "n", name)))


def named(keys: set[Key]) -> set[str]:
    return {key.name for key in keys}


def test_a_changed_guest_reconciles_the_services_that_select_it() -> None:
    here = Here()
    for name in ("a", "b"):
        assert here.service(name, app=name) == {name}
    here.service("all", **{"kubevirt.io": "virt-launcher"})
    assert here.service("none") == {"none"}
    assert here.vmi("one", app="a") == {"a", "all"}
    assert here.vmi("one", app="a") == set(), "no change for Services"
    assert here.vmi("one", app="b") == {"a", "b", "all"}
    assert here.vmi("one", "Succeeded", app="b") == {"b", "all"}
    here.vmis.drop("n/one")
    assert here.changed("one") == set()


def test_a_guest_counts_for_a_service_that_selects_it_later() -> None:
    here = Here()
    assert here.vmi("one", app="a") == set()
    here.service("a", app="a")
    assert here.vmi("one", "Failed", app="a") == {"a"}
    here.service("a")
    assert here.vmi("two", app="a") == set()


def test_a_changed_slice_reconciles_its_service() -> None:
    here = Here()
    labels = {MANAGED_BY: "us", "kubernetes.io/service-name": "a"}
    here.put(here.slices, "a-virtbus-ipv4-0", {}, labels=labels)
    key = Key(ENDPOINT_SLICE, "n", "a-virtbus-ipv4-0")
    assert named(here.index.slice_changed(key)) == {"a"}
    here.slices.drop("n/a-virtbus-ipv4-0")
    assert named(here.index.slice_changed(key)) == {"a"}
    assert named(here.index.slice_changed(key)) == set()


def test_a_warning_that_comes_back_is_recorded_again() -> None:
    here = Here()
    here.service("a", app="a")
    here.vmi("one", app="a")

    def warned(target: str | int) -> bool:
        ports = [{"name": "web", "port": 80, "targetPort": target}]
        here.put(here.services, "a", {"spec": {"selector": {"app": "a"}, "ports": ports}})
        inputs = Inputs(here.services.get("n/a"), datetime.now(UTC), 0.0, {})
        actions = here.index.controller().reconcile(Key(SERVICE, "n", "a"), inputs)
        return any(isinstance(one, RecordEvent) for one in actions)

    assert [warned(one) for one in ("tls", "tls", 443, "tls")] == [True, False, False, True]
