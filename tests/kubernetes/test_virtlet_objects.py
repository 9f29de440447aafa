"""A real API server: Virtlet's objects reach imaged's names, with the manifest's rights only."""

import asyncio
import base64
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.kubernetes.cluster import ROOT, Cluster

from virtbus.cri.core.configs import SandboxConfig, SandboxMetadata
from virtbus.cri.edge import cluster as edge
from virtbus.cri.edge.store import Store
from virtbus.cri.edge.virtlet_reads import VirtletReads
from virtbus.cri.virtlet_objects import VirtletObjects
from virtbus.imaged.edge.alias_files import AliasFiles
from virtbus.schemas.errors import VirtbusError

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(300)]
MANIFEST = ROOT / "cli/src/virtbus/cli/cri/manifests/virtlet.yaml"
SPACE = "virtlet-objects"
KEY = "ssh-rsa AAAAB3NzaC1yc2E mine"
OBJECTS = """
apiVersion: virtlet.k8s/v1
kind: VirtletImageMapping
metadata: {name: primary, namespace: kube-system}
spec: {prefix: corp, translations: [{regexp: 'u(.*)', url: 'https://images.example/$1.img'}]}
---
apiVersion: virtlet.k8s/v1
kind: VirtletConfigMapping
metadata: {name: http, namespace: kube-system}
spec: {nodeSelector: {rack: "1"}, config: {downloadProtocol: http, logLevel: 3}}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: virtlet-image-translations, namespace: kube-system}
data: {"a.yaml": "translations: [{name: cirros, url: 'https://images.example/cirros.img'}]"}
---
apiVersion: v1
kind: Node
metadata: {name: virtlet-node, labels: {kubernetes.io/hostname: virtlet-host, rack: "1"}}
"""


@pytest.fixture
def kubeconfig(cluster: Cluster, tmp_path: Path) -> Iterator[Path]:
    """The kubeconfig of the manifest's account, as docs/howto/virtlet-pods.md makes it."""
    cluster.kubectl("apply", "-f", str(MANIFEST))
    objects = tmp_path / "objects.yaml"
    objects.write_text(OBJECTS)
    cluster.kubectl("create", "namespace", SPACE)
    try:
        for kind in ("virtletimagemappings", "virtletconfigmappings"):
            crd = f"crd/{kind}.virtlet.k8s"
            cluster.kubectl("wait", "--for=condition=Established", "--timeout=60s", crd)
        cluster.kubectl("apply", "-f", str(objects))
        token = cluster.kubectl("-n", "kube-system", "create", "token", "virtbus-cri").strip()
        authority = base64.b64encode(cluster.authority.certificate.read_bytes()).decode()
        server = {"server": cluster.url, "certificate-authority-data": authority}
        whole = {
            "current-context": "x",
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "clusters": [{"name": "c", "cluster": server}],
            "users": [{"name": "u", "user": {"token": token}}],
        }
        path = tmp_path / "kubeconfig"
        path.write_text(json.dumps(whole))
        yield path
    finally:
        for file in (objects, MANIFEST):
            cluster.kubectl("delete", "--ignore-not-found", "-f", str(file))
        cluster.kubectl("delete", "namespace", SPACE)


async def test_objects_of_a_cluster_name_images_and_set_this_node(
    cluster: Cluster, kubeconfig: Path, tmp_path: Path
) -> None:
    store, names = Store(tmp_path / "state"), tmp_path / "image-names"
    names.mkdir()
    store.open()

    async def hostname() -> str:
        return "virtlet-host"

    objects = VirtletObjects(edge.Cluster(kubeconfig), store.cluster, names, hostname)
    await objects.load()
    table = AliasFiles(tmp_path / "images.d", {}, (str(tmp_path),), names)

    def refs() -> tuple[str, ...]:
        found = []
        for name in ("corp/ubuntu", "cirros"):
            try:
                found.append(table.resolve(name).source.ref)
            except VirtbusError:
                found.append("")
        return tuple(found)

    async def until(wanted: tuple[str, ...]) -> None:
        async with asyncio.timeout(60):
            while refs() != wanted:
                await asyncio.sleep(0.1)

    here = "https://images.example"
    async with asyncio.TaskGroup() as group:
        following = group.create_task(objects.run())
        await until((f"{here}/buntu.img", f"{here}/cirros.img"))
        async with asyncio.timeout(60):
            while objects.config.scheme != "http":
                await asyncio.sleep(0.1)
        await asyncio.to_thread(
            cluster.kubectl, "-n", "kube-system", "delete", "virtletimagemapping", "primary"
        )
        await until(("", f"{here}/cirros.img"))
        following.cancel()
    store.close()


async def test_a_secret_of_an_annotation_needs_a_binding_in_its_namespace(
    cluster: Cluster, kubeconfig: Path
) -> None:
    cluster.kubectl(
        "-n", SPACE, "create", "secret", "generic", "keys", f"--from-literal=authorized_keys={KEY}"
    )
    reads = VirtletReads(edge.Cluster(kubeconfig))
    sandbox = SandboxConfig(
        metadata=SandboxMetadata(name="a", uid="b", namespace=SPACE),
        annotations={"VirtletSSHKeySource": "secret/keys"},
    )
    with pytest.raises(VirtbusError) as caught:
        await reads.contents(sandbox)
    assert caught.value.reason == "cluster_refused"
    cluster.kubectl(
        *("-n", SPACE, "create", "rolebinding", "virtbus-cri"),
        *("--clusterrole=virtbus-cri-sources", "--serviceaccount=kube-system:virtbus-cri"),
    )

    async def keys() -> bytes:
        try:
            return (await reads.contents(sandbox))["VirtletSSHKeySource"]["authorized_keys"]
        except VirtbusError:
            return b""

    async with asyncio.timeout(60):
        while await keys() != KEY.encode():
            await asyncio.sleep(0.2)
