"""Virtlet's example manifests become VMs: most of them, and the others for a known reason."""

import json
from pathlib import Path
from typing import Any

import pytest
from services.cri.tests.virtlet_examples import (
    DEVICE,
    EXAMPLES,
    FOLDER,
    NOT_OF_KUBELET,
    QCOW2,
    ROOT,
    Example,
    annotations,
)
from services.cri.tests.world import Fleet, Kubelet

ROOT_OF_TREE = Path(__file__).parents[3]
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGZvbw== somebody@example"
BY_KUBELET = {name: one for name, one in EXAMPLES.items() if one.volume not in NOT_OF_KUBELET}
REACHED = {name: one for name, one in BY_KUBELET.items() if one.volume != FOLDER}


def parts(tmp_path: Path, example: Example) -> dict[str, Any]:
    """Return the mounts and devices as kubelet gives them."""
    if example.volume in {ROOT, DEVICE}:
        path = "/" if example.volume == ROOT else "/dev/testpvc"
        device = {"host_path": "/dev/vg0/data", "container_path": path, "permissions": "mrw"}
        return {"devices": [device]}
    if example.volume == QCOW2:
        folder = tmp_path / "pods/0c5f/volumes/virtlet~flexvolume_driver/data"
        folder.mkdir(parents=True)
        options = {"type": "qcow2", "capacity": "2048MB"}
        (folder / "virtlet-flexvolume.json").write_text(json.dumps(options))
        return {"mounts": [{"host_path": str(folder), "container_path": "/var/lib/docker"}]}
    return {}


@pytest.mark.parametrize("name", REACHED)
async def test_an_example_becomes_a_vm(
    tmp_path: Path,
    fleet: Fleet,
    kubelet: Kubelet,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    monkeypatch.setattr("virtbus.cri.edge.volume_files._block_device", lambda path: path)
    example = EXAMPLES[name]
    limits = {"memory_limit_in_bytes": example.memory_mib * 1024**2}
    sandbox_id = await kubelet.sandbox(annotations=annotations(example, KEY))
    container_id = await kubelet.container(
        sandbox_id, linux={"resources": limits}, **parts(tmp_path, example)
    )
    await kubelet.call("StartContainer", container_id=container_id)
    assert (await kubelet.status(container_id)).state == 1
    spec = fleet.vm.spec
    assert spec.domain.memory.guest == (example.memory_mib or 1024) * 1024**2
    seed = next(one.cloud_init_no_cloud for one in spec.volumes if one.cloud_init_no_cloud)
    whole = f"{seed.user_data} {seed.ssh_keys}"
    assert (KEY in whole) == any("KEY" in text for text in example.annotations.values())


def test_four_of_five_examples_become_vms_and_the_table_names_each() -> None:
    assert len(EXAMPLES) == 21
    assert len(REACHED) / len(EXAMPLES) >= 0.8
    table = (ROOT_OF_TREE / "docs/reference/cri.md").read_text()
    for name in EXAMPLES:
        (line,) = [one for one in table.splitlines() if one.startswith(f"| `{name}.yaml`")]
        assert ("| none |" in line) == (name not in BY_KUBELET), line
