"""`virtbus doctor`: a finding for each thing, a line that mends what is missing."""

import os
from pathlib import Path

import pytest
from cli.tests.fakes import environment, run

from virtbus.cli.doctor import bus, emulator, host, hypervisor
from virtbus.cli.doctor.finding import FAIL, OK, WARN


async def test_doctor_reports_every_check_as_json(tmp_path: Path) -> None:
    ended = await run("doctor", "-o", "json", "--state-dir", str(tmp_path), env=environment())
    assert ended.code in {0, 1}
    report = ended.json
    names = [finding["name"] for finding in report["findings"]]
    assert len(names) == len(set(names))
    assert {"root", "qemu", "kvm", "libvirtd", "bus", "image tiny", "pid 1"} <= set(names)
    assert sum(report["count"].values()) == len(names)
    assert (ended.code == 1) == bool(report["count"][FAIL])


async def test_findings_that_can_be_mended_say_how(tmp_path: Path) -> None:
    ended = await run("doctor", "--state-dir", str(tmp_path), env=environment())
    lines = ended.out.splitlines()
    (row,) = [n for n, line in enumerate(lines) if line.startswith("warn  image tiny")]
    assert "mend: images/build" in lines[row + 1]


def test_tiny_is_found_where_imaged_looks(tmp_path: Path) -> None:
    assert bus.tiny(tmp_path).level in {OK, WARN}
    image = tmp_path / "images" / "src" / "tiny.qcow2"
    image.parent.mkdir(parents=True)
    image.write_bytes(b"x")
    assert bus.tiny(tmp_path).what.startswith(str(image))


def test_open_credentials_are_pointed_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIRTBUS_RUN_DIR", str(tmp_path))
    path = tmp_path / "bus.creds"
    path.write_text("{}")
    path.chmod(0o644)
    assert bus.creds().mend == f"chmod 0640 {path}"
    path.chmod(0o640)
    assert bus.creds().level == OK


@pytest.mark.integration
def test_checks_of_this_host_do_not_fail_to_look() -> None:
    for check in (host.reaper, host.cgroups, host.clock, emulator.kvm, emulator.wrapper):
        assert check().level in {OK, WARN, FAIL}
    assert host.root().level == (OK if os.geteuid() == 0 else FAIL)


@pytest.mark.integration
def test_libvirtd_is_asked_for_its_version_and_limits() -> None:
    found = hypervisor.libvirtd()
    if found.level != OK:
        pytest.skip(found.what)
    assert "libvirt" in found.what
    assert "max_workers" in hypervisor.limits().what
