"""Bad images as a user of kubectl sees them, with a real imaged and real guests."""

import asyncio
import base64
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from services.imaged.tests.docker_registry import Debian
from services.imaged.tests.registry_under_test import Registry, gz, tar
from services.imaged.tests.site_under_test import Web
from services.kubebridge.tests.manifests import find
from tests.e2e import host
from tests.e2e.platform import Platform, Stage, tiny_image, until
from tests.kubernetes.cluster import CRDS, Cluster, programs

from virtbus.kubebridge.core.objects.unstructured import text

pytestmark = [pytest.mark.kubernetes, pytest.mark.e2e, pytest.mark.timeout(600)]
Json = dict[str, Any]
PULLS = {"ErrImagePull", "ImagePullBackOff"}
WORDS = {
    "absent": "check repository and tag",
    "empty": "no file in /disk",
    "two": "more than one file",
    "hostile": "it needs its backing file",
    "private": "the registry denies",
}


def push(registry: Debian, name: str, *files: tuple[str, bytes]) -> None:
    images = Registry(Web())
    repository, _, tag = name.partition(":")
    images.push(repository, tag, gz(tar(*files)))
    asyncio.run(registry.push(images))


def vm(name: str, image: str, **disk: str) -> Json:
    """A VM of one disk and one network."""
    devices = {"interfaces": [{"name": "default", "masquerade": {}}]}
    spec = {
        "domain": {"memory": {"guest": "128Mi"}, "devices": devices},
        "networks": [{"name": "default", "pod": {}}],
        "terminationGracePeriodSeconds": 0,
        "volumes": [{"name": "root", "containerDisk": {"image": image, **disk}}],
    }
    return {
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachine",
        "metadata": {"name": name},
        "spec": {"runStrategy": "Always", "template": {"spec": spec}},
    }


@contextmanager
def bridge(platform: Platform, cluster: Cluster) -> Iterator[Path]:
    """The bridge's program; its log."""
    cluster.kubectl("create", "namespace", "kubevirt")
    log = platform.base / "bridge.log"
    here = {"VIRTBUS_KUBECONFIG": str(cluster.kubeconfig), "VIRTBUS_LISTEN": "127.0.0.1:0"}
    environ = platform.environ | here
    with log.open("ab") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "virtbus.kubebridge"], env=environ, stdout=out, stderr=out
        )
    try:
        until(lambda: "ready" in log.read_text(), lambda: log.read_text()[-3000:])
        yield log
    finally:
        process.terminate()
        process.wait(20)


@pytest.fixture
def registries(tmp_path: Path) -> Iterator[tuple[Debian, Debian]]:
    """One that is open, one that is private."""
    with ExitStack() as stack:
        made = []
        for number, private in enumerate((False, True)):
            place = tmp_path / str(number)
            place.mkdir()
            made.append(Debian(place, private=private))
            stack.enter_context(made[-1].running())
        yield made[0], made[1]


def qcow2(tmp_path: Path, *more: str) -> bytes:
    disk = tmp_path / "made.qcow2"
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", *more, disk, "1M"], check=True)
    return disk.read_bytes()


@pytest.fixture
def alone() -> Iterator[Cluster]:
    """A cluster without another bridge."""
    host.refuse_the_machines_own_network()
    folder = programs()
    assert folder is not None, "not built; run: make k8s-tools"
    with Cluster(folder) as cluster:
        cluster.kubectl("apply", "-f", str(CRDS))
        cluster.kubectl("wait", "--for=condition=Established", "--timeout=60s", "-f", str(CRDS))
        yield cluster


@pytest.mark.long
def test_bad_images_are_reported_and_work_after_a_repair(
    alone: Cluster, registries: tuple[Debian, Debian], tmp_path: Path
) -> None:
    openly, private = registries
    tiny = ("disk/tiny.qcow2", tiny_image().read_bytes())
    hostile = qcow2(tmp_path, "-u", "-b", "/etc/shadow", "-F", "raw")
    bad: dict[str, list[tuple[str, bytes]]] = {
        "absent": [],
        "empty": [("etc/x", b"x")],
        "two": [tiny, ("disk/other.qcow2", b"x")],
        "hostile": [("disk/a.qcow2", hostile)],
        "garbage": [("disk/a.qcow2", b"QFI\xfb" + b"\xff" * 4096)],
    }
    for name, files in bad.items():
        if files:
            push(openly, f"team/{name}:1", *files)
    push(private, "team/private:1", tiny)
    environ = {
        "VIRTBUS_INSECURE_REGISTRIES": json.dumps([openly.host, private.host]),
        "VIRTBUS_IMAGE_ADDRESSES": json.dumps(["127.0.0.0/8"]),
    }
    names = {*bad, "private"}
    absent_secret = "Secret login does not exist"
    with (
        alone.namespace("images") as ns,
        Stage().apart(environ) as platform,
    ):

        def apply(*objects: Json) -> None:
            whole = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
            alone.kubectl("apply", "-n", ns, "-f", "-", stdin=json.dumps(whole))

        def shown() -> dict[str, str]:
            items = alone.get("-n", ns, "vm")["items"]
            return {
                one["metadata"]["name"]: one.get("status", {}).get("printableStatus", "")
                for one in items
            }

        def why() -> dict[str, str]:
            items = alone.get("-n", ns, "vmi")["items"]
            return {
                one["metadata"]["name"]: text(
                    find(one.get("status", {}).get("conditions", ()), "Synchronized"), "message"
                )
                for one in items
            }

        with bridge(platform, alone):
            apply(
                *(vm(name, f"{openly.host}/team/{name}:1") for name in bad),
                vm("private", f"{private.host}/team/private:1"),
                vm("login", f"{private.host}/team/private:1", imagePullSecret="login"),
            )
            until(
                lambda: {n for n, s in shown().items() if s in PULLS} == names, lambda: str(shown())
            )
            until(lambda: absent_secret in why()["login"], "it waits for the Secret")
            told = why()
            assert {name: word in told[name] for name, word in WORDS.items()} == dict.fromkeys(
                WORDS, True
            ), told
            for name in bad:
                push(openly, f"team/{name}:1", tiny)
            login = {"auths": {private.host: {"auth": base64.b64encode(b"me:secret").decode()}}}
            secret = {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {"name": "login"},
                "type": "kubernetes.io/dockerconfigjson",
                "stringData": {".dockerconfigjson": json.dumps(login)},
            }
            apply(secret)
            running = dict.fromkeys({*bad, "login"}, "Running")
            until(
                lambda: {n: s for n, s in shown().items() if n != "private"} == running,
                lambda: str(shown()),
                within_s=120,
            )
            alone.kubectl("delete", "vm", "--all", "-n", ns, "--timeout=60s")
            until(lambda: platform.vms() == [], "nothing is left on the bus")
        platform.nothing_left()
