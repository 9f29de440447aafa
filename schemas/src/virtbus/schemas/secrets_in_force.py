"""Finds the secrets that a record names in an entry of `$KV.sec`.

An entry has the secrets after the last change, and those before it. The record names one of the
two by its digest (`seed_updates` of the controller).
"""

import hashlib

from virtbus.schemas.records import read_stored
from virtbus.schemas.vm import VmSecrets
from virtbus.schemas.wire import encode


def in_force(key: str, value: bytes, digest: str) -> VmSecrets | None:
    """Return the secrets in an entry that have this digest; None if neither version has it.

    Raises:
        VirtbusError: 422 the entry cannot be read.
    """
    if hashlib.sha256(value).hexdigest() == digest:
        return read_stored(VmSecrets, key, value)
    last = read_stored(VmSecrets, key, value)
    if digest_of(last) == digest:
        return last
    if hashlib.sha256(last.replaced).hexdigest() == digest:
        return read_stored(VmSecrets, key, last.replaced)
    return None


def digest_of(secrets: VmSecrets) -> str:
    """Return the digest of secrets; those that they replaced do not count."""
    return hashlib.sha256(without_replaced(secrets)).hexdigest()


def without_replaced(secrets: VmSecrets) -> bytes:
    """Return the entry of secrets without those that they replaced."""
    return encode(secrets.model_copy(update={"replaced": b""}))
