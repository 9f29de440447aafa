"""Finds, in an entry of `$KV.sec`, the secrets whose digest is in a VM's record.

An entry has the secrets after the last change, and the secrets before that change. The record has
the digest of one of the two (`seed_updates` of the controller).
"""

import hashlib

from virtbus.schemas.records import read_stored
from virtbus.schemas.vm import VmSecrets
from virtbus.schemas.wire import encode


def in_force(key: str, value: bytes, digest: str) -> VmSecrets | None:
    """Return the secrets in an entry that have this digest; None if neither version has the digest.

    Raises:
        VirtbusError: the errors of `read_stored`, for the entry or the secrets in it.
    """
    found = encoded_in_force(key, value, digest)
    return None if found is None else read_stored(VmSecrets, key, found)


def encoded_in_force(key: str, value: bytes, digest: str) -> bytes | None:
    """Return the secrets of `in_force` as stored bytes, which have the digest.

    An older version of virtbus may have encoded the secrets in another way than `encode`. Raises as
    `read_stored`.
    """
    if hashlib.sha256(value).hexdigest() == digest:
        return value
    last = read_stored(VmSecrets, key, value)
    versions = (without_replaced(last), last.replaced)
    return next((one for one in versions if hashlib.sha256(one).hexdigest() == digest), None)


def digest_of(secrets: VmSecrets) -> str:
    """Return the digest of `secrets` without `replaced`."""
    return hashlib.sha256(without_replaced(secrets)).hexdigest()


def without_replaced(secrets: VmSecrets) -> bytes:
    """Return the encoded `secrets` without `replaced`."""
    return encode(secrets.model_copy(update={"replaced": b""}))
