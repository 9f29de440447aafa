"""A change of a guest reconciles only the Services that select it."""

import asyncio
from typing import Any, cast

from virtbus.kubebridge.core.service.endpoint_slices import MANAGED_BY
from virtbus.kubebridge.edge.cluster import Cluster
from virtbus.kubebridge.edge.objects import Objects
from virtbus.kubebridge.edge.service_slices import Followed, ServiceSlices
from virtbus.schemas.network import InterfaceStatus

NIC = InterfaceStatus(name="default", mac="02:00:00:00:00:01", addresses=("10.1.0.7/24",))
Json = dict[str, Any]


class Here:
    """The caches, and the Services that a change reconciles."""

    def __init__(self) -> None:
        self.followed = Followed(Objects(), Objects(), Objects())
        nothing = cast("Cluster", None)
        self._slices = ServiceSlices(
            nothing, self.followed, lambda _: (NIC,), lambda *_: None, asyncio.Event()
        )
        self._version = 0

    def put(self, cache: Objects, name: str, body: Json, **meta: Any) -> None:
        self._version += 1
        own = {"name": name, "namespace": "n", "uid": name, "resourceVersion": str(self._version)}
        cache.put({"metadata": own | meta, **body})

    def service(self, name: str, **selector: str) -> None:
        self.put(self.followed.services, name, {"spec": {"selector": selector}})

    def vmi(self, name: str, phase: str = "Running", **labels: str) -> None:
        self.put(self.followed.vmis, name, {"status": {"phase": phase}}, labels=labels)

    def looked(self) -> set[str]:
        return {name.removeprefix("n/") for name in self._slices._take()}


def test_a_changed_guest_reconciles_the_services_that_select_it() -> None:
    here = Here()
    for name in ("a", "b"):
        here.service(name, app=name)
    here.service("all", **{"kubevirt.io": "virt-launcher"})
    here.put(here.followed.services, "none", {"spec": {}})
    assert here.looked() == {"a", "b", "all", "none"}
    here.vmi("one", app="a")
    assert here.looked() == {"a", "all"}
    here.vmi("one", app="a")  # no change for Services
    assert here.looked() == set()
    here.vmi("one", app="b")
    assert here.looked() == {"a", "b", "all"}
    here.vmi("one", "Succeeded", app="b")
    assert here.looked() == {"b", "all"}
    here.followed.vmis.drop("n/one")
    assert here.looked() == set()


def test_a_changed_selector_or_slice_reconciles_its_service() -> None:
    here = Here()
    here.vmi("one", app="a")
    here.service("a")
    assert here.looked() == {"a"}
    here.service("a", app="a")
    assert here.looked() == {"a"}
    labels = {MANAGED_BY: "us", "kubernetes.io/service-name": "a"}
    here.put(here.followed.slices, "a-virtbus-ipv4-0", {}, labels=labels)
    assert here.looked() == {"a"}
    here.followed.services.drop("n/a")
    assert here.looked() == {"a"}
    here.vmi("one", "Failed", app="a")
    assert here.looked() == set()
