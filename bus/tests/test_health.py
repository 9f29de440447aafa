"""The health check of a container fails as soon as its service, or the bus, does not work."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from virtbus.bus.client import health
from virtbus.bus.provisioning.server import Server, ServerFiles

SERVICE = """
import asyncio, sys
from virtbus.bus.runtime import process
from virtbus.bus.runtime.settings import ServiceSettings

async def body():
    process.notify("READY=1")
    await asyncio.sleep(60)

sys.exit(process.run(ServiceSettings(node="n1"), body))
"""


def _creds(path: Path, port: int) -> str:
    path.write_text(json.dumps({"url": f"nats://127.0.0.1:{port}", "user": "u", "password": "p"}))
    return str(path)


def test_a_service_that_is_not_ready_is_not_healthy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    creds = _creds(tmp_path / "bus", 1)
    assert health.main([creds, "--alive", str(tmp_path / "alive")]) == 1
    assert "not ready" in capsys.readouterr().out


def test_a_blocked_event_loop_is_not_healthy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alive = tmp_path / "alive"
    alive.touch()
    long_ago = time.time() - 60
    os.utime(alive, (long_ago, long_ago))
    assert health.main([_creds(tmp_path / "bus", 1), "--alive", str(alive)]) == 1
    assert "has not run for 60 s" in capsys.readouterr().out


def test_a_socket_that_nobody_serves_is_not_healthy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    creds, path = _creds(tmp_path / "bus", 1), tmp_path / "wrapper.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        assert health.main([creds, "--socket", str(path)]) == 1
        assert f"nobody listens on {path}" in capsys.readouterr().out
        server.listen()
        assert health.main([creds, "--socket", str(path)]) == 1
        assert "no login as u" in capsys.readouterr().out


def test_no_name_of_another_socket_fails_the_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    creds, path = _creds(tmp_path / "bus", 1), tmp_path / "wrapper.sock"
    forged = b"0: 00000002 00000000 00010000 0001 01 1 "
    names = (b"\xff\xfe", b"\n", b"\n\n", b"a b", b"\n" + forged + b"/", b"\nx x x zz x x x /x")
    with ExitStack() as stack:
        for name in names:
            other = stack.enter_context(socket.socket(socket.AF_UNIX))
            other.bind(b"\0" + os.urandom(4).hex().encode() + name)
        assert health.main([creds, "--socket", str(path)]) == 1
        assert f"nobody listens on {path}" in capsys.readouterr().out
        server = stack.enter_context(socket.socket(socket.AF_UNIX))
        server.bind(str(path))
        server.listen()
        assert health.main([creds, "--socket", str(path)]) == 1
        assert "no login as u" in capsys.readouterr().out


def test_a_bus_that_is_gone_is_not_healthy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert health.main([_creds(tmp_path / "bus", 1)]) == 1
    assert "no login as u" in capsys.readouterr().out
    assert health.main([str(tmp_path / "none")]) == 1
    assert "does not exist" in capsys.readouterr().out


def test_a_service_touches_its_file_from_its_event_loop_once_it_is_ready(tmp_path: Path) -> None:
    alive = tmp_path / "alive"
    environ = os.environ | {"VIRTBUS_ALIVE_FILE": str(alive)}
    with subprocess.Popen([sys.executable, "-c", SERVICE], env=environ) as service:
        try:
            until = time.monotonic() + 15
            while not alive.exists():
                assert time.monotonic() < until
                time.sleep(0.05)
            first = alive.stat().st_mtime_ns
            while alive.stat().st_mtime_ns == first:
                assert time.monotonic() < until
                time.sleep(0.05)
        finally:
            service.send_signal(signal.SIGTERM)


@pytest.mark.integration
async def test_a_service_that_listens_on_the_bus_is_healthy(
    nats: Server, files: ServerFiles, tmp_path: Path
) -> None:
    creds = str(files.creds("client"))
    assert nats.port
    alive = tmp_path / "alive"
    alive.touch()
    parse = health.parser().parse_args
    assert await health.unhealthy(parse([creds, "--alive", str(alive)])) == ""
    silent = parse([creds, "--asks", "$SRV.PING.nobody"])
    assert await health.unhealthy(silent) == "nobody listens on $SRV.PING.nobody"
    with socket.create_server(("127.0.0.1", 0)) as never_accepts:
        several = json.loads(Path(creds).read_text())
        several["url"] = f"nats://127.0.0.1:{never_accepts.getsockname()[1]},{several['url']}"
        (tmp_path / "several").write_text(json.dumps(several))
        assert await health.unhealthy(parse([str(tmp_path / "several")])) == ""
    await nats.kill()
    assert "no login as client" in await health.unhealthy(parse([creds]))
