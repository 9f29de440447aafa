"""Each service can run under systemd and under compose.

The bridge runs only in the cluster that it serves (deploy/kubernetes). The container runtime and
its proxy run only under systemd, on nodes of Kubernetes.
"""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
IN_CLUSTERS = {"kubebridge"}
ON_KUBERNETES_NODES = {"cri", "criproxy"}
ALL = {path.parent.name for path in ROOT.glob("services/*/src/virtbus/*/__main__.py")}
WITH_UNITS = sorted(ALL - IN_CLUSTERS)
SERVICES = sorted(ALL - IN_CLUSTERS - ON_KUBERNETES_NODES)
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))["services"]

STATE = "${VIRTBUS_STATE_DIR:-/var/lib/virtbus}"
RUN = "${VIRTBUS_RUN_DIR:-/run/virtbus}"
GETENT = "[ -e $made ] && echo host-kvm:x:4242: || exit 2"


@pytest.mark.parametrize("service", WITH_UNITS)
def test_a_service_has_a_unit(service: str) -> None:
    text = (ROOT / "deploy" / "systemd" / f"virtbus-{service}.service").read_text(encoding="utf-8")
    assert f"ExecStart=/opt/virtbus/venv/bin/virtbus-{service}\n" in text


@pytest.mark.parametrize("service", WITH_UNITS)
def test_install_and_uninstall_know_a_service(service: str) -> None:
    for script in ("install", "uninstall"):
        assert f"virtbus-{service}" in (ROOT / "deploy" / script).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", COMPOSE)
def test_every_compose_service_has_a_dockerfile(name: str) -> None:
    assert (ROOT / COMPOSE[name]["build"]["dockerfile"]).is_file()


def test_compose_starts_every_service() -> None:
    assert set(SERVICES) <= set(COMPOSE)


def test_compose_gives_no_container_every_privilege() -> None:
    assert [name for name, service in COMPOSE.items() if service.get("privileged")] == []
    for name, service in COMPOSE.items():
        assert service["cap_drop"] == ["ALL"], name
        assert "no-new-privileges:true" in service["security_opt"], name
        assert service.get("read_only") or name == "libvirt", name
        assert not {"/dev:/dev", "/:/host"} & set(_binds(service)), name


def _unit(service: str) -> dict[str, str]:
    text = (ROOT / "deploy" / "systemd" / f"virtbus-{service}.service").read_text(encoding="utf-8")
    lines = (line.partition("=") for line in text.splitlines() if not line.startswith("#"))
    return {key: value for key, _, value in lines}


def _binds(service: dict[str, Any]) -> dict[str, str]:
    """Return target → source of a service's mounts."""
    pairs = {}
    for mount in service.get("volumes", []):
        if isinstance(mount, dict):
            pairs[mount["target"]] = mount["source"]
        else:
            source, target = (
                mount.replace(STATE, "/var/lib/virtbus").replace(RUN, "/run/virtbus").split(":")[:2]
            )
            pairs[target] = source
    return pairs


@pytest.mark.parametrize("service", ["nats", *SERVICES])
def test_compose_gives_a_service_the_capabilities_of_its_unit(service: str) -> None:
    unit = {cap.removeprefix("CAP_") for cap in _unit(service)["CapabilityBoundingSet"].split()}
    assert set(COMPOSE[service].get("cap_add", [])) == unit


@pytest.mark.parametrize("service", SERVICES)
def test_compose_gives_a_service_its_own_credentials_only(service: str) -> None:
    secrets = {
        target: source
        for target, source in _binds(COMPOSE[service]).items()
        if source.startswith("/run/virtbus") and not source.startswith("/run/virtbus/node")
    } | {"": f"/run/virtbus/creds/{service}"}
    assert set(secrets.values()) == {f"/run/virtbus/creds/{service}"}
    assert COMPOSE[service]["environment"]["VIRTBUS_CREDS"] == "/run/credentials/bus"


def test_compose_gives_a_service_the_state_of_its_unit() -> None:
    own = {
        "controller": set(),
        "imaged": {"images", "disks"},
        "netd": {"netd"},
        "libvirt": {"images", "disks", "vms", "consoles"},
    }
    for name, folders in own.items():
        sources = [s for s in _binds(COMPOSE[name]).values() if s.startswith("/var/lib/virtbus")]
        assert {source.removeprefix("/var/lib/virtbus/") for source in sources} == folders
    # the agent has the whole node's folder, except the folder with the passwords of the bus
    assert "/var/lib/virtbus/nats:mode=0" in COMPOSE["nodeagent"]["tmpfs"]
    assert _binds(COMPOSE["nats"])["/var/lib/virtbus"] == "/var/lib/virtbus/nats"


