"""Virtlet's example manifests on a real node: each guest lets its user in.

CirrOS is the guest `tiny`, and the other systems are the guest `debian`, by an image mapping.
"""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import yaml
from services.cri.tests.virtlet_examples import EXAMPLES, FOLDER, RBD
from tests.e2e.login import Login
from tests.e2e.platform import until
from tests.e2e.test_debian import debian_image
from tests.kubernetes.container_host import NAME
from tests.kubernetes.pod_node import Json, PodNode
from tests.kubernetes.virtlet_manifests import DOCKER, GIVEN, LABELS, MIB, Paths, as_list, manifest

pytestmark = [
    pytest.mark.kubernetes,
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.timeout(3000),
]

BOOT_S = 2400.0
"""A minute for each guest on an idle machine without KVM; a crowded one takes far longer."""
TOGETHER = (
    (
        *("cirros-vm", "cirros-vm-deployment", "cirros-vm-raw-device"),
        *("cirros-vm-volume-mount", "cirros-vm-with-additional-annotations"),
        "cirros-vm-persistent-rootfs-local",
    ),
    ("debian-vm", "fedora-vm", "ubuntu-vm"),
    ("fedora-vm-with-testuser", "ubuntu-multi-cni", "ubuntu-vm-with-testuser"),
    ("ubuntu-vm-local-block-pv", "ubuntu-vm-with-libvirt-cpusetting", "ubuntu-vm-with-volume"),
    ("k8s", "ubuntu-vm-hostpath-pv", "ubuntu-vm-with-nested-virtualization"),
)
"""Examples that run at the same time; some of Virtlet's have the same names of objects."""
PASSWORD = {"ubuntu-multi-cni": "testuser"}
"""Examples whose only login is a password, which is also the user's name."""
CNI = ("calico", "flannel")
"""The networks in the annotation of `ubuntu-multi-cni`."""
NONE = {"cirros-vm-raw-device"}
"""Examples without a login: the console of the guest is one."""
TESTUSERS = {"fedora-vm-with-testuser", "ubuntu-vm-with-testuser"}
ROOTS = {"cirros": "root", "k8s": "root"}
"""The user by the first word of an example's name; others have Debian's."""
USES = {
    "ubuntu-vm-local-block-pv": ("findmnt -n /mnt", "ext4"),
    "ubuntu-vm-with-volume": ("findmnt -n -t ext4 -o TARGET", DOCKER),
    "ubuntu-vm-hostpath-pv": ("findmnt -n -t virtiofs", "/home/"),
}
"""The command that shows an example's volume in its guest, and a part of its answer."""
VOLUMES = {"PersistentVolume", "PersistentVolumeClaim"}
MAPPING = {
    "apiVersion": "virtlet.k8s/v1",
    "kind": "VirtletImageMapping",
    "metadata": {"name": "primary", "namespace": "kube-system"},
}


def test_all_examples_but_those_of_missing_servers_are_tried() -> None:
    tried = {name for names in TOGETHER for name in names}
    assert set(EXAMPLES) - tried == {"ubuntu-vm-nfs-pv"} | {
        name for name, one in EXAMPLES.items() if one.volume == RBD
    }
    assert len(tried) / len(EXAMPLES) >= 0.8
    assert EXAMPLES["ubuntu-vm-nfs-pv"].volume == FOLDER


@pytest.fixture(scope="module")
def node(pod_node: PodNode) -> Iterator[PodNode]:
    """The node with the labels, image names and devices of the manifests."""
    platform = pod_node.platform
    sources = platform.state_dir / "images/src"
    (sources / "debian.qcow2").write_bytes(debian_image().read_bytes())
    names = {"cirros": "tiny", "fedora": "debian", ".*/.*": "debian"}
    translations = [
        {"name" if "*" not in name else "regexp": name, "url": f"file://{sources}/{file}.qcow2"}
        for name, file in names.items()
    ]
    mapping = {**MAPPING, "spec": {"translations": translations}}
    (platform.base / "images.d" / "virtlet.yaml").write_text(yaml.safe_dump(mapping))
    for subnet, name in enumerate(CNI):
        words = ("--kind", "isolated", "--subnet", f"10.20{subnet}.0.0/24")
        platform.cli("network", "create", name, *words)
    labels = [f"{key}={value}" for key, value in LABELS.items()]
    pod_node.cluster.kubectl("label", "node", NAME, *labels, "--overwrite")
    with _prepared(Paths(platform.base)):
        yield pod_node
    former = ("extraRuntime-", f"kubernetes.io/hostname={NAME}")
    pod_node.cluster.kubectl("label", "node", NAME, *former, "--overwrite")
    for name in CNI:
        platform.cli("network", "delete", name)


