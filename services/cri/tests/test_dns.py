"""The DNS settings and the host aliases of pods: those of the VM's guest."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from grpc import StatusCode
from services.cri.tests.api_server import ApiServer
from services.cri.tests.world import Fleet, Kubelet, sandbox

from virtbus.cri.core.pod_dns import Hosts, of_file
from virtbus.schemas.dns import DnsConfig
from virtbus.schemas.guest_files import HostAlias
from virtbus.schemas.vm import VmSpec

CLUSTER = {
    "servers": ["10.96.0.10", "fd00:96::a"],
    "searches": ["default.svc.cluster.local", "svc.cluster.local", "example.com."],
    "options": ["ndots:5"],
}
IN_GUEST = DnsConfig(
    nameservers=("10.96.0.10", "fd00:96::a"),
    searches=("default.svc.cluster.local", "svc.cluster.local", "example.com"),
)


async def test_the_dns_of_the_sandbox_is_that_of_the_vm(fleet: Fleet, kubelet: Kubelet) -> None:
    await kubelet.container(await kubelet.sandbox(dns_config=CLUSTER))
    assert fleet.vm.spec.dns_config == IN_GUEST


@pytest.mark.parametrize(
    ("told", "given"),
    [
        ({}, None),
        ({"options": ["ndots:5"]}, None),
        ({"servers": ["127.0.0.1"], "searches": ["."]}, DnsConfig(nameservers=("127.0.0.1",))),
        ({"servers": ["fe80::1%eth0"]}, DnsConfig()),
        ({"searches": ["a.b"]}, DnsConfig(searches=("a.b",))),
    ],
)
async def test_a_guest_keeps_the_dns_of_its_network_only_without_any(
    fleet: Fleet, kubelet: Kubelet, told: dict[str, Any], given: DnsConfig | None
) -> None:
    await kubelet.container(await kubelet.sandbox(dns_config=told))
    assert fleet.vm.spec.dns_config == given
    assert ("dns_config" in fleet.vm.spec.model_dump(mode="json")) == (given is not None)


async def test_another_sandbox_of_the_pod_gives_its_vm_another_dns(
    fleet: Fleet, kubelet: Kubelet
) -> None:
    first = await kubelet.sandbox(dns_config={"servers": ["192.0.2.53"]})
    await kubelet.container(first)
    uid = fleet.vm.uid
    await kubelet.call("StopPodSandbox", pod_sandbox_id=first)
    metadata = sandbox()["metadata"] | {"attempt": 1}
    await kubelet.container(await kubelet.sandbox(metadata=metadata, dns_config=CLUSTER))
    assert (fleet.vm.uid, fleet.vm.spec.dns_config) == (uid, IN_GUEST)


@pytest.mark.parametrize(
    ("told", "path", "word"),
    [
        ({"servers": ["10.96.0.300"]}, "servers", "'10.96.0.300'"),
        ({"servers": ["192.0.2.1", "name.example"]}, "servers", "'name.example'"),
        ({"servers": ["192.0.2.1\n192.0.2.2"]}, "servers", "must be an IPv4 or IPv6 address"),
        ({"servers": ["0.0.0.0"]}, "servers", "unspecified"),
        ({"servers": ["ff02::1"]}, "servers", "multicast"),
        ({"servers": [f"192.0.2.{at}" for at in range(4)]}, "servers", "3 items"),
        ({"searches": ["a b"]}, "searches", "'a b'"),
        ({"searches": ["x" * 64]}, "searches", "a domain name"),
        ({"searches": ["a..b"]}, "searches", "'a..b'"),
        ({"searches": ["a\n", "\u212a.example"]}, "searches", "a domain name"),
        ({"searches": [f"d{at}.example" for at in range(33)]}, "searches", "32 items"),
        ({"searches": [f"{'x' * 60}.{at}.example" for at in range(30)]}, "", "2048 characters"),
    ],
)
async def test_a_dns_that_no_guest_can_have_is_refused_with_its_path(
    kubelet: Kubelet, told: dict[str, Any], path: str, word: str
) -> None:
    code, text = await kubelet.refused("RunPodSandbox", config=sandbox(dns_config=told))
    assert code is StatusCode.INVALID_ARGUMENT
    assert ".".join(filter(None, ("dns_config", path))) in text
    assert word in text


KUBELETS = """# Kubernetes-managed hosts file.
127.0.0.1\tlocalhost
10.127.0.7\tweb

