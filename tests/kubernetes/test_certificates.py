"""The bridge's certificates in a real cluster, made and published with its rights there."""

import asyncio
import base64
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from cryptography import x509
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.installed import installed

from virtbus.bus.runtime.sources import REAL
from virtbus.documents.manifests import NAMESPACE
from virtbus.kubebridge.core.runtime import controller as kinds
from virtbus.kubebridge.edge.certificates import (
    API_SERVICES,
    SECRET_NAME,
    WEBHOOKS,
    Certificates,
)
from virtbus.kubebridge.edge.cluster import connect

pytestmark = pytest.mark.kubernetes

DAY_NS = 24 * 3600 * 10**9
PORT = 1
"""Nobody is called here."""


class Shown(NamedTuple):
    """The certificates of the replicas, in the order in which they served them."""

    certificates: list[str]

    def show(self, certificate: Path, key: Path) -> None:
        assert "PRIVATE KEY" in key.read_text()
        self.certificates.append(certificate.read_text())


@pytest.fixture
def bridge(kubevirt: Cluster) -> Iterator[Path]:
    with installed(kubevirt, PORT) as kubeconfig:
        yield kubeconfig
        gone = ("delete", "secret", "-n", NAMESPACE, SECRET_NAME, "--ignore-not-found")
        kubevirt.kubectl(*gone)


def bundles(cluster: Cluster) -> set[str]:
    """The CA certificates of the API servers' configuration, PEM."""
    names = [f"{kinds.API_SERVICE.plural}/{name}" for name in API_SERVICES]
    names += [f"{kind.plural}/{WEBHOOKS}" for kind in (kinds.MUTATING, kinds.VALIDATING)]
    told = set()
    for one in cluster.get(*names)["items"]:
        holders = [one["spec"]] if "spec" in one else [w["clientConfig"] for w in one["webhooks"]]
        told |= {holder.get("caBundle", "") for holder in holders}
    return {base64.b64decode(one).decode() for one in told}


async def looks(kubeconfig: Path, shown: Shown, *, days: int = 0, replicas: int = 1) -> None:
    """One reconcile of each replica, at once, some days from now."""
    later = replace(REAL, time_ns=lambda: time.time_ns() + days * DAY_NS)
    async with connect(kubeconfig) as cluster, asyncio.TaskGroup() as group:
        for _ in range(replicas):
            keeper = Certificates(cluster, NAMESPACE, shown.show, sources=later)
            group.create_task(keeper.ensure())


def test_replicas_that_start_at_once_make_one_certificate(kubevirt: Cluster, bridge: Path) -> None:
    shown = Shown([])
    asyncio.run(looks(bridge, shown, replicas=3))
    assert len(shown.certificates) == 3
    (served,) = set(shown.certificates)
    (told,) = bundles(kubevirt)
    signer = x509.load_pem_x509_certificate(told.encode())
    x509.load_pem_x509_certificate(served.encode()).verify_directly_issued_by(signer)


def test_over_the_years_every_served_certificate_has_a_published_authority(
    kubevirt: Cluster, bridge: Path
) -> None:
    shown = Shown([])
    asyncio.run(looks(bridge, shown))
    (known,) = bundles(kubevirt)
    for days in range(40, 440, 40):
        asyncio.run(looks(bridge, shown, days=days))
        served = x509.load_pem_x509_certificate(shown.certificates[-1].encode())
        issuers = [one.subject for one in x509.load_pem_x509_certificates(known.encode())]
        assert served.issuer in issuers
        (known,) = bundles(kubevirt)
    assert len(set(shown.certificates)) > 4


def test_a_lost_secret_is_made_again_and_reported(kubevirt: Cluster, bridge: Path) -> None:
    shown = Shown([])
    asyncio.run(looks(bridge, shown))
    before = bundles(kubevirt)
    kubevirt.kubectl("delete", "secret", "-n", NAMESPACE, SECRET_NAME)
    asyncio.run(looks(bridge, shown))
    assert bundles(kubevirt).isdisjoint(before)
    assert len(set(shown.certificates)) == 2


def test_certificates_of_others_are_only_served(
    kubevirt: Cluster, bridge: Path, tmp_path: Path
) -> None:
    pair = kubevirt.authority.sign("own", "own", hosts=["virtbus-kubebridge.kubevirt.svc"])
    (tmp_path / "tls.crt").write_bytes(pair.certificate.read_bytes())
    (tmp_path / "tls.key").write_bytes(pair.key.read_bytes())
    shown = Shown([])

    async def look_twice() -> None:
        async with connect(bridge) as cluster:
            keeper = Certificates(cluster, NAMESPACE, shown.show, tmp_path)
            await keeper.ensure()
            await keeper.ensure()
            other = kubevirt.authority.sign("own", "own", hosts=["other.svc"])
            (tmp_path / "tls.crt").write_bytes(other.certificate.read_bytes())
            (tmp_path / "tls.key").write_bytes(other.key.read_bytes())
            await keeper.ensure()

    asyncio.run(look_twice())
    assert len(shown.certificates) == 2
    assert bundles(kubevirt) == {""}
    assert kubevirt.try_kubectl("get", "secret", "-n", NAMESPACE, SECRET_NAME).returncode != 0


def test_the_bridge_may_change_no_other_secret_or_webhook(kubevirt: Cluster, bridge: Path) -> None:
    """A right that the role lacks fails here; so does an excessive right."""
    for asked in (
        ("list", "secrets", "-A"),
        ("update", "secrets/other", "-n", NAMESPACE),
        ("create", "secrets", "-n", "default"),
        ("delete", "secrets", "-n", NAMESPACE),
        ("patch", "validatingwebhookconfigurations/other"),
        ("patch", "apiservices/v1.apps"),
        ("create", "virtualmachines.kubevirt.io", "-n", "default"),
        ("delete", "virtualmachines.kubevirt.io", "-n", "default"),
        ("list", "pods", "-A"),
        ("create", "pods", "-n", "default"),
        ("update", "clusterroles"),
        ("delete", "nodes"),
        ("impersonate", "users"),
    ):
        said = kubevirt.try_kubectl("auth", "can-i", *asked, kubeconfig=bridge)
        assert said.stdout.strip() == "no", asked
