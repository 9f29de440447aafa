"""`virtbus doctor` prints a finding for each check, and a command that fixes each problem."""

import os
import threading
from functools import partial
from pathlib import Path

import pytest
from cli.tests.fakes import environment, run

from virtbus.cli.doctor import bus, container, emulator, host, hypervisor, networking
from virtbus.cli.doctor.command import _look
from virtbus.cli.doctor.finding import FAIL, OK, UNKNOWN, WARN, CheckResult, fail, ok, warn


async def test_doctor_reports_every_check_as_json(tmp_path: Path) -> None:
    ended = await run("doctor", "-o", "json", "--state-dir", str(tmp_path), env=environment())
    assert ended.code in {0, 1}
    report = ended.json
    names = [finding["name"] for finding in report["findings"]]
    assert len(names) == len(set(names))
    assert {"root", "qemu", "kvm", "libvirtd", "bus", "image tiny", "pid 1"} <= set(names)
    assert sum(report["count"].values()) == len(names)
    assert (ended.code == 1) == bool(report["count"][FAIL])


async def test_findings_that_can_be_fixed_show_the_command(tmp_path: Path) -> None:
    ended = await run("doctor", "--state-dir", str(tmp_path), env=environment())
    lines = ended.out.splitlines()
    (row,) = [n for n, line in enumerate(lines) if line.startswith("warn     image tiny")]
    assert "mend: images/build" in lines[row + 1]


def test_tiny_is_found_where_imaged_looks(tmp_path: Path) -> None:
    assert bus.tiny(tmp_path).level in {OK, WARN}
    image = tmp_path / "images" / "src" / "tiny.qcow2"
    image.parent.mkdir(parents=True)
    image.write_bytes(b"x")
    assert bus.tiny(tmp_path).what.startswith(str(image))


def test_world_readable_credentials_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VIRTBUS_RUN_DIR", str(tmp_path))
    path = tmp_path / "bus.creds"
    path.write_text("{}")
    path.chmod(0o644)
    assert bus.creds().mend == f"chmod 0640 {path}"
    path.chmod(0o640)
    assert bus.creds().level == OK


DOCKER = """table ip filter {
	chain DOCKER-USER {
	}
	chain FORWARD {
		type filter hook forward priority filter; policy drop;
		counter packets 5 bytes 300 jump DOCKER-USER
	}
}
table inet virtbus {
	chain forward {
		type filter hook forward priority filter; policy drop;
	}
}
"""


def _answers(monkeypatch: pytest.MonkeyPatch, **texts: tuple[int, str]) -> None:
    def run(command: tuple[str, ...], timeout_s: float = 1.0) -> tuple[int, str]:
        del timeout_s
        return texts.get(command[0].replace("-", "_"), (127, f"{command[0]} is not installed"))

    monkeypatch.setattr(networking, "run", run)


def test_a_firewall_that_cannot_be_read_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    _answers(monkeypatch)
    found = networking.forward_policy()
    assert found.level == UNKNOWN
    assert "nft is not installed" in found.what


def test_a_firewall_that_drops_guest_packets_causes_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _answers(monkeypatch, nft=(0, DOCKER))
    found = networking.forward_policy()
    assert found.level == WARN
    assert found.what.startswith("ip filter drops")
    assert "DOCKER-USER" in found.mend
    _answers(monkeypatch, nft=(0, ""), iptables_legacy=(0, "-P FORWARD DROP"))
    assert networking.forward_policy().what.startswith("iptables-legacy drops")


def test_a_firewall_that_lets_guests_through_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = DOCKER.replace("jump DOCKER-USER", 'jump DOCKER-USER\n\t\tiifname "virtbus0" accept')
    _answers(monkeypatch, nft=(0, opened))
    assert networking.forward_policy().level == OK


def test_in_a_container_only_its_own_parts_are_checked() -> None:
    compose = {container.COMPOSE: "1"}
    libvirtd = fail("libvirtd", "no socket", "systemctl start libvirtd")
    found = container.judged(libvirtd, compose)
    assert (found.level, found.mend) == (UNKNOWN, "docker compose ps libvirt")
    assert "container `libvirt`" in found.what
    assert "exec netd" in container.judged(warn("forward policy", "x"), compose).mend
    assert "on the host" in container.judged(warn("pid 1", "x"), compose).mend
    own = fail("bus", "none", "virtbus up")
    assert container.judged(own, compose) == own
    assert container.judged(ok("kvm", "makes VMs"), compose).level == OK


async def test_a_container_that_lacks_the_host_is_no_failure(tmp_path: Path) -> None:
    env = environment() | {container.COMPOSE: "1", "PATH": str(tmp_path)}
    ended = await run("doctor", "-o", "json", "--state-dir", str(tmp_path), env=env)
    levels = {finding["name"]: finding["level"] for finding in ended.json["findings"]}
    assert levels["qemu"] == levels["nftables"] == levels["forward policy"] == UNKNOWN
    failed = {name for name, level in levels.items() if level == FAIL}
    assert failed <= {"root", "nats-server"}


def test_the_space_of_images_is_told(tmp_path: Path) -> None:
    assert host.images(tmp_path).what == "none"
    for folder, files in (("data", "ab"), ("part", "c")):
        (tmp_path / "images" / folder).mkdir(parents=True)
        for name in files:
            (tmp_path / "images" / folder / name).write_bytes(b"x" * 4096)
    found = host.images(tmp_path)
    assert found.level == OK
    assert found.what.startswith(f"2 in {tmp_path}/images, 8KiB; partial downloads, 4KiB")


def test_files_that_vanish_meanwhile_do_not_hide_the_others(tmp_path: Path) -> None:
    data, entry = tmp_path / "images" / "data", tmp_path / "disks" / "quarantine" / "uid"
    for folder in (data, entry, data.with_name("part"), entry.with_name("gone")):
        folder.mkdir(parents=True)
    (data / "lasts").write_bytes(b"x" * 4096)
    (entry / "lasts").write_bytes(b"x" * 4096)
    ended = threading.Event()

    def come_and_go() -> None:
        while not ended.is_set():
            entry.with_name("gone").mkdir(exist_ok=True)
            files = [folder / f"gone{n}" for folder in (data, entry) for n in range(20)]
            for file in files:
                file.touch()
            for file in files:
                file.unlink()
            entry.with_name("gone").rmdir()

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        for _time in range(300):
            assert "4KiB" in host.images(tmp_path).what
            assert "4KiB" in host.quarantine(tmp_path).what
    finally:
        ended.set()
        thread.join()


@pytest.mark.integration
def test_checks_of_this_host_do_not_fail_to_look() -> None:
    for check in (host.reaper, host.cgroups, host.clock, emulator.kvm, emulator.wrapper):
        assert check().level in {OK, WARN, FAIL}
    assert host.root().level == (OK if os.geteuid() == 0 else FAIL)


@pytest.mark.integration
def test_doctor_reports_libvirtds_version_and_limits() -> None:
    found = hypervisor.libvirtd()
    if found.level != OK:
        pytest.skip(found.what)
    assert "libvirt" in found.what
    assert "max_workers" in hypervisor.limits().what


def test_a_check_that_cannot_be_made_has_its_name(tmp_path: Path) -> None:
    def broken(_: Path) -> CheckResult:
        raise PermissionError("denied")

    found = _look(partial(broken, tmp_path))
    assert (found.name, found.level) == ("broken", WARN)