# Entries added by HostAliases.
192.0.2.7\tfoo.remote\tbar.remote
fd00::7\tsix
0.0.0.0\tads.example
"""
ALIASES = (
    HostAlias(ip="192.0.2.7", hostnames=("foo.remote", "bar.remote")),
    HostAlias(ip="fd00::7", hostnames=("six",)),
    HostAlias(ip="0.0.0.0", hostnames=("ads.example",)),
)


@pytest.fixture
def hosts(tmp_path: Path) -> Path:
    """The file that kubelet mounts at /etc/hosts."""
    path = tmp_path / "pods" / "0c5f" / "etc-hosts"
    path.parent.mkdir(parents=True)
    path.write_text(KUBELETS)
    return path


FQDN = "web.blue.default.svc.cluster.local"


@pytest.mark.parametrize(
    ("told", "line", "names"),
    [
        ("web", f"10.127.0.7\t{FQDN}\tweb", ("web", FQDN)),
        (FQDN, f"10.127.0.7\t{FQDN}\tweb", (FQDN, FQDN)),
        (FQDN, "10.127.0.7\tweb", (FQDN, FQDN)),
        ("web", "10.127.0.7\tweb", ("web", None)),
        ("web", "10.127.0.7\tother.example\tweb", ("web", None)),
        ("web", "10.127.0.7\tweb.$(reboot)\tweb", ("web", None)),
        ("Web", "", (None, None)),
        (f"{'x' * 60}.default", "", (None, None)),
    ],
)
async def test_the_guest_has_the_name_of_its_pod_with_the_subdomain(
    fleet: Fleet,
    kubelet: Kubelet,
    hosts: Path,
    told: str,
    line: str,
    names: tuple[str | None, str | None],
) -> None:
    hosts.write_text(KUBELETS.replace("10.127.0.7\tweb", line))
    mounts = [{"host_path": str(hosts), "container_path": "/etc/hosts"}]
    await kubelet.container(await kubelet.sandbox(hostname=told), mounts=mounts)
    seed = fleet.vm.spec.volumes[1].cloud_init_no_cloud
    assert seed is not None
    assert (seed.hostname, seed.fqdn) == names
    assert seed.host_aliases == ALIASES


def aliases(spec: VmSpec) -> tuple[HostAlias, ...]:
    seed = spec.volumes[1].cloud_init_no_cloud
    assert seed is not None
    assert not seed.write_files
    return seed.host_aliases


async def test_the_host_aliases_of_a_pod_are_in_the_seed_of_its_vm(
    fleet: Fleet, kubelet: Kubelet, hosts: Path
) -> None:
    mounts = [{"host_path": str(hosts), "container_path": "/etc/hosts"}]
    await kubelet.container(await kubelet.sandbox(), mounts=mounts)
    assert aliases(fleet.vm.spec) == ALIASES


@pytest.mark.parametrize("name", ["own-hosts", "etc-hosts.d/etc-hosts"])
async def test_a_file_that_is_not_kubelets_gives_no_alias(
    fleet: Fleet, kubelet: Kubelet, hosts: Path, name: str
) -> None:
    path = hosts.parent / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(KUBELETS)
    mounts = [{"host_path": str(path), "container_path": "/etc/hosts"}]
    await kubelet.container(await kubelet.sandbox(), mounts=mounts)
    assert aliases(fleet.vm.spec) == ()


def linked(path: Path) -> None:
    path.rename(path.parent / "real")
    path.symlink_to(path.parent / "real")


def piped(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


HEAD = KUBELETS.partition("192.0.2.7")[0].encode()


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (lambda path: path.write_bytes(HEAD + b"192.0.2.7\t\xff\n"), "utf-8"),
        (lambda path: path.write_bytes(HEAD + b"192.0.2.700\tname\n"), "IPv4 or IPv6"),
        (lambda path: path.write_bytes(HEAD + b"192.0.2.7\t$(reboot)\n"), "a domain name"),
        (lambda path: path.write_bytes(HEAD + b"192.0.2.7\tname\n" * 257), "256 lines"),
        (lambda path: path.write_bytes(HEAD + b"#" * 65_536), "64 KiB"),
        (linked, "symbolic links"),
        (piped, "is no file"),
        (Path.unlink, "No such file"),
    ],
)
async def test_a_file_of_host_aliases_that_is_none_is_refused(
    kubelet: Kubelet, hosts: Path, spoil: Callable[[Path], Any], word: str
) -> None:
    spoil(hosts)
    sandbox_id = await kubelet.sandbox()
    await kubelet.call("PullImage", image={"image": "tiny"})
    config = {
        "metadata": {"name": "vm"},
        "image": {"image": "tiny"},
        "mounts": [{"host_path": str(hosts), "container_path": "/etc/hosts"}],
    }
    code, text = await kubelet.refused("CreateContainer", pod_sandbox_id=sandbox_id, config=config)
    assert (code, word in text) == (StatusCode.INVALID_ARGUMENT, True), text


def test_an_alias_with_many_names_has_several_lines() -> None:
    names = [f"n{at}" for at in range(65)]
    text = "\n# Entries added by HostAliases.\n192.0.2.7\t" + "\t".join(names) + "\n192.0.2.8\t\n"
    found = of_file(text.encode()).aliases
    assert [name for one in found for name in one.hostnames] == names
    assert [len(one.hostnames) for one in found] == [64, 1]
    assert of_file(HEAD.partition(b"# Entries")[0]) == Hosts()


POD = "/api/v1/namespaces/default/pods/web"
OF_API = {"annotations": {"kubernetes.io/config.source": "api"}}


def pod(uid: str = "0c5f-web", *aliases: dict[str, Any]) -> dict[str, Any]:
    """Return a pod as the API server has it."""
    given = aliases or ({"ip": "192.0.2.7", "hostnames": ["foo.remote", "bar.remote"]},)
    return {"metadata": {"name": "web", "uid": uid}, "spec": {"hostAliases": list(given)}}


async def test_the_host_aliases_of_a_pod_without_kubelets_file_are_those_of_the_api_server(
    fleet: Fleet, api: ApiServer, reader: Kubelet
) -> None:
    api.objects[POD] = pod(sandbox()["metadata"]["uid"])
    await reader.container(await reader.sandbox(**OF_API))
    assert aliases(fleet.vm.spec) == ALIASES[:1]


@pytest.mark.parametrize(
    "way", ["another pod", "no pod", "refused", "no login", "not of the server"]
)
async def test_a_pod_that_the_node_does_not_see_has_no_host_aliases(
    tmp_path: Path, fleet: Fleet, api: ApiServer, reader: Kubelet, way: str
) -> None:
    if way != "no pod":
        api.objects[POD] = pod("other" if way == "another pod" else sandbox()["metadata"]["uid"])
    api.refused = way == "refused"
    if way == "no login":
        (tmp_path / "kubeconfig").write_text("{}")
    more = {} if way == "not of the server" else OF_API
    await reader.container(await reader.sandbox(**more))
    assert aliases(fleet.vm.spec) == ()
    assert (POD in api.asked) == (way not in {"no login", "not of the server"})


async def test_a_pod_waits_for_an_api_server_that_is_away_or_has_names_that_are_none(
    fleet: Fleet, api: ApiServer, reader: Kubelet
) -> None:
    uid = sandbox()["metadata"]["uid"]
    api.objects[POD] = pod(uid, {"ip": "192.0.2.7", "hostnames": ["a b"]})
    sandbox_id = await reader.sandbox(**OF_API)
    await reader.call("PullImage", image={"image": "tiny"})
    config = {"metadata": {"name": "vm"}, "image": {"image": "tiny"}}
    asked: dict[str, Any] = {"pod_sandbox_id": sandbox_id, "config": config}
    code, text = await reader.refused("CreateContainer", **asked)
    assert (code, "a domain name" in text) == (StatusCode.INVALID_ARGUMENT, True), text
    api.away = True
    code, text = await reader.refused("CreateContainer", **asked)
    assert (code, "cluster_away" in text) == (StatusCode.UNAVAILABLE, True), text
    api.away, api.objects[POD] = False, pod(uid)
    await reader.call("CreateContainer", **asked)
    assert aliases(fleet.vm.spec) == ALIASES[:1]


async def test_no_name_of_a_pod_is_another_path_of_the_api_server(
    fleet: Fleet, api: ApiServer, reader: Kubelet
) -> None:
    metadata = sandbox()["metadata"] | {"name": "../secrets/login"}
    await reader.container(await reader.sandbox(metadata=metadata, **OF_API))
    assert aliases(fleet.vm.spec) == ()
    assert not any("login" in path for path in api.asked)
