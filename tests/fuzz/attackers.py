"""Sends a schedule with the credentials of its users, and records the results."""

import asyncio
import json
import random
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

import msgpack
import nats.aio.client
import nats.errors
from tests.fuzz.ground import Ground
from tests.fuzz.mutations import Message
from tests.fuzz.schedule import Schedule, Shot
from tests.fuzz.targets import Target

from virtbus.bus.client.message_format import ERROR_CODE

RATE_HZ = 60.0
BYTES_PER_S = 6_000_000
"""Between messages there is as much time as both allow: a flood of bytes needs no fuzzer."""
LAST = 12
"""Number of a culprit's messages to print; the journal has all."""
HEARD_S = 5.0
"""Answers come within this after the last message."""


class Coverage:
    """By user and subject of the catalogue: sent, answered, refused (by code)."""

    def __init__(self) -> None:
        self.sent: Counter[tuple[str, str]] = Counter()
        self.heard: dict[tuple[str, str], Counter[str]] = {}

    def answer(self, of: tuple[str, str], code: str) -> None:
        self.heard.setdefault(of, Counter())[code] += 1


class Attackers:
    """All credentials, connected. `stop` ends the attack between two messages."""

    def __init__(self, ground: Ground, schedule: Schedule, journal: Path) -> None:
        self.stop = asyncio.Event()
        self.coverage = Coverage()
        self.last: deque[str] = deque(maxlen=LAST)
        self.count = 0
        self.denied = 0
        self._ground = ground
        self._schedule = schedule
        self._journal_path = journal
        self._journal: TextIO | None = None
        self._stack = AsyncExitStack()
        self._clients: dict[str, Any] = {}
        self._prefixes: dict[str, str] = {}
        self._targets: dict[str, tuple[str, str]] = {}
        """The coverage entry of a message, by the subject of its answer."""
        self._begun_s = time.monotonic()

    @asynccontextmanager
    async def connected(self, users: set[str]) -> AsyncIterator[None]:
        """Log in as each user."""
        async with AsyncExitStack() as stack:
            self._stack = stack
            self._journal = stack.enter_context(self._journal_path.open("w", encoding="utf-8"))
            for user in sorted(users):
                await self._connect(user)
            yield

    async def _connect(self, user: str) -> None:
        login = self._ground.login(user)
        client = nats.aio.client.Client()
        await client.connect(
            login["url"],
            user=login["user"],
            password=login["password"],
            inbox_prefix=login["inbox_prefix"],
            error_cb=self._hear_error,
            max_reconnect_attempts=-1,
            reconnect_time_wait=1,
            pending_size=64 * 1024 * 1024,
        )
        self._stack.push_async_callback(self._leave, client)
        prefix = f"{login['inbox_prefix']}.fuzz"
        self._clients[user], self._prefixes[user] = client, prefix
        await client.subscribe(f"{prefix}.>", cb=self._hear)

    @staticmethod
    async def _leave(client: Any) -> None:
        with suppress(Exception):
            async with asyncio.timeout(3):
                await client.close()

    async def _hear_error(self, error: Exception) -> None:
        if "permissions violation for publish" in str(error).lower():
            self.denied += 1

    async def _hear(self, message: Any) -> None:
        """Handle an answer: count it once per message, and search it for a VM's uid."""
        of = self._targets.get(message.subject)
        if of is None:
            return
        headers = message.headers or {}
        code = headers.get(ERROR_CODE) or headers.get("Status") or _js_error(message.data) or "ok"
        self.coverage.answer(of, code)
        if code == "ok" and of[1].startswith(("vm.create", "aimed")):
            self._schedule.pool.seen |= _uids(message.data)

    # --- attack ---------------------------------------------------------------------------
    async def attack(self, seconds: float, say: Callable[[str], None], first: int = 0) -> None:
        """Send turns until the time is over or `stop` is set."""
        self._begun_s = time.monotonic()
        end_s = self._begun_s + seconds
        for shots in self._schedule.turns(first):
            for shot in shots:
                if self.stop.is_set() or time.monotonic() > end_s:
                    say(f"the attack ends with turn {shot.number}: {self.count} messages")
                    return
                await self._send(shot)

    async def _send(self, shot: Shot) -> None:
        self._note(shot)
        of = (shot.user, shot.target)
        for time_number in range(shot.message.times):
            self.count += 1
            self.coverage.sent[of] += 1
            reply = shot.message.reply or f"{self._prefixes[shot.user]}.{self.count}"
            if not shot.message.reply:
                self._targets[reply] = of
            body = shot.message.body
            client = self._clients[shot.user]
            try:
                await client.publish(
                    shot.subject,
                    body,
                    reply=reply if shot.asked or shot.message.reply else "",
                    headers=dict(shot.message.headers) or None,
                )
            except (nats.errors.Error, ValueError, OSError) as error:
                self.coverage.answer(of, f"not sent: {type(error).__name__}")
            if client.is_closed:  # the server ends connections for oversized messages
                with suppress(nats.errors.Error, OSError):
                    await self._connect(shot.user)
            if time_number % 16 == 0 or len(body) > 10_000:
                await asyncio.sleep(max(1 / RATE_HZ, len(body) / BYTES_PER_S))

    def _note(self, shot: Shot) -> None:
        line = json.dumps(
            {
                "turn": shot.number,
                "at_s": round(time.monotonic() - self._begun_s, 3),
                "user": shot.user,
                "subject": shot.subject[:200],
                "target": shot.target,
                "what": shot.message.what,
                "bytes": len(shot.message.body),
                "times": shot.message.times,
                "begins": shot.message.body[:24].hex(),
            }
        )
        self.last.append(line)
        if self._journal is not None:
            self._journal.write(line + "\n")
            self._journal.flush()

    async def ask_silent(self, targets: Sequence[Target]) -> None:
        """Send an empty request to each handler that has not answered yet.

        A handler may have got only requests whose answers come late, such as pulls of slow images.
        """
        rng, heard = random.Random(0), {of[1] for of in self.coverage.heard}
        for one in targets:
            if one.asked and one.id not in heard:
                subject = one.filled(rng, self._schedule.pool)
                empty = Message("an empty request", b"")
                await self._send(Shot(0, one.user, one.id, subject, True, empty))

    async def heard_out(self) -> None:
        """Wait for the last answers."""
        await asyncio.sleep(HEARD_S)


def _js_error(body: bytes) -> str:
    """JetStream's own refusals are in the body."""
    if body[:2] == b'{"' and b'"error"' in body[:300]:
        with suppress(ValueError, KeyError, TypeError):
            return f"js {json.loads(body)['error']['code']}"
    return ""


def _uids(body: bytes) -> set[str]:
    with suppress(Exception):
        value = json.loads(body) if body[:1] == b"{" else msgpack.unpackb(body)
        uid = value.get("vm", {}).get("uid")
        return {uid} if isinstance(uid, str) else set()
    return set()