@contextmanager
def _prepared(paths: Paths) -> Iterator[None]:
    """Make what the manifests' comments ask for."""
    with ExitStack() as stack:
        if not paths.data.parent.exists():
            stack.callback(shutil.rmtree, paths.data.parent)
        stack.callback(shutil.rmtree, paths.folder)
        paths.folder.mkdir(parents=True)
        (paths.folder / "shared").write_text("of the node")
        for path in (paths.data, paths.data.parent / "rawtest"):
            with path.open("wb") as file:
                file.truncate(1000 * MIB)
            stack.callback(path.unlink, missing_ok=True)
        subprocess.run(["mkfs.ext4", "-q", str(paths.data)], check=True)
        argv = ["losetup", "--find", "--show", str(paths.data.parent / "rawtest")]
        device = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()
        stack.callback(subprocess.run, ["losetup", "--detach", device], check=True)
        paths.rootdev.symlink_to(device)
        stack.callback(paths.rootdev.unlink)
        yield


@pytest.fixture(scope="module")
def login(tmp_path_factory: pytest.TempPathFactory) -> Login:
    """Logins with the key of the manifests."""
    folder = tmp_path_factory.mktemp("login")
    return Login(folder, key=Path(GIVEN, "vmkey") if GIVEN else None)


@pytest.mark.parametrize("names", TOGETHER, ids="+".join)
def test_the_guest_of_an_example_lets_its_user_in(
    node: PodNode, login: Login, names: tuple[str, ...]
) -> None:
    key = Path(login.public_key).read_text().strip()
    objects = {name: manifest(name, key, Paths(node.platform.base)) for name in names}
    try:
        for each in objects.values():
            node.kubectl("apply", "-f", "-", stdin=as_list(each))
        for name, each in objects.items():
            _reaches_its_login(node, login, name, each)
    finally:
        for each in objects.values():
            pods = [one for one in each if one["kind"] not in VOLUMES]
            node.kubectl(
                "delete", "--ignore-not-found", "-f", "-", "--wait=false", stdin=as_list(pods)
            )
        until(lambda: not node.vms(), "the VMs are gone with their pods", within_s=300)
        _release(node)
        for each in objects.values():
            node.kubectl("delete", "--ignore-not-found", "-f", "-", stdin=as_list(each))


def _release(node: PodNode) -> None:
    """Unmount the files that are block volumes, as an operator has to.

    kubelet mounts such a file for its device, but at the end of the pod it unmounts devices only.
    """
    plugins = f"{node.host.base}/kubelet/plugins/"
    for line in Path("/proc/mounts").read_text().splitlines():
        mount = Path(line.split()[1])
        if str(mount).startswith(plugins) and "volumeDevices" in mount.parts and mount.is_file():
            subprocess.run(["umount", str(mount)], check=True)


def _reaches_its_login(node: PodNode, login: Login, name: str, objects: list[Json]) -> None:
    pod: str = until(lambda: _pod_of(node, objects), f"{name} has a pod")
    node.wait("condition=Ready", f"pod/{pod}", within_s=BOOT_S)
    if name in NONE:
        node.logged(pod, b"GUEST-READY", within_s=BOOT_S)
        _on_the_console(node, pod)
    elif name in PASSWORD:
        _by_password(node, pod, PASSWORD[name].encode())
    else:
        _by_key(node, login, name, pod)


def _pod_of(node: PodNode, objects: list[Json]) -> str:
    """Return the name of the first pod of a manifest, once there is one."""
    (owner,) = [one for one in objects if one["kind"] in {"Pod", "Deployment", "StatefulSet"}]
    name: str = owner["metadata"]["name"]
    if owner["kind"] == "Pod":
        return name
    return next((pod for pod in sorted(node.pods()) if pod.startswith(f"{name}-")), "")


def _on_the_console(node: PodNode, pod: str) -> None:
    with node.terminal("attach", "-it", pod) as user:
        user.type(b"\necho at$((1+1))ached\n")
        user.until(b"at2ached")


def _by_key(node: PodNode, login: Login, name: str, pod: str) -> None:
    """Log in with the manifest's key, and look at what its volume is for.

    On a crowded machine systemd gives up the console's prompt, as its device takes too long.
    """
    user = "testuser" if name in TESTUSERS else ROOTS.get(name.partition("-")[0], "debian")
    (vm,) = [one for one in node.vms() if one["labels"]["io.kubernetes.pod.name"] == pod]
    found = until(lambda: _told(login, vm, user), f"{user} logs in to {name}", within_s=BOOT_S)
    assert found == f"{user}\n"
    command, wanted = USES.get(name, ("true", ""))
    until(
        lambda: wanted in _told(login, vm, user, command),
        lambda: f"{name}: {command}: {_told(login, vm, user, command)!r}",
        within_s=BOOT_S,
    )


def _told(login: Login, vm: Json, user: str, command: str = "id -un") -> str:
    """Return the output of a command; empty if it failed or took too long."""
    try:
        return login(vm, command, user=user)
    except (AssertionError, subprocess.TimeoutExpired):
        return ""


def _by_password(node: PodNode, pod: str, word: bytes) -> None:
    with node.terminal("attach", "-it", pod) as user:
        user.type(b"\n")  # a prompt that is there already shows itself again
        user.until(b"login: ", within_s=BOOT_S)
        user.type(word + b"\n")
        user.until(b"Password: ")
        user.type(word + b"\n")
        user.until(word + b"@", within_s=300)
        user.type(b"echo typed-$((6*7))\n")
        user.until(b"typed-42")
