"""`deploy/kubernetes` in the test cluster, as its users apply it; only the pods run elsewhere."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from tests.kubernetes.cluster import CRDS, Cluster

from virtbus.documents.manifests import NAMESPACE

PLAIN = CRDS.parent / "manifests" / "virtbus.yaml"
ACCOUNT = "virtbus-kubebridge"
USER = f"system:serviceaccount:{NAMESPACE}:{ACCOUNT}"
GROUPS = ("system:serviceaccounts", f"system:serviceaccounts:{NAMESPACE}")

Json = dict[str, Any]


@contextmanager
def installed(cluster: Cluster, port: int, *, webhooks: bool = True) -> Iterator[Path]:
    """Apply the manifests, with a port of this machine as their Service; remove them on exit.

    Yields a kubeconfig of the bridge's service account: its user has exactly that account's
    rights. Without webhooks objects are as users made them: a bridge must handle those too.
    """
    objects = applied(cluster, port, webhooks=webhooks)
    try:
        yield account(cluster)
    finally:
        # The namespace stays: its deletion takes seconds, and the next test would create it again.
        ends = _list([one for one in objects if one["kind"] != "Namespace"])
        cluster.kubectl("delete", "--ignore-not-found", "--wait=false", "-f", "-", stdin=ends)


def applied(cluster: Cluster, port: int, *, webhooks: bool = True) -> list[Json]:
    """Apply the manifests without removal; return the applied objects."""
    objects = [one for one in _here(port) if webhooks or "webhooks" not in one]
    cluster.kubectl("apply", "-f", "-", stdin=_list(objects))
    return objects


def account(cluster: Cluster) -> Path:
    """Write a kubeconfig of the bridge's service account."""
    return cluster.kubeconfig_of(ACCOUNT, cluster.authority.sign(ACCOUNT, USER, groups=GROUPS))


def _list(objects: list[Json]) -> str:
    return json.dumps({"kind": "List", "apiVersion": "v1", "items": objects})


def _here(port: int) -> Iterator[Json]:
    """This cluster has no node and no network for pods."""
    for one in yaml.safe_load_all(PLAIN.read_text()):
        kind = one["kind"]
        if kind in {"Deployment", "PodDisruptionBudget"}:
            continue
        if kind == "Service":
            one["spec"] = {"type": "ExternalName", "externalName": "localhost"}
        if kind == "APIService":
            one["spec"]["service"]["port"] = port
        for webhook in one.get("webhooks", ()):
            webhook["clientConfig"]["service"]["port"] = port
        yield one
