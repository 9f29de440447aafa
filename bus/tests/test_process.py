"""A service's process ends with a line that names the next step, or with a traceback."""

import json
import subprocess
import sys
from typing import Any

PROGRAM = """
import sys
from virtbus.bus.runtime import process
from virtbus.bus.errors import UnavailableError
from virtbus.bus.runtime.settings import ServiceSettings
from virtbus.schemas.errors import Code, VirtbusError

async def body():
    {body}

sys.exit(process.run(ServiceSettings(node="n1", log_level="{level}"), body))
"""


def _ended(body: str, level: str = "INFO") -> tuple[int, list[dict[str, Any]]]:
    """Return the exit code of a process whose service does `body`, and its log."""
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(body=body, level=level)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return ended.returncode, [json.loads(line) for line in ended.stderr.splitlines()]


def test_a_service_starts_without_packages_that_it_does_not_need() -> None:
    slow = ("importlib.metadata", "email", "aiohttp", "nats.js.client", "opentelemetry")
    program = (
        "import virtbus.bus.quick_start, sys\n"
        "from virtbus.bus.client import connection\n"
        "from virtbus.bus.runtime.settings import ServiceSettings\n"
        "ServiceSettings(node='n1')\n"
        f"print([name for name in {slow} if name in sys.modules])\n"
        "from importlib.metadata import version\n"
        "print(version('nats-py') > '2')\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert ended.stdout.split("\n")[:2] == ["[]", "True"]


def test_an_error_that_a_person_can_fix_is_one_line_without_a_traceback() -> None:
    for raised in (
        "raise VirtbusError(Code.INVALID, 'no_login', 'no login: give --kubeconfig')",
        "raise ExceptionGroup('many', [UnavailableError('no login: give --kubeconfig')])",
    ):
        code, [line] = _ended(raised)
        assert code == 1
        assert line["message"] == "service cannot run: no login: give --kubeconfig"
        assert "exception" not in line


def test_at_debug_the_traceback_is_logged_too() -> None:
    code, lines = _ended("raise UnavailableError('no bus')", level="DEBUG")
    assert code == 1
    assert lines[-2]["code"] == "cannot_run"
    assert "in body" in lines[-1]["exception"]


def test_a_bug_is_logged_with_its_traceback() -> None:
    for raised in (
        "raise KeyError('lost')",
        "raise VirtbusError(Code.INTERNAL, 'internal', 'a bug')",
        "raise ExceptionGroup('both', [UnavailableError('no bus'), KeyError('lost')])",
    ):
        code, [line] = _ended(raised)
        assert code == 1
        assert line["code"] == "service_failed"
        assert "in body" in line["exception"]


def test_a_clean_exit_of_a_service_logs_nothing() -> None:
    assert _ended("pass") == (0, [])


EARLY = """
    from virtbus.schemas.catalogue import CHANNELS
    from virtbus.schemas.model import models
    import asyncio
    process.notify("READY=1")
    until_s = asyncio.get_running_loop().time() + 30
    while waiting := [one for one in models() if not one.__pydantic_complete__]:
        assert asyncio.get_running_loop().time() < until_s, waiting
        await asyncio.sleep(0.01)
    assert len(list(models())) > len(CHANNELS) / 2
"""


def test_a_ready_service_builds_each_validator_before_a_message_needs_it() -> None:
    assert _ended(EARLY.strip()) == (0, [])


HOLES = """
    import asyncio
    from pathlib import Path
    resident = lambda: int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20
    process.TRIM_INTERVAL_S = 0.2
    await asyncio.sleep(0)
    blocks = [bytearray(16 * 1024) for _ in range(6400)]
    held = resident()
    del blocks[::2], blocks[::2]
    until_s = asyncio.get_running_loop().time() + 30
    while resident() > held - 60:
        assert asyncio.get_running_loop().time() < until_s, (resident(), held)
        await asyncio.sleep(0.01)
"""


def test_free_memory_between_used_blocks_goes_back_to_the_system() -> None:
    assert _ended(HOLES.strip()) == (0, [])


MEMORY = """
import resource
from pathlib import Path

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

async def body():
    filler = [b"x" * (64 * 1024 - number) for number in range(200)]  # of what imports freed
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for number in range(1000):
        b"x" * (256 * 1024 - number)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    before = resident()
    blocks = [bytes(512 * 1024) for _ in range(100)] + [bytes(96 * 1024) for _ in range(400)]
    blocks = [bytearray(block) for block in blocks]
    held = resident() - before
    blocks.clear()
    left = resident() - before
    print(held >> 20, left >> 20, faults)

"""


def test_a_burst_gives_its_memory_back_and_a_tls_read_maps_none() -> None:
    program = MEMORY + PROGRAM.replace("async def body():\n    {body}\n", "").format(level="INFO")
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    held_mib, left_mib, faults = map(int, ended.stdout.split())
    assert held_mib > 80
    assert left_mib <= 4
    assert faults < 200
