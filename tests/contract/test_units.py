"""The systemd units are valid and sandboxed as measured, and netd's mounts reach the host."""

import re
import subprocess
from pathlib import Path

import pytest

UNITS = Path(__file__).parents[2] / "deploy" / "systemd"
PREFIX = "/opt/virtbus/venv/bin/"

EXPOSURE = {
    "nats": 2.1,
    "controller": 1.2,
    "imaged": 1.2,
    "nodeagent": 2.5,  # it makes layers immutable, and finds and ends lost guests (ADR 0061)
    "netd": 4.6,
    "cri": 2.1,
    "criproxy": 1.3,
}
"""The highest `systemd-analyze security` score (0 best, 10 worst; a bare unit has 9.6) allowed."""

DROP_INS = {"passt": ("netd", 5.4), "devices": ("nodeagent", 2.5), "lvm": ("nodeagent", 2.8)}
"""The unit that each drop-in gives further rights, and the score that it has then, at most."""

MOUNT_NAMESPACE = (
    "BindPaths|BindReadOnlyPaths|ExecPaths|InaccessiblePaths|LogNamespace|MountAPIVFS|MountFlags|"
    "NoExecPaths|PrivateDevices|PrivateIPC|PrivateMounts|PrivateTmp|ProcSubset|ProtectControlGroups|"
    "ProtectHome|ProtectKernelLogs|ProtectKernelModules|ProtectKernelTunables|ProtectProc|"
    "ProtectSystem|ReadOnlyPaths|ReadWritePaths|RootDirectory|RootImage|TemporaryFileSystem|"
    "DynamicUser|LoadCredential"
)
"""Options that give a unit a mount namespace of its own (systemd.exec(5))."""


def unit(service: str) -> str:
    return (UNITS / f"virtbus-{service}.service").read_text(encoding="utf-8")


def test_every_unit_has_an_exposure_limit() -> None:
    assert {path.name for path in UNITS.glob("*.service")} == {
        f"virtbus-{service}.service" for service in EXPOSURE
    }


def test_every_drop_in_has_an_exposure_limit_and_names_its_place() -> None:
    assert {path.stem for path in UNITS.glob("*.conf")} - {"tmpfiles"} == DROP_INS.keys()
    for name, (service, _) in DROP_INS.items():
        place = f"/etc/systemd/system/virtbus-{service}.service.d/{name}.conf"
        assert place in (UNITS / f"{name}.conf").read_text(encoding="utf-8")


@pytest.mark.parametrize("service", EXPOSURE)
def test_systemd_verifies_the_unit_without_a_message(service: str, tmp_path: Path) -> None:
    verify(service, unit(service), tmp_path)


@pytest.mark.parametrize(("drop_in", "of"), DROP_INS.items())
def test_systemd_verifies_the_drop_in_and_the_sandbox_is_no_weaker_with_it(
    drop_in: str, of: tuple[str, float], tmp_path: Path
) -> None:
    service, limit = of
    text = unit(service) + (UNITS / f"{drop_in}.conf").read_text(encoding="utf-8")
    verify(service, text, tmp_path)
    assert exposure(tmp_path / f"virtbus-{service}.service") <= limit


def verify(service: str, text: str, tmp_path: Path) -> None:
    programs = re.findall(rf"^ExecStart={PREFIX}(\S+)", text, re.MULTILINE)
    assert len(programs) == 1
    for name in programs:
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    copy = tmp_path / f"virtbus-{service}.service"
    copy.write_text(text.replace(PREFIX, f"{tmp_path}/"))
    argv = ["systemd-analyze", "verify", "--man=no", str(copy)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.parametrize(("service", "limit"), EXPOSURE.items())
def test_the_sandbox_is_no_weaker_than_it_was(service: str, limit: float) -> None:
    assert exposure(UNITS / f"virtbus-{service}.service") <= limit


def exposure(path: Path) -> float:
    argv = ["systemd-analyze", "security", "--offline=yes", "--no-pager", str(path)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    score = re.search(r"exposure level for \S+: ([0-9.]+)", done.stdout)
    assert score is not None
    return float(score[1])


def test_netd_shares_the_mounts_of_the_host() -> None:
    """A mount namespace would keep the bind mounts below /run/netns from libvirt's emulators."""
    assert re.findall(rf"^(?:{MOUNT_NAMESPACE})=", unit("netd"), re.MULTILINE) == []


@pytest.mark.parametrize("service", EXPOSURE)
def test_memory_that_runs_out_ends_guests_before_services(service: str) -> None:
    """An emulator has libvirt's 0; the kernel kills the highest score first."""
    score = re.search(r"^OOMScoreAdjust=(-?\d+)$", unit(service), re.MULTILINE)
    assert score is not None
    assert int(score[1]) <= -500


@pytest.mark.parametrize("service", EXPOSURE)
def test_a_stalled_or_dead_service_is_started_again_for_ever(service: str) -> None:
    lines = unit(service).splitlines()
    for line in ("Type=notify", "WatchdogSec=30", "Restart=always", "StartLimitIntervalSec=0"):
        assert line in lines
