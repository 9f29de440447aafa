"""vmwrapper is installed again if the program that the host can run has changed."""

from pathlib import Path

import pytest

from virtbus.netd.edge import wrapper_install
from virtbus.netd.edge.wrapper_install import install


def test_a_new_python_version_is_installed_where_the_compiler_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wrapper_install, "files", lambda _: tmp_path)
    emulator = tmp_path / "qemu"
    emulator.touch()
    (tmp_path / "vmwrapper.c").write_text("int main(void) { return 0; }")
    for version in ("first", "second"):
        (tmp_path / "vmwrapper.py").write_text(version)
        path = install(tmp_path / "bin", tmp_path / "x", emulator=emulator, compiler="false")
        assert path.read_text() == version
        before = path.stat().st_ctime_ns
        install(tmp_path / "bin", tmp_path / "x", emulator=emulator, compiler="false")
        assert path.stat().st_ctime_ns == before
