"""Makes and checks the certificates of a bus: a CA, and one certificate per server."""

import datetime
import ipaddress
from collections.abc import Collection, Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from virtbus.bus.provisioning.credentials import write_secret

CA_DAYS = 3650
SERVER_DAYS = 825
RENEW_DAYS = 30
"""`virtbus bus init` renews a certificate that expires in fewer days than this."""
_SKEW = datetime.timedelta(hours=1)
"""A certificate's validity begins this time before now, because a host's clock may be slow."""


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _write_pair(path: Path, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    write_secret(path.with_suffix(".key"), pem.decode())
    public = certificate.public_bytes(serialization.Encoding.PEM).decode()
    write_secret(path.with_suffix(".crt"), public, mode=0o644)


def _builder(
    subject: str, key: ec.EllipticCurvePrivateKey, issuer: x509.Name | None, days: int
) -> x509.CertificateBuilder:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)])
    now = _now()
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(issuer or name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def ensure_ca(path: Path) -> None:
    """Create `<path>.key` (0600) and `<path>.crt` if they do not exist."""
    if path.with_suffix(".crt").exists():
        return
    key = ec.generate_private_key(ec.SECP256R1())
    usage = x509.KeyUsage(
        digital_signature=False, content_commitment=False, key_encipherment=False,
        data_encipherment=False, key_agreement=False, key_cert_sign=True, crl_sign=True,
        encipher_only=False, decipher_only=False,
    )  # fmt: skip
    certificate = (
        _builder("virtbus bus CA", key, None, CA_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .sign(key, hashes.SHA256())
    )
    _write_pair(path, key, certificate)


def ensure_server(ca: Path, path: Path, names: Sequence[str], days: int = SERVER_DAYS) -> bool:
    """Create a server's `<path>.key` and `.crt` for these host names and addresses.

    Return False for an existing certificate without `problems` in the next RENEW_DAYS.
    """
    issuer = x509.load_pem_x509_certificate(ca.with_suffix(".crt").read_bytes())
    if path.with_suffix(".crt").exists() and not problems(ca, path, names, RENEW_DAYS):
        return False
    ca_key = serialization.load_pem_private_key(ca.with_suffix(".key").read_bytes(), None)
    if not isinstance(ca_key, ec.EllipticCurvePrivateKey):
        msg = f"{ca.with_suffix('.key')} is not a key that virtbus made"
        raise TypeError(msg)
    key = ec.generate_private_key(ec.SECP256R1())
    both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
    certificate = (
        _builder(names[0], key, issuer.subject, days)
        .add_extension(x509.SubjectAlternativeName([_general(n) for n in names]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage(both), critical=False)
        .add_extension(signer, critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    _write_pair(path, key, certificate)
    return True


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _names_of(certificate: x509.Certificate) -> Collection[x509.GeneralName]:
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except (x509.ExtensionNotFound, x509.DuplicateExtension, ValueError):
        return ()
    return tuple(found.value)


def _has_key(certificate: x509.Certificate, path: Path) -> bool:
    """Return True if `<path>.key` fits. A crash during a renewal may leave another key."""
    try:
        key = serialization.load_pem_private_key(path.with_suffix(".key").read_bytes(), None)
    except (OSError, ValueError, TypeError):
        return False
    return key.public_key() == certificate.public_key()


def problems(ca: Path, path: Path, names: Sequence[str], days_left: int = 0) -> list[str]:
    """Return each problem of a server's certificate as a sentence.

    Fewer than `days_left` days of validity are a problem.
    """
    file = path.with_suffix(".crt")
    try:
        issuer = x509.load_pem_x509_certificate(ca.with_suffix(".crt").read_bytes())
        own = x509.load_pem_x509_certificate(file.read_bytes())
    except (OSError, ValueError) as error:
        return [f"{file}: {error}"]
    found = [] if _has_key(own, path) else [f"{path.with_suffix('.key')} is not the key of {file}"]
    try:
        own.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, x509.InvalidVersion, Exception):  # noqa: BLE001  any error: not of this CA
        found.append(f"{file} was not issued by the CA {ca.with_suffix('.crt')}")
    left = own.not_valid_after_utc - _now()
    if left < datetime.timedelta(days=days_left):
        found.append(f"{file} ends on {own.not_valid_after_utc:%Y-%m-%d}")
    listed = _names_of(own)
    missing = [name for name in names if _general(name) not in listed]
    if missing:
        found.append(f"{file} does not name {', '.join(missing)}")
    return found
