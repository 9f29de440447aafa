"""`virtbus node up --simulate --count`: one process, many nodes."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from virtbus.cli.__main__ import main
from virtbus.cli.failures import CliError, Exit
from virtbus.cli.up.node_command import fleet


@pytest.mark.parametrize(
    ("simulate", "name", "creds"),
    [(False, "sim", "."), (True, None, "."), (True, "sim", "no-such-folder")],
)
def test_many_nodes_need_simulate_a_name_and_a_folder(
    simulate: bool, name: str | None, creds: str
) -> None:
    with pytest.raises(CliError) as refused:
        fleet(simulate=simulate, name=name, nats=None, creds=creds, count=2)
    assert refused.value.exit_code is Exit.USAGE


def test_the_command_becomes_the_simulation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's own credentials are ignored: each node has its own in the folder."""
    became: list[Any] = []

    def become(*of: Any) -> None:
        became.extend(of)
        raise SystemExit

    monkeypatch.setattr(os, "execve", become)
    monkeypatch.setenv("VIRTBUS_CREDS", "/home/me/bus.creds")
    with pytest.raises(SystemExit):
        fleet(simulate=True, name="sim", nats="nats://b1", creds=str(tmp_path), count=200)
    program, argv, env = became
    assert program == sys.executable
    assert argv[1:] == [
        *("-m", "virtbus.simulator", "--node", "sim", "--count", "200"),
        *("--run-dir", str(tmp_path), "--server", "nats://b1"),
    ]
    assert "VIRTBUS_CREDS" not in env


@pytest.mark.parametrize("option", [("--data", "/d"), ("--log-level", "DEBUG"), ("--force",)])
def test_many_nodes_take_no_options_that_have_no_effect(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: tuple[str, ...]
) -> None:
    words = ("node", "up", "--simulate", "--count", "2", "--name", "sim", "--creds", str(tmp_path))
    assert main([*words, *option]) == 2
    assert "--count excludes" in capsys.readouterr().err
