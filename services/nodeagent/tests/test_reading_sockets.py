"""The agent connects a reader only to the socket of the guest's own QEMU."""

import os
import socket
from pathlib import Path

import pytest

from virtbus.nodeagent.edge.libvirt_readings import _allowed, _clear, _connected, _make
from virtbus.schemas.errors import VirtbusError

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "vms" / "uid" / "nbd"
    _make(made, os.geteuid())
    return made


def listening(path: Path) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.bind(str(path))
    made.listen()
    return made


def test_a_socket_of_qemus_user_is_used(folder: Path) -> None:
    assert (_allowed(folder), folder.stat().st_mode & 0o007) == (os.geteuid(), 0)
    with listening(folder / "a.sock") as server, _connected(folder / "a.sock"):
        server.accept()[0].close()


def test_another_thing_in_its_place_is_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "file").write_text("")
    with listening(tmp_path / "other.sock"):
        (folder / "link").symlink_to(tmp_path / "other.sock")
        for name in ("missing", "file", "link"):
            with pytest.raises(VirtbusError) as error:
                _connected(folder / name)
            assert error.value.reason == "not_served"


def test_a_socket_of_another_user_is_refused(folder: Path) -> None:
    with listening(folder / "a.sock"):
        os.chown(folder / "a.sock", 1, 1)
        with pytest.raises(VirtbusError):
            _connected(folder / "a.sock")


def test_only_qemus_user_reaches_the_folder_until_its_end(folder: Path) -> None:
    above = folder.parent
    assert (_allowed(above), above.stat().st_mode & 0o777) == (os.geteuid(), 0o710)
    _clear(folder)
    assert (folder.exists(), "system.posix_acl_access" in os.listxattr(above)) == (False, False)
    assert above.stat().st_mode & 0o007 == 0
    _clear(folder)


def test_a_new_folder_is_empty(folder: Path) -> None:
    (folder / "old").write_text("")
    _make(folder, 1)
    assert (list(folder.iterdir()), _allowed(folder)) == ([], 1)
