"""Makes NATS's nkeys for users, and signs a server's nonce with an nkey.

An nkey is an ed25519 key. As text it is base32 of prefix, key and CRC-16 (XMODEM).
"""

import base64
import binascii

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

_SEED, _USER = 18 << 3, 20 << 3


def _text(payload: bytes) -> str:
    checked = payload + binascii.crc_hqx(payload, 0).to_bytes(2, "little")
    return base64.b32encode(checked).decode("ascii").rstrip("=")


def _key(seed: str) -> Ed25519PrivateKey:
    """Return the private key of a user's seed.

    Raises:
        ValueError: `seed` is not the seed of a user.
    """
    text = seed.strip()
    raw = base64.b32decode(text + "=" * (-len(text) % 8))
    payload, crc = raw[:-2], raw[-2:]
    prefix = bytes([_SEED | _USER >> 5, (_USER & 31) << 3])
    if len(raw) != 36 or binascii.crc_hqx(payload, 0).to_bytes(2, "little") != crc:
        msg = "this is no nkey seed"
        raise ValueError(msg)
    if payload[:2] != prefix:
        msg = "this nkey seed is not a user's (SU…)"
        raise ValueError(msg)
    return Ed25519PrivateKey.from_private_bytes(payload[2:])


def new_seed() -> str:
    """Return a new seed of a user, `SU…`. The seed is secret: its holder can log in as the user."""
    raw = Ed25519PrivateKey.generate().private_bytes_raw()
    return _text(bytes([_SEED | _USER >> 5, (_USER & 31) << 3]) + raw)


def public(seed: str) -> str:
    """Return the public key `U…` of a seed, for the server's configuration."""
    return _text(bytes([_USER]) + _key(seed).public_key().public_bytes_raw())


def signed(seed: str, nonce: str) -> str:
    """Return the signature of a server's nonce, for `sig` of CONNECT."""
    signature = _key(seed).sign(nonce.encode("ascii"))
    return base64.urlsafe_b64encode(signature).decode("ascii").rstrip("=")
