"""A throwaway certificate authority: keys and certificates for one test cluster."""

import datetime
import ipaddress
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_HOUR = datetime.timedelta(hours=1)
_USES = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]


class Pair(NamedTuple):
    """The paths of two PEM files."""

    certificate: Path
    key: Path


class Authority:
    """One CA in a folder; `<name>.crt` and `<name>.key` are its own, signed ones lie next to it."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        signed = (
            _builder(self._name, self._name, self._key)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.certificate = _written(folder / name, signed, self._key).certificate

    def sign(
        self, name: str, user: str, *, groups: Sequence[str] = (), hosts: Sequence[str] = ()
    ) -> Pair:
        """Make a pair `<name>.*` for a Kubernetes user in these groups, or a server of hosts."""
        key = ec.generate_private_key(ec.SECP256R1())
        parts = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in groups]
        subject = x509.Name([*parts, x509.NameAttribute(NameOID.COMMON_NAME, user)])
        builder = _builder(subject, self._name, key).add_extension(
            x509.ExtendedKeyUsage(_USES), critical=False
        )
        if hosts:
            names = x509.SubjectAlternativeName([_general(host) for host in hosts])
            builder = builder.add_extension(names, critical=False)
        return _written(self._folder / name, builder.sign(self._key, hashes.SHA256()), key)


def key_pair(path: Path) -> tuple[Path, Path]:
    """Make a private and a public key for tokens of service accounts: `<path>.key`, `.pub`."""
    key = ec.generate_private_key(ec.SECP256R1())
    public = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    path.with_suffix(".key").write_bytes(_pem(key))
    path.with_suffix(".pub").write_bytes(public)
    return path.with_suffix(".key"), path.with_suffix(".pub")


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _HOUR)
        .not_valid_after(now + 24 * _HOUR)
    )


def _general(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _written(path: Path, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> Pair:
    pair = Pair(path.with_suffix(".crt"), path.with_suffix(".key"))
    pair.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    pair.key.write_bytes(_pem(key))
    return pair
