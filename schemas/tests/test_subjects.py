"""No input adds a token, a wildcard or a second command to a subject (BUS-01, BUS-02)."""

import inspect
from collections.abc import Callable
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from virtbus.schemas import subjects
from virtbus.schemas.events import EventKind
from virtbus.schemas.ids import UNPLACED

HOSTILE = ("*", ">", "a.b", "", "a\r\nb", "a\x00", "A", "a" * 300)
UUID = "0192f0c1-2d3e-7abc-8def-0123456789ab"
MADE = [
    value
    for name, value in vars(subjects).items()
    if callable(value) and value.__module__ == subjects.__name__ and not name.startswith("_")
]
GOOD = {"uid": UUID, "kind": "vm-accepted", "network": UUID, "address": "10.0.0.5"}

token_like = st.one_of(
    st.text(max_size=80),
    st.sampled_from(
        [
            "*",
            ">",
            "a.b",
            "a.>",
            "",
            " ",
            "a\r\nPUB x 0\r\n",
            "\x00",
            "_",
            "_name",
            "..",
            UUID + ".x",
            UUID + "\n",
            "a" * 64,
            "$KV",
            "\u0430",
        ]
    ),
)


def arguments(make: Callable[..., str]) -> list[str]:
    return list(inspect.signature(make).parameters)


def good(make: Callable[..., str]) -> str:
    return make(**{name: GOOD.get(name, "a-token") for name in arguments(make)})


@pytest.mark.parametrize("make", MADE, ids=lambda make: make.__name__)
@settings(max_examples=30)
@given(data=st.data())
def test_no_text_adds_a_token_or_a_wildcard(make: Callable[..., str], data: st.DataObject) -> None:
    names = arguments(make)
    values = {name: data.draw(st.just(GOOD.get(name, "b")) | token_like) for name in names}
    try:
        subject = make(**values)
    except ValueError:
        return
    pattern = good(make) if values.get("uid") or "uid" not in values else subjects.events()
    wanted = pattern.split(".")
    tokens = subject.split(".")
    if "kind" in values:  # a kind brings its own tokens, each an id
        wanted += ["x"] * values["kind"].count(".")
    assert len(tokens) == len(wanted)
    assert [t for t in tokens if t in {"*", ">"}] == [t for t in wanted if t in {"*", ">"}]
    assert subject.isascii()
    assert subject.isprintable()
    assert " " not in subject
    assert all(tokens)


@pytest.mark.parametrize("make", MADE, ids=lambda make: make.__name__)
def test_each_argument_is_checked(make: Callable[..., str]) -> None:
    names = arguments(make)
    for name, hostile in product(names, HOSTILE):
        if (name, hostile) in {("kind", "a.b"), ("uid", "")} and make is not subjects.vm_record:
            continue
        if (make, name, hostile) == (subjects.image_name, "name", "a.b"):
            continue  # a dot is part of an image's name, and base32 hides it
        values = {one: GOOD.get(one, "b") for one in names} | {name: hostile}
        with pytest.raises(ValueError, match="must be"):
            make(**values)


def test_a_record_filter_never_meets_a_claim() -> None:
    filter_tokens = len(subjects.vm_anywhere(UUID).split("."))
    assert len(subjects.name_claim("default", "web").split(".")) == filter_tokens + 1
    assert len(subjects.volume_record("default", "web").split(".")) == filter_tokens + 1
    assert len(subjects.image_name("_", "debian/12.5").split(".")) == filter_tokens + 1
    assert len(subjects.network_record("_", "blue").split(".")) == filter_tokens + 1
    assert len(subjects.address_claim(UUID, "10.0.0.5").split(".")) == filter_tokens + 1


@pytest.mark.parametrize("address", ["10.0.0.5", "fd00::5", "02:00:00:00:00:01"])
def test_the_key_of_a_claim_says_its_network_and_address(address: str) -> None:
    key = subjects.address_claim(UUID, address)
    assert subjects.claimed_address(key) == (UUID, address)


def test_a_volume_and_a_vm_of_one_name_have_different_keys() -> None:
    assert subjects.volume_record("default", "web") != subjects.name_claim("default", "web")
    assert subjects.volume_record("default", "web").startswith(subjects.VOLUME_KEYS)


def test_only_records_and_facts_may_be_unplaced() -> None:
    assert subjects.vm_record(UNPLACED, UUID) == f"$KV.vm._.{UUID}"
    for make in (subjects.vm_status, subjects.service_report, subjects.rpc):
        with pytest.raises(ValueError, match="must be"):
            make(*(UNPLACED for _ in arguments(make)))


def test_every_kind_of_event_has_a_subject() -> None:
    for kind in EventKind:
        assert subjects.event("n1", UUID, kind) == f"virtbus.evt.n1.{UUID}.{kind}"


def test_an_upper_case_uid_is_the_same_subject() -> None:
    assert subjects.vm_record("n1", UUID.upper()) == subjects.vm_record("n1", UUID)