def test_compose_runs_as_root_only_services_whose_unit_does() -> None:
    root = {name for name in SERVICES if "user" not in COMPOSE[name]}
    assert root == {name for name in SERVICES if _unit(name).get("User") == "root"}
    folders = COMPOSE["folders"]["command"][0]
    for name in set(SERVICES) - root:
        assert f"{name}:{COMPOSE[name]['user'].partition(':')[2]}" in folders


def test_a_replaced_bus_does_not_replace_libvirt_in_compose() -> None:
    assert "depends_on" not in COMPOSE["libvirt"]


def test_libvirt_has_the_capabilities_and_devices_that_guests_need_in_compose() -> None:
    assert len(COMPOSE["libvirt"]["cap_add"]) == 13
    devices = [device.rpartition(":")[2] for device in COMPOSE["libvirt"]["devices"]]
    assert [Path(device).name for device in devices] == ["kvm", "tun"]
    assert "device_cgroup_rules" not in COMPOSE["libvirt"]


@pytest.mark.parametrize("name", sorted(set(COMPOSE) - {"folders"}))
def test_compose_knows_the_health_of_a_service(name: str) -> None:
    test = COMPOSE[name]["healthcheck"]["test"]
    assert "virsh" in test or "virtbus.bus.client.health" in test
    if name in SERVICES:
        assert "--alive" in test
        assert COMPOSE[name]["environment"]["VIRTBUS_ALIVE_FILE"] in test


def test_settings_and_cni_networks_of_the_host_are_seen_in_compose() -> None:
    for name in ("nats", *SERVICES):
        assert _binds(COMPOSE[name])["/etc/virtbus"] == "/etc/virtbus"
    assert _binds(COMPOSE["netd"])["/etc/cni/net.d"] == "/etc/cni/net.d"


@pytest.mark.parametrize(
    "path",
    sorted([*ROOT.glob("deploy/*/Dockerfile"), *ROOT.glob("services/*/Dockerfile")]),
    ids=lambda p: p.parent.name,
)
def test_no_image_carries_a_package_cache(path: Path) -> None:
    last = path.read_text(encoding="utf-8").rpartition("FROM ")[2]
    assert "apt-get clean && rm -rf /var/lib/apt/lists/*" in last
    assert "dnsmasq" not in last


@pytest.mark.parametrize("owner", ["existing", "new"])
def test_qemu_joins_the_group_of_the_device_in_the_container(tmp_path: Path, owner: str) -> None:
    """Run the unchanged entrypoint with replacements for the commands that change users."""
    gid = 4242
    for name, text in {
        "stat": f"echo {gid}",
        "getent": f"echo 'kvm:x:{gid}:'" if owner == "existing" else GETENT,
        "groupadd": f'echo groupadd "$@" >>{tmp_path}/log; touch {tmp_path}/made',
        "usermod": f'echo usermod "$@" >>{tmp_path}/log',
    }.items():
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\nmade={tmp_path}/made\n{text}\n", encoding="utf-8")
        program.chmod(0o755)
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "KVM_DEVICE": "/dev/null"}
    entrypoint = ROOT / "deploy" / "libvirt" / "entrypoint"
    subprocess.run([entrypoint, "--groups-only"], env=environ, check=True)
    log = (tmp_path / "log").read_text(encoding="utf-8").splitlines()
    made = [] if owner == "existing" else [f"groupadd --gid {gid} host-kvm"]
    group = "kvm" if owner == "existing" else "host-kvm"
    assert log == [*made, f"usermod --append --groups {group} libvirt-qemu"]


@pytest.mark.parametrize("service", sorted(IN_CLUSTERS))
def test_a_service_of_clusters_has_an_image_and_manifests(service: str) -> None:
    image = (ROOT / "services" / service / "Dockerfile").read_text(encoding="utf-8")
    assert f'ENTRYPOINT ["/opt/virtbus/venv/bin/virtbus-{service}"]' in image
    assert any(line.startswith("USER ") for line in image.splitlines())
    values = yaml.safe_load((ROOT / "deploy" / "kubernetes" / "values.yaml").read_text("utf-8"))
    assert values["image"].startswith(f"virtbus-{service}:")
