"""Each service can be run in every way that virtbus is run: by systemd and by compose.

The bridge is run by the cluster that it serves (deploy/kubernetes), and by nothing else.
"""

from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
IN_CLUSTERS = {"kubebridge"}
ALL = {path.parent.name for path in ROOT.glob("services/*/src/virtbus/*/__main__.py")}
SERVICES = sorted(ALL - IN_CLUSTERS)
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))["services"]


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_has_a_unit(service: str) -> None:
    text = (ROOT / "deploy" / "systemd" / f"virtbus-{service}.service").read_text(encoding="utf-8")
    assert f"ExecStart=/opt/virtbus/venv/bin/virtbus-{service}\n" in text


@pytest.mark.parametrize("service", SERVICES)
def test_install_and_uninstall_know_a_service(service: str) -> None:
    for script in ("install", "uninstall"):
        assert f"virtbus-{service}" in (ROOT / "deploy" / script).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", COMPOSE)
def test_what_compose_starts_has_a_dockerfile(name: str) -> None:
    assert (ROOT / COMPOSE[name]["build"]["dockerfile"]).is_file()


def test_compose_starts_every_service() -> None:
    assert set(SERVICES) <= set(COMPOSE)


def test_compose_gives_no_container_every_privilege() -> None:
    assert [name for name, service in COMPOSE.items() if service.get("privileged")] == []


@pytest.mark.parametrize("service", sorted(IN_CLUSTERS))
def test_a_service_of_clusters_has_an_image_and_manifests(service: str) -> None:
    image = (ROOT / "services" / service / "Dockerfile").read_text(encoding="utf-8")
    assert f'ENTRYPOINT ["/opt/virtbus/venv/bin/virtbus-{service}"]' in image
    assert any(line.startswith("USER ") for line in image.splitlines())
    values = yaml.safe_load((ROOT / "deploy" / "kubernetes" / "values.yaml").read_text("utf-8"))
    assert values["image"].startswith(f"virtbus-{service}:")
