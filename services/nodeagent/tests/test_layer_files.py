"""Layers are readable for all, and immutable once they have no other name."""

import os
import subprocess
from pathlib import Path

import pytest

from virtbus.nodeagent.edge.disk_files import HostDiskFiles
from virtbus.nodeagent.edge.layer_files import protect, remove

NAME = "0192f0c1-2d3e-7abc-8def-000000000001.root.qcow2"


def immutable(path: Path) -> bool:
    """Return True if root itself cannot write to the file."""
    try:
        with path.open("r+b"):
            return False
    except PermissionError:
        return True


@pytest.fixture
def layer(tmp_path: Path) -> Path:
    path = tmp_path / "layers" / NAME
    path.parent.mkdir()
    path.write_bytes(b"frozen")
    path.chmod(0o600)
    path.with_suffix(".json").write_bytes(b"{}")
    return path


def has_the_flag(folder: Path) -> bool:
    """Return True if the file system of the tests has the flag."""
    probe = folder / "probe"
    probe.touch()
    done = subprocess.run(["chattr", "+i", str(probe)], capture_output=True, check=False)
    subprocess.run(["chattr", "-f", "-i", str(probe)], check=False)
    probe.unlink()
    return done.returncode == 0


def test_a_layer_is_protected_and_can_be_removed(layer: Path) -> None:
    assert protect(layer.parent)
    assert layer.stat().st_mode & 0o777 == 0o444
    assert immutable(layer) == has_the_flag(layer.parent.parent)
    assert protect(layer.parent)
    remove(layer.parent, [NAME, NAME.replace("root", "gone")])
    assert not layer.parent.exists()


def test_a_layer_with_another_name_keeps_changeable_names(layer: Path) -> None:
    pin = layer.parent.parent / "pin"
    os.link(layer, pin)
    protect(layer.parent)
    pin.unlink()
    assert layer.stat().st_mode & 0o777 == 0o444
    protect(layer.parent)
    assert immutable(layer) == has_the_flag(layer.parent.parent)
    remove(layer.parent, [NAME])


async def test_without_layers_there_is_nothing_to_do(tmp_path: Path) -> None:
    assert not await HostDiskFiles(tmp_path).protect_layers()
