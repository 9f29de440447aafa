"""Undecided answers of JetStream make the client send the request again."""

import pytest

from virtbus.bus.client.jetstream_errors import why_again
from virtbus.bus.client.link import Raw


@pytest.mark.parametrize(
    "body",
    [
        b'{"error":{"code":503,"err_code":10008,"description":"JetStream system temporarily '
        b'unavailable"},"stream":"","seq":0}',
        b'{"type":"io.nats.jetstream.api.v1.stream_msg_get_response","error":{"code":503,'
        b'"err_code":10008,"description":"JetStream system temporarily unavailable"}}',
    ],
)
def test_a_server_that_is_starting_accepted_nothing(body: bytes) -> None:
    assert why_again(_raw(body))


def test_without_a_responder_nothing_was_accepted() -> None:
    assert why_again(_raw(b"", status="503"))


@pytest.mark.parametrize(
    "body",
    [
        b'{"error":{"code":400,"err_code":10164,"description":"wrong last sequence"},"stream":"",'
        b'"seq":0}',
        b'{"error":{"code":409,"err_code":10158,"description":"duplicate message id is in process"}'
        b',"stream":"KV_vm","seq":0}',
    ],
)
def test_a_cluster_that_still_votes_on_the_key_has_not_refused(body: bytes) -> None:
    assert why_again(_raw(body)) == "an earlier write of this key is not decided yet"


@pytest.mark.parametrize(
    "body",
    [
        b'{"error":{"code":400,"err_code":10071,"description":"wrong last sequence: 7"},"seq":0}',
        b'{"stream":"KV_vm","seq":7}',
        b'{"type":"x","error":{"code":404,"err_code":10037,"description":"no message found"}}',
        # a pending duplicate in a work queue: it is stored, so it counts as accepted
        b'{"error":{"code":503,"err_code":10077,"description":"maximum messages per subject"}}',
        # a stored record whose text looks like a refusal
        b'\x81\xa5label\xb4"error":{"code":503,"',
    ],
)
def test_any_other_answer_is_an_answer(body: bytes) -> None:
    assert not why_again(_raw(body))


def _raw(body: bytes, status: str = "") -> Raw:
    return Raw(subject="s", body=body, reply="", headers={"Status": status} if status else {})
