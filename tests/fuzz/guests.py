"""Plays hostile guests: frames from their taps, endless consoles, and lying guest agents."""

import asyncio
import json
import random
import sys
import time
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

from tests.fuzz.attackers import Coverage
from tests.fuzz.ground import Ground
from tests.fuzz.pool import Pool

from virtbus.nodeagent.core.guest_answers import guest_info
from virtbus.schemas.wire import encode_json

NETNS = Path("/run/netns")
FRAMES = 60
PIECE = b"\x1b[2J\x00\xff" * 8192
ANSWERS = 40
"""Maps of a guest agent for each turn."""
MOST_CPU_S = 0.5
MOST_BYTES = 1024 * 1024
KEYS = ("user", "fs", "if", "os", "timezone", "hostname")

DHCP = ("guest", "DHCP, DNS and echo frames")
CONSOLE = ("guest", "console bytes")
AGENT = ("guest", "guest-agent answers")


class Guests:
    """Plays the QEMU of the attackers' VMs on the simulated hypervisor."""

    def __init__(self, ground: Ground, pool: Pool, coverage: Coverage) -> None:
        self._ground = ground
        self._pool = pool
        self._coverage = coverage
        self._rng = random.Random(f"{pool.seed}/guests")
        self._consoles: dict[str, AsyncExitStack] = {}
        self.broken: list[str] = []

    async def run(self) -> None:
        """Attack once a second until cancelled."""
        try:
            while True:
                await self._frames()
                await self._listen()
                self._answers()
                await asyncio.sleep(1.0)
        finally:
            for stack in self._consoles.values():
                await stack.aclose()

    def _networks(self) -> dict[str, Any]:
        """Return netd's state of the attackers' VMs that have a namespace."""
        found = {}
        for uid in self._pool.uids:
            path = self._ground.state_dir / "netd" / "vms" / f"{uid}.json"
            with suppress(OSError, ValueError):
                if (NETNS / f"vb-{uid}").exists():
                    found[uid] = json.loads(path.read_text())
        return found

    async def _frames(self) -> None:
        networks = self._networks()
        if not networks:
            return
        uid = self._rng.choice(sorted(networks))
        nic = await self._nic(uid)
        if nic is None:
            return
        words = (f"{self._pool.seed}/{uid}/{self._rng.random()}", str(FRAMES), "tap0", *nic)
        process = await asyncio.create_subprocess_exec(
            *("nsenter", f"--net={NETNS}/vb-{uid}", sys.executable, "-m", "tests.fuzz.frames"),
            *words,
            cwd=Path(__file__).parents[2],
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        out = b""
        try:
            async with asyncio.timeout(20):
                out, _ = await process.communicate()
        except TimeoutError:
            pass
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        words_out = out.split()
        if len(words_out) == 2:
            self._coverage.sent[DHCP] += int(words_out[0])
            for _ in range(int(words_out[1])):
                self._coverage.answer(DHCP, "ok")

    async def _nic(self, uid: str) -> tuple[str, str, str] | None:
        """Return MAC, address and gateway of a VM, as the API shows them."""
        async with self._ground.bus("client") as bus:
            try:
                view = await bus.request("virtbus.api.v1.vm.get", {"uid": uid}, timeout_s=5)
                interface = view["interfaces"][0]
                address = interface["addresses"][0].partition("/")[0]
            except Exception:  # noqa: BLE001  a VM that went meanwhile has none
                return None
        return interface["mac"], address, "10.127.0.1"

    # --- consoles -------------------------------------------------------------------------
    async def _listen(self) -> None:
        """Play the serial console of VMs that have none, with endless bytes."""
        for uid in self._pool.uids:
            path = self._ground.run_dir / "vms" / uid / "console.sock"
            if uid in self._consoles and not path.exists():
                await self._consoles.pop(uid).aclose()
            if uid in self._consoles or not path.parent.is_dir() or path.exists():
                continue
            stack = AsyncExitStack()
            with suppress(OSError):
                server = await asyncio.start_unix_server(self._talk, str(path))
                stack.callback(server.close)
                stack.callback(path.unlink, missing_ok=True)
                self._consoles[uid] = stack

    async def _talk(self, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.CancelledError):
            for _ in range(200):
                writer.write(PIECE)
                await writer.drain()
                self._coverage.sent[CONSOLE] += 1
                self._coverage.answer(CONSOLE, "ok")
                await asyncio.sleep(0.05)
        writer.close()

    # --- guest agents ---------------------------------------------------------------------
    def _answers(self) -> None:
        """Feed guest-agent answers to the function that receives them from libvirt."""
        for _ in range(ANSWERS):
            answers = self._lies()
            begun_s = time.thread_time()
            try:
                size = len(encode_json(guest_info(answers)))
            except Exception as error:  # noqa: BLE001  whatever it is, a guest caused it
                self.broken.append(f"guest agent: {error!r} of {str(answers)[:300]}")
                continue
            used_s = time.thread_time() - begun_s
            self._coverage.sent[AGENT] += 1
            self._coverage.answer(AGENT, "ok")
            if used_s > MOST_CPU_S or size > MOST_BYTES:
                self.broken.append(f"guest agent: {used_s:.2f} s, {size} bytes")

    def _lies(self) -> dict[str, object]:
        rng = self._rng
        values: tuple[object, ...] = (
            *(0, -1, 2**63, 10**30, "", "x" * 100_000, "\ud800", "\x00", b"x", None, 1e308, []),
        )
        found: dict[str, object] = {}
        for key in KEYS:
            found[key] = rng.choice(values)
            found[f"{key}.count"] = rng.choice((0, 3, 2**31, -5, "x", 10**30))
            for number in range(rng.choice((0, 2, 70))):
                for part in (
                    "name",
                    "addr.count",
                    "addr.0.addr",
                    "fstype",
                    "login-time",
                    "disk.count",
                ):
                    found[f"{key}.{number}.{part}"] = rng.choice(values)
        return found
