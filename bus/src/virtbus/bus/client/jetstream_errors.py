"""Translates JetStream's error codes into exceptions (ADR-7)."""

import re
from typing import Any

from pydantic_core import from_json

from virtbus.bus.client.link import Raw
from virtbus.bus.errors import BusError, ConflictError, DeniedError, FullError, UnavailableError

WRONG_LAST_SEQUENCE = frozenset({10071, 10164})
STORE_FAILED = 10077
STREAM_NOT_FOUND = 10059
NO_MESSAGE = 10037
CONSUMER_NOT_FOUND = 10014
CONSUMER_DIFFERS = 10012
"""A consumer cannot be created. The error's text names the cause, for example an existing consumer
with another storage."""
NO_PEERS = 10005
"""The cluster has fewer servers than the stream has replicas."""
_FULL = frozenset({10023, 10028, 10047, 10054, 10122})
"""No resources, no memory, no storage, message over max_msg_size, stream over the account's
limit."""
_IN_FLIGHT = frozenset({10158, 10164})
"""The cluster has not yet committed an earlier write of the same message id or subject.

The requester repeats a single write. In a batch, which is not repeated, 10164 is a conflict.
"""
_NOBODY = "nobody answers for this stream: its servers elect a leader, or it does not exist"
_ERROR = re.compile(rb'\{(?:"type":"[\w.]+",)?"error":\{"code":(\d+),"err_code":(\d+),')


class ApiError(BusError):
    """An error of JetStream without a more specific class. `code` is JetStream's `err_code`."""

    def __init__(self, http: int, code: int, text: str) -> None:
        super().__init__(f"{text} ({http}/{code})")
        self.http = http
        self.code = code
        self.text = text


class QueuedError(ApiError):
    """The stream keeps one message per subject, and already has a message of this subject."""


def why_again(raw: Raw) -> str:
    """Return the reason why the request must be repeated; empty for a conclusive answer.

    The first bytes of JetStream's JSON mark an error. A direct get answers with a stored value: a
    msgpack map, which never begins with these bytes.
    """
    if raw.status == "503":
        return _NOBODY
    error = _ERROR.match(raw.body[:256])
    if error is None:
        return ""
    http, code = (int(number) for number in error.groups())
    if code in _IN_FLIGHT:
        return "an earlier write of this key is not decided yet"
    return _NOBODY if http == 503 and code != STORE_FAILED else ""


def answer_of(raw: Raw) -> dict[str, Any]:
    """Return the JSON answer of a JetStream call.

    Raises:
        UnavailableError: no server answers for the stream (during an election, or because the
            stream does not exist), or JetStream answers 503 with a code without its own class.
        ConflictError, DeniedError, FullError, ApiError: JetStream refused the call.
        BusError: the answer cannot be read.
    """
    if raw.status == "503":
        raise UnavailableError(_NOBODY)
    try:
        answer: dict[str, Any] = from_json(raw.body)
    except ValueError as error:
        msg = "JetStream's answer cannot be read"
        raise BusError(msg) from error
    failure = answer.get("error")
    if failure:
        raise refusal(
            int(failure.get("code", 0)),
            int(failure.get("err_code", 0)),
            str(failure.get("description", "")),
        )
    return answer


def refusal(http: int, code: int, text: str) -> BusError:
    """Return the exception for an error of JetStream."""
    if code in WRONG_LAST_SEQUENCE:
        return ConflictError(text)
    if code == STORE_FAILED and "per subject" in text:
        return QueuedError(http, code, text)
    if code in _FULL or (code == STORE_FAILED and "exceeded" in text):
        return FullError(text)
    kind = {403: DeniedError, 503: UnavailableError}.get(http)
    return kind(text) if kind is not None else ApiError(http, code, text)
