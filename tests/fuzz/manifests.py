"""Attacks the bridge's port: hostile manifests, hostile YAML, and silent connections."""

import asyncio
import io
import json
import random
from contextlib import suppress
from typing import Any

import aiohttp
from services.kubebridge.tests import manifests
from tests.fuzz.attackers import Coverage
from tests.fuzz.mutations import DATA, SPOILT, WRONG
from tests.fuzz.pool import BRIDGE_PORT
from tests.fuzz.texts import aliases, hostile_text, merges

BASE = f"http://127.0.0.1:{BRIDGE_PORT}"
PREFIX = "/apis/subresources.kubevirt.io/v1/namespaces/hostile"
WEBHOOKS = ("/admission/mutate", "/admission/validate")
VERBS = (
    "start",
    "stop",
    "restart",
    "pause",
    "softreboot",
    "freeze",
    "unfreeze",
    "addvolume",
    "migrate",
    "x",
)
IDLE = 24
"""More than any pool of slots should give to one source."""
IDLE_S = 12.0
PAUSE_S = 0.15
ANSWER_S = 12.0
BODY_BYTES = 2 * 1024 * 1024
MUTATED_BYTES = 16 * 1024
"""A larger manifest is not mutated again: a list of lists of manifests would need gigabytes."""


class Manifests:
    """Requests of tenants, drawn from the seed; `run` until cancelled."""

    def __init__(self, seed: int, coverage: Coverage) -> None:
        self._rng = random.Random(f"{seed}/manifests")
        self._coverage = coverage

    async def run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=ANSWER_S)
        async with (
            aiohttp.ClientSession(BASE, timeout=timeout) as session,
            asyncio.TaskGroup() as group,
        ):
            group.create_task(self._idle())
            while True:
                await self._one(session, *self._drawn())
                await asyncio.sleep(PAUSE_S)

    def _drawn(self) -> tuple[str, str, bytes]:
        rng = self._rng
        match rng.randrange(4):
            case 0 | 1:
                return "POST", rng.choice(WEBHOOKS), self._review()
            case 2:
                kind = rng.choice(("virtualmachines", "virtualmachineinstances"))
                text = rng.choice(
                    (merges(rng.choice((18, 24, 130))), aliases(12), hostile_text(rng))
                )
                return "PUT", f"{PREFIX}/{kind}/h/{rng.choice(VERBS)}", text.encode()[:4096]
            case _:
                body = self._spoilt(_json(self._object()).encode())
                return "PUT", f"{PREFIX}/expand-vm-spec", body

    def _object(self) -> Any:
        """A manifest with a few mutations."""
        rng = self._rng
        found: Any = manifests.vm() if rng.random() < 0.6 else manifests.vmi()
        for _ in range(rng.randrange(4)):
            if not isinstance(found, dict | list) or len(_json(found)) > MUTATED_BYTES:
                break
            _, found = rng.choice(DATA)(found, rng)
        return found

    def _review(self) -> bytes:
        rng = self._rng
        made = self._object()
        kind = made.get("kind") if isinstance(made, dict) else rng.choice(WRONG)
        request: dict[str, Any] = {"uid": "u", "kind": {"kind": kind}, "object": made}
        request |= {"operation": rng.choice(("CREATE", "UPDATE", "DELETE", "x"))}
        if rng.random() < 0.5:
            request["oldObject"] = self._object()
        whole = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview"}
        body = _json(whole | {"request": request}).encode()
        return self._spoilt(body)

    def _spoilt(self, body: bytes) -> bytes:
        if self._rng.random() < 0.15:
            body = SPOILT[self._rng.choice(sorted(SPOILT))](body, self._rng)
        return body[:BODY_BYTES]

    async def _one(
        self, session: aiohttp.ClientSession, method: str, path: str, body: bytes
    ) -> None:
        of = ("tenant", f"bridge {method} {path.replace(PREFIX, '').split('/h/')[0]}")
        self._coverage.sent[of] += 1
        try:
            async with session.request(method, path, data=io.BytesIO(body)) as answer:
                await answer.read()
                self._coverage.answer(of, str(answer.status))
        except (aiohttp.ClientError, TimeoutError) as error:
            self._coverage.answer(of, type(error).__name__)

    async def _idle(self) -> None:
        """Hold connections that announce a body and send none."""
        of = ("anybody", "bridge connections that say nothing")
        head = f"POST {WEBHOOKS[0]} HTTP/1.1\r\nHost: x\r\nContent-Length: 5000\r\n\r\n{{"
        while True:
            held = []
            for _ in range(IDLE):
                with suppress(OSError):
                    _reader, writer = await asyncio.open_connection("127.0.0.1", BRIDGE_PORT)
                    writer.write(head.encode())
                    held.append(writer)
                    self._coverage.sent[of] += 1
            try:
                await asyncio.sleep(IDLE_S)
            finally:
                for writer in held:
                    writer.close()
            self._coverage.answer(of, "held")


def _json(value: Any) -> str:
    return json.dumps(value, default=str)
