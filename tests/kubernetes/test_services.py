"""Services of a real cluster select guests, next to the slices that Kubernetes makes for pods."""

import json
from typing import Any

import pytest
import yaml
from tests.kubernetes.platform import SMOKE, Platform, until

from virtbus.kubebridge.core.service.endpoint_slices import MANAGED_BY, SELECTOR

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(300)]
Json = dict[str, Any]
STOCK = f"{MANAGED_BY}=endpointslice-controller.k8s.io"


def vms(count: int) -> list[Json]:
    made = yaml.safe_load(SMOKE.read_text())
    made["spec"]["template"]["metadata"] = {"labels": {"app": "web"}}
    return [{**made, "metadata": {"name": f"vm-{number}"}} for number in range(count)]


def service(name: str, **spec: Any) -> Json:
    ports = [{"name": "http", "port": 80, "targetPort": 8080}]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {"selector": {"app": "web"}, "ports": ports} | spec,
    }


def slices(platform: Platform, ns: str, selector: str = SELECTOR) -> list[Json]:
    found = platform.cluster.get("-n", ns, "endpointslices", "-l", selector)
    return [one for one in found["items"] if selector != SELECTOR or one.get("endpoints")]


def shown(platform: Platform, ns: str) -> dict[str, bool]:
    """Return whether each of our endpoints is ready, by the name of its VMI."""
    ends = [end for one in slices(platform, ns) for end in one["endpoints"]]
    return {end["targetRef"]["name"]: end["conditions"]["ready"] for end in ends}


def test_a_service_has_its_selected_guests_next_to_kubernetes_own_slices(
    platform: Platform,
) -> None:
    cluster = platform.cluster
    with cluster.namespace("selected") as ns:
        platform.apply(ns, service("web"), *vms(6))
        every = {f"vm-{number}": True for number in range(6)}
        until("all are ready", lambda: shown(platform, ns) == every)
        (theirs,) = slices(platform, ns, STOCK)  # without pods, and it does not change ours
        assert not theirs.get("endpoints")
        (ours,) = slices(platform, ns)
        addresses = {one["interfaces"][0]["addresses"][0] for one in platform.vms(ns).values()}
        assert {f"{end['addresses'][0]}" for end in ours["endpoints"]} == {
            one.partition("/")[0] for one in addresses
        }
        platform.ask("pause", uid=platform.vms(ns)["vm-0"]["uid"])
        until("a paused one is not", lambda: shown(platform, ns) == every | {"vm-0": False})
        cluster.kubectl("annotate", "-n", ns, "vmi/vm-2", "x=y")
        cluster.kubectl("annotate", "-n", ns, "service/web", "x=y")
        before = slices(platform, ns)[0]["metadata"]["generation"]
        cluster.kubectl("delete", "-n", ns, "vm", "vm-1", "--timeout=60s")
        until("one is gone", lambda: set(shown(platform, ns)) == {*every} - {"vm-1"})
        # not ready while it ended, then gone: nothing else was written
        assert slices(platform, ns)[0]["metadata"]["generation"] <= before + 2
        cluster.kubectl("delete", "-n", ns, "service/web")
        until("they go with their Service", lambda: shown(platform, ns) == {})
        platform.apply(ns, service("late"))
        until("a later one has them", lambda: set(shown(platform, ns)) == {*every} - {"vm-1"})
        cluster.kubectl("delete", "-n", ns, "vm", "--all", "--timeout=60s")
        until("nothing is left on the bus", lambda: not platform.vms(ns))


def test_external_edits_are_reverted_and_a_named_port_is_reported(
    platform: Platform,
) -> None:
    cluster = platform.cluster
    named = [{"name": "s", "port": 443, "targetPort": "tls"}]
    with cluster.namespace("mended") as ns:
        headless, odd = service("web", clusterIP="None"), service("named", ports=named)
        platform.apply(ns, headless, odd, *vms(1))

        def whole() -> bool:
            return [bool(one.get("ports")) for one in slices(platform, ns)] == [True]

        until("it is there", whole)
        (made,) = slices(platform, ns)
        assert made["metadata"]["labels"]["service.kubernetes.io/headless"] == ""
        name = f"endpointslice/{made['metadata']['name']}"
        lie = json.dumps({"endpoints": None, "ports": None})
        cluster.kubectl("patch", "-n", ns, name, "--type=merge", "-p", lie)
        until("it is mended", whole)
        cluster.kubectl("delete", "-n", ns, name)
        until("it is made again", whole)

        def told() -> list[str]:
            events = cluster.get("-n", ns, "events")["items"]
            return [one["message"] for one in events if one["reason"] == "UnresolvedPort"]

        until("the named port is told", told)
        assert "targetPort tls" in told()[0]
        cluster.kubectl("delete", "-n", ns, "vm", "--all", "--timeout=60s")
        until("nothing is left on the bus", lambda: not platform.vms(ns))
