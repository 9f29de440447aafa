"""The probe's verdict, on stand-ins for QEMU and on QEMU itself."""

import asyncio
from pathlib import Path

import pytest

from virtbus.nodeagent.edge.kvm_probe import boot_sector, boots_in_s, usable

QEMU = Path("/usr/bin/qemu-system-x86_64")


def stand_in(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_the_probe_is_a_bootable_sector() -> None:
    assert len(boot_sector()) == 512
    assert boot_sector().endswith(b"\x55\xaa")


async def test_a_qemu_with_another_exit_did_not_boot(tmp_path: Path) -> None:
    assert await boots_in_s(stand_in(tmp_path / "qemu", "exit 0"), "tcg") is None
    assert await boots_in_s(stand_in(tmp_path / "qemu", "exit 85"), "tcg") is not None


async def test_a_qemu_that_is_missing_is_no_kvm(tmp_path: Path) -> None:
    assert await usable(tmp_path / "none") is False


@pytest.mark.integration
async def test_a_qemu_that_hangs_is_ended_with_all_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("virtbus.nodeagent.edge.kvm_probe.PROBE_S", 0.5)
    hangs = stand_in(tmp_path / "qemu", f"sleep 60 & echo $! $$ > {tmp_path}/pids; wait")
    assert await boots_in_s(hangs, "tcg") is None
    pids = (tmp_path / "pids").read_text().split()
    async with asyncio.timeout(10):  # a killed process dies at its next turn on a CPU
        while not all(_state(pid) in {"", "Z"} for pid in pids):
            await asyncio.sleep(0.01)


def _state(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    except OSError:
        return ""


@pytest.mark.integration
async def test_emulation_boots_the_probe() -> None:
    assert await boots_in_s(QEMU, "tcg") is not None
