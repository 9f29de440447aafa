"""Real guests, a real API server, and the bridge between them, installed by its manifests."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import yaml
from services.imaged.tests.docker_registry import Debian
from services.imaged.tests.registry_under_test import Registry, gz, tar
from services.imaged.tests.site_under_test import Web
from tests.e2e.platform import Platform, Refused, Stage, until
from tests.kubernetes import virtctl
from tests.kubernetes.aggregated import GROUP
from tests.kubernetes.cluster import ROOT, Cluster, Program
from tests.kubernetes.installed import installed
from tests.kubernetes.virtctl import Virtctl
from tests.load.servers import free_ports

from virtbus.documents.manifests import NAMESPACE

SEED = ROOT / "services/kubebridge/tests/kubevirt-smoke-fedora.yaml"
IMAGE = "kubevirt/fedora-cloud-container-disk-demo"
"""The name in the seed's manifest."""
VM_S = 120.0

NOT_FOUND = 3
"""The exit code of `virtbus` for a VM that is not there."""

Json = dict[str, Any]


class Bridged:
    """The parts of a test. `base` is a namespace of Kubernetes and of virtbus."""

    def __init__(self, cluster: Cluster, platform: Platform, namespace: str) -> None:
        self.cluster = cluster
        self.platform = platform
        self.namespace = namespace

    def kubectl(self, *argv: str, stdin: str | None = None) -> str:
        return self.cluster.kubectl(*argv, "-n", self.namespace, stdin=stdin)

    def apply(self, manifest: Json) -> None:
        self.kubectl("apply", "-f", "-", stdin=json.dumps(manifest))

    def get(self, kind: str, name: str) -> Json:
        return self.cluster.get(kind, name, "-n", self.namespace)

    def wait(self, *argv: str, within_s: float = VM_S) -> None:
        """Run `kubectl wait`."""
        self.kubectl("wait", *argv, f"--timeout={within_s:g}s")

    def log(self, name: str) -> str:
        """Return the output of the guest's console; nothing before the bridge has made its VM."""
        done = self.platform.try_cli("vm", "logs", name, "-n", self.namespace)
        if done.returncode not in (0, NOT_FOUND):
            raise Refused(("vm", "logs", name), done)
        return done.stdout

    def said(self, name: str, word: str, *, times: int = 1, within_s: float = VM_S) -> None:
        """Wait until the guest's console has shown `word` this often."""
        until(
            lambda: self.log(name).count(word) >= times,
            lambda: self.log(name)[-3000:],
            within_s=within_s,
        )

    @asynccontextmanager
    async def virtctl(self) -> AsyncIterator[Virtctl]:
        """Make virtctl's calls, as the administrator."""
        authority = self.cluster.authority
        context = virtctl.login(
            authority, authority.sign("root", "root", groups=["system:masters"])
        )
        async with virtctl.session(context) as session:
            yield Virtctl(session, self.cluster.url, self.namespace)


def manifest(name: str, user_data: str = "#cloud-config\n", **domain: Any) -> Json:
    """Return the seed's manifest for the guest `tiny`: smaller, with other user data."""
    made: Json = yaml.safe_load(SEED.read_text())
    made["metadata"]["name"] = name
    spec = made["spec"]["template"]["spec"]
    spec["domain"]["resources"]["requests"]["memory"] = "128Mi"
    spec["domain"] |= domain
    spec["terminationGracePeriodSeconds"] = 60
    for volume in spec["volumes"]:
        if "cloudInitNoCloud" in volume:
            volume["cloudInitNoCloud"] = {"userData": user_data}
    return made


@contextmanager
def bridged(stage: Stage, cluster: Cluster, disk: Path, place: Path) -> Iterator[Bridged]:
    """Yield all parts, ready; the seed's image is `disk`, in a registry of this machine."""
    registry = Debian(place)
    with registry.running():
        images = Registry(Web())
        images.push(IMAGE, "latest", gz(tar((f"disk/{disk.name}", disk.read_bytes()))))
        asyncio.run(registry.push(images))
        environ = {
            "VIRTBUS_INSECURE_REGISTRIES": json.dumps([registry.host]),
            "VIRTBUS_IMAGE_ADDRESSES": json.dumps(["127.0.0.0/8"]),
            "VIRTBUS_REGISTRY_MIRRORS": json.dumps({"docker.io": registry.host}),
        }
        with stage.apart(environ) as platform:
            with _installed(cluster, platform), cluster.namespace("guests") as namespace:
                made = Bridged(cluster, platform, namespace)
                try:
                    yield made
                finally:
                    made.kubectl("delete", "vm,vmi", "--all", f"--timeout={VM_S:g}s")
            platform.nothing_left()


@contextmanager
def _installed(cluster: Cluster, platform: Platform) -> Iterator[None]:
    (port,) = free_ports(1)
    with installed(cluster, port) as kubeconfig:
        bridge = Program(
            [
                *(sys.executable, "-m", "virtbus.kubebridge"),
                *("--kubeconfig", str(kubeconfig), "--namespace", NAMESPACE),
                *("--listen", f"127.0.0.1:{port}", "--run-dir", str(platform.run_dir)),
            ],
            platform.base / "kubebridge.log",
        )
        bridge.start()
        try:
            until(lambda: bridge.ended() or _answers(cluster), "the aggregated API")
            assert not bridge.ended()
            yield
        except BaseException:
            sys.stdout.write(bridge.log.read_text()[-20_000:])
            raise
        finally:
            bridge.stop()


def _answers(cluster: Cluster) -> bool:
    paths = (f"/apis/{GROUP}/{version}/version" for version in ("v1", "v1alpha3"))
    return all(cluster.try_kubectl("get", "--raw", path).returncode == 0 for path in paths)
