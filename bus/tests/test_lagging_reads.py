"""A write that is repeated after a lost answer, before a replica that lags behind the leader."""

from collections.abc import Sequence

import pytest

from virtbus.bus.client import records as module
from virtbus.bus.client.link import LinkLostError, Raw
from virtbus.bus.client.records import MESSAGE_ID, Records
from virtbus.bus.errors import ConflictError, OutcomeUnknownError
from virtbus.bus.runtime.bus_settings import BusSettings

KEY = "$KV.st.n1.01900000-0000-7000-8000-000000000001"
REFUSAL = (
    b'{"error":{"code":400,"err_code":10071,"description":"wrong last sequence: %d"},'
    b'"stream":"KV_st","seq":0}'
)
OWN, OTHER = "own", "other"
Copy = tuple[int, str] | None
"""The sequence and the author of the last message that a replica has; None: no message."""


class _Lagging:
    """A stream that loses the answer to a write, and refuses its repeat; reads lag behind."""

    def __init__(self, last: int, copies: Sequence[Copy]) -> None:
        self._refusal = Raw("x", REFUSAL % last)
        self._copies = list(copies)
        self._id = ""
        self.reads = 0

    async def up(self, timeout_s: float) -> None:
        del timeout_s

    async def ask(self, subject: str, body: bytes, *, headers: dict[str, str], **_: float) -> Raw:
        del body
        if subject == KEY:
            if not self._id:
                self._id = headers[MESSAGE_ID]
                raise LinkLostError("cut (test)")
            return self._refusal
        self.reads += 1
        copy = self._copies.pop(0) if len(self._copies) > 1 else self._copies[0]
        if copy is None:
            return Raw("x", headers={"Status": "404"})
        sequence, author = copy
        about = {"Nats-Sequence": str(sequence), "Nats-Subject": KEY}
        return Raw("x", headers=about | {MESSAGE_ID: self._id if author == OWN else author})


def records(stream: _Lagging) -> Records:
    return Records(stream, BusSettings(node="n1", write_timeout_s=1.0))  # type: ignore[arg-type]  # two methods are enough


@pytest.mark.parametrize("older", [(5, OTHER), None])
async def test_a_node_finds_its_own_write_once_the_replica_has_it(older: Copy) -> None:
    stream = _Lagging(7, [older, older, (7, OWN)])
    assert await records(stream).put(KEY, b"x", expect=5) == 7
    assert stream.reads == 3


@pytest.mark.parametrize("copy", [(7, OTHER), (8, OTHER)])
async def test_a_write_of_another_is_a_conflict_at_once(copy: Copy) -> None:
    stream = _Lagging(7, [copy])
    with pytest.raises(ConflictError):
        await records(stream).put(KEY, b"x", expect=5)
    assert stream.reads == 1


async def test_without_a_message_of_the_key_a_conflict_is_one() -> None:
    stream = _Lagging(0, [None])
    with pytest.raises(ConflictError):
        await records(stream).put(KEY, b"x", expect=5)


async def test_a_replica_that_never_catches_up_leaves_the_outcome_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "CATCH_UP_S", 0.2)
    stream = _Lagging(7, [(5, OTHER)])
    with pytest.raises(OutcomeUnknownError):
        await records(stream).put(KEY, b"x", expect=5)
    assert stream.reads > 1
