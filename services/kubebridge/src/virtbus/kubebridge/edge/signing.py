"""Keys and certificates of the bridge's Secret (PEM): making and parsing."""

from collections.abc import Iterable
from datetime import datetime
from typing import NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from virtbus.kubebridge.core.certificates import AUTHORITY_LIFE, SERVING_LIFE, Life, due, life

COMMON_NAME = "virtbus-kubebridge"
_CA_MAY = x509.KeyUsage(
    digital_signature=False, content_commitment=False, key_encipherment=False,
    data_encipherment=False, key_agreement=False, key_cert_sign=True, crl_sign=True,
    encipher_only=False, decipher_only=False,
)  # fmt: skip


class KeyMaterial(NamedTuple):
    """The content of the Secret, as PEM.

    `ca_crt` has the certificates of all authorities, the newest first. `ca_key` is the key of the
    newest authority.
    """

    ca_crt: str = ""
    ca_key: str = ""
    tls_crt: str = ""
    tls_key: str = ""


def renewed(kept: KeyMaterial, names: tuple[str, ...], now: datetime) -> KeyMaterial:
    """Return the content with new certificates in place of missing or expiring ones.

    Unreadable fields count as missing. `names` are the host names of the serving certificate.
    """
    authorities = [one for one in _certificates(kept.ca_crt) if one.not_valid_after_utc > now]
    key = stored = _key(kept.ca_key)
    if stored is None or not authorities or stored.public_key() != authorities[0].public_key():
        authorities, key = [], None
    serving = _serving(kept, names, authorities)
    todo = due(tuple(map(_life, authorities)), _life(serving) if serving else None, now)
    if todo.authority or key is None:
        key = ec.generate_private_key(ec.SECP256R1())
        authorities = [_authority(key, now), *authorities]
    ca_key = kept.ca_key if key is stored else _key_pem(key)
    tls_crt, tls_key = kept.tls_crt, kept.tls_key
    if todo.serving:
        own = ec.generate_private_key(ec.SECP256R1())
        tls_crt, tls_key = _pem(_signed(own, names, authorities[0], key, now)), _key_pem(own)
    return KeyMaterial("".join(map(_pem, authorities)), ca_key, tls_crt, tls_key)


def _authority(key: ec.EllipticCurvePrivateKey, now: datetime) -> x509.Certificate:
    # Clients find an authority by its name, so each authority has a name of its own.
    name = _name(f"{COMMON_NAME} {now:%Y-%m-%dT%H:%M:%SZ}")
    return (
        _builder(name, name, key, life(now, AUTHORITY_LIFE))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_CA_MAY, critical=True)
        .sign(key, hashes.SHA256())
    )


def _signed(
    own: ec.EllipticCurvePrivateKey,
    names: tuple[str, ...],
    authority: x509.Certificate,
    key: ec.EllipticCurvePrivateKey,
    now: datetime,
) -> x509.Certificate:
    signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key())
    lasts = life(now, SERVING_LIFE, _life(authority))
    return (
        _builder(_name(COMMON_NAME), authority.subject, own, lasts)
        .add_extension(x509.SubjectAlternativeName(map(x509.DNSName, names)), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(signer, critical=False)
        .sign(key, hashes.SHA256())
    )


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, lasts: Life
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(lasts.begins)
        .not_valid_after(lasts.ends)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


# --- reading -----------------------------------------------------------------------------------
def _serving(
    kept: KeyMaterial, names: tuple[str, ...], authorities: Iterable[x509.Certificate]
) -> x509.Certificate | None:
    """Return the serving certificate if it fits its key, the names and an authority.

    The caller checks the expiry.
    """
    found, key = _certificates(kept.tls_crt), _key(kept.tls_key)
    if not found or key is None or key.public_key() != found[0].public_key():
        return None
    try:
        listed = found[0].extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        return None
    if set(names) - set(listed.get_values_for_type(x509.DNSName)):
        return None
    return found[0] if any(_issued(found[0], one) for one in authorities) else None


def _issued(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _certificates(pem: str) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem.encode())
    except ValueError:
        return []


def _key(pem: str) -> ec.EllipticCurvePrivateKey | None:
    try:
        key = serialization.load_pem_private_key(pem.encode(), None)
    except (ValueError, TypeError):
        return None
    return key if isinstance(key, ec.EllipticCurvePrivateKey) else None


def _life(certificate: x509.Certificate) -> Life:
    return Life(certificate.not_valid_before_utc, certificate.not_valid_after_utc)


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def _key_pem(key: ec.EllipticCurvePrivateKey) -> str:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    ).decode()
