"""Certificates stay valid over the years, and clients know each authority in advance."""

import random
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import pytest
from cryptography import x509

from virtbus.kubebridge.core.certificates import (
    AUTHORITY_LEFT,
    AUTHORITY_LIFE,
    SERVING_LEFT,
    SERVING_LIFE,
    SETTLED,
    SKEW,
    Due,
    Life,
    due,
    life,
)
from virtbus.kubebridge.edge.signing import KeyMaterial, renewed

NOW = datetime(2026, 11, 22, tzinfo=UTC)
DAY = timedelta(days=1)
NAMES = ("virtbus-kubebridge.kubevirt.svc", "virtbus-kubebridge.kubevirt")
FIRST = renewed(KeyMaterial(), NAMES, NOW)


def authority(left: timedelta, age: timedelta = 30 * DAY) -> Life:
    return Life(NOW - age, NOW + left)


@pytest.mark.parametrize(
    ("authorities", "serving", "expected"),
    [
        ([], None, Due(authority=True, serving=True)),
        ([authority(200 * DAY)], None, Due(authority=False, serving=True)),
        ([authority(200 * DAY)], Life(NOW, NOW + 60 * DAY), Due(authority=False, serving=False)),
        ([authority(200 * DAY)], Life(NOW, NOW + 29 * DAY), Due(authority=False, serving=True)),
        ([authority(119 * DAY)], Life(NOW, NOW + 60 * DAY), Due(authority=True, serving=False)),
        ([authority(119 * DAY)], Life(NOW, NOW + 29 * DAY), Due(authority=True, serving=False)),
        ([authority(365 * DAY, SKEW)], Life(NOW, NOW + 29 * DAY), Due(False, False)),
        ([authority(365 * DAY, SKEW)], Life(NOW, NOW + DAY / 2), Due(False, True)),
        ([authority(timedelta(0))], Life(NOW, NOW + 60 * DAY), Due(True, True)),
        ([authority(200 * DAY)], Life(NOW, NOW), Due(authority=False, serving=True)),
    ],
)  # fmt: skip
def test_due_certificates(authorities: list[Life], serving: Life | None, expected: Due) -> None:
    assert due(tuple(authorities), serving, NOW) == expected


class Year(NamedTuple):
    """The state that replicas keep one after another. A begin identifies the signing authority."""

    authorities: tuple[Life, ...] = ()
    serving: Life | None = None
    signer: Life | None = None
    signed: datetime = NOW


def look(kept: Year, now: datetime) -> Year:
    authorities = tuple(one for one in kept.authorities if one.ends > now)
    todo = due(authorities, kept.serving, now)
    if todo.authority:
        authorities = (life(now, AUTHORITY_LIFE), *authorities)
    if not todo.serving:
        return kept._replace(authorities=authorities)
    return Year(authorities, life(now, SERVING_LIFE, authorities[0]), authorities[0], now)


@pytest.mark.parametrize("seed", range(20))
def test_clients_know_each_authority_before_it_signs(seed: int) -> None:
    """Checks happen at intervals of up to twenty days, by clocks that differ by up to an hour."""
    chance = random.Random(seed)
    kept = look(Year(), NOW)
    now = NOW
    while now < NOW + 4 * 365 * DAY:
        now += chance.choice([timedelta(minutes=1), DAY, chance.uniform(0, 20) * DAY])
        clock = now + chance.uniform(-0.5, 0.5) * SKEW
        before, kept = kept, look(kept, clock)
        assert kept == look(kept, clock), "a look at once after it finds nothing to do"
        assert kept.serving is not None
        assert kept.signer is not None
        for other in (now - SKEW / 2, now + SKEW / 2):
            assert kept.serving.begins <= other < kept.serving.ends
        assert kept.signer in kept.authorities
        assert kept.serving.ends <= kept.signer.ends
        if kept.signed != before.signed:
            assert kept.signed - (kept.signer.begins + SKEW) >= SETTLED
            assert kept.signer in before.authorities
        assert len(kept.authorities) <= 2


def test_an_authority_outlives_its_certificates() -> None:
    assert SERVING_LIFE + SETTLED < AUTHORITY_LEFT
    assert SETTLED < SERVING_LEFT


# --- real certificates -------------------------------------------------------------------------
def certificates(pem: str) -> list[x509.Certificate]:
    return x509.load_pem_x509_certificates(pem.encode())


def test_certificates_are_kept_until_renewal_is_due() -> None:
    assert renewed(FIRST, NAMES, NOW) == FIRST
    assert renewed(FIRST, NAMES, NOW + 59 * DAY) == FIRST
    (served,), (signer,) = certificates(FIRST.tls_crt), certificates(FIRST.ca_crt)
    served.verify_directly_issued_by(signer)
    assert served.not_valid_after_utc - NOW == SERVING_LIFE
    assert NOW - served.not_valid_before_utc == SKEW
    listed = served.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert tuple(listed.get_values_for_type(x509.DNSName)) == NAMES


def test_a_renewed_certificate_has_the_same_authority() -> None:
    later = renewed(FIRST, NAMES, NOW + 61 * DAY)
    assert (later.ca_crt, later.ca_key) == (FIRST.ca_crt, FIRST.ca_key)
    assert later.tls_crt != FIRST.tls_crt
    assert later.tls_key != FIRST.tls_key


def test_a_new_authority_is_published_before_it_signs() -> None:
    before = kept = FIRST
    now = NOW
    while len(certificates(kept.ca_crt)) == 1:
        now += 10 * DAY
        before, kept = kept, renewed(kept, NAMES, now)
    new, old = certificates(kept.ca_crt)
    assert kept.ca_key != before.ca_key
    (served,) = certificates(kept.tls_crt)
    served.verify_directly_issued_by(old)
    later = renewed(kept, NAMES, served.not_valid_after_utc - 20 * DAY)
    certificates(later.tls_crt)[0].verify_directly_issued_by(new)
    assert later.ca_crt == kept.ca_crt
    end = renewed(later, NAMES, old.not_valid_after_utc)
    assert certificates(end.ca_crt)[-1] == new


@pytest.mark.parametrize(
    "broken",
    [
        FIRST._replace(ca_crt="", ca_key=""),
        FIRST._replace(ca_key="no key"),
        FIRST._replace(ca_key=FIRST.tls_key),
        FIRST._replace(ca_crt="-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"),
        FIRST._replace(tls_key=FIRST.ca_key),
        FIRST._replace(tls_crt=FIRST.ca_crt, tls_key=FIRST.ca_key),
        FIRST._replace(tls_crt=renewed(KeyMaterial(), NAMES, NOW).tls_crt),
        renewed(KeyMaterial(), ("elsewhere.svc",), NOW),
    ],
    ids=["no ca", "no key", "other key", "no pem", "other tls key", "a ca", "foreign", "names"],
)
def test_mismatched_certificates_are_replaced(broken: KeyMaterial) -> None:
    mended = renewed(broken, NAMES, NOW)
    assert mended.tls_crt != broken.tls_crt
    served, signer = certificates(mended.tls_crt)[0], certificates(mended.ca_crt)[0]
    served.verify_directly_issued_by(signer)
    assert renewed(mended, NAMES, NOW) == mended
