"""Valid requests for a VM: hostile texts are refused before they reach XML, argv or files."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from virtbus.schemas.api import VmCreate, VmDelete, VmList, VmRef, VmStop, VmUpdate
from virtbus.schemas.errors import Code, ErrorBody, Retry, VirtbusError
from virtbus.schemas.history import EventList
from virtbus.schemas.image import ImageSource, check_image_ref, parse_image_ref
from virtbus.schemas.model import Model, models
from virtbus.schemas.network import check_mac
from virtbus.schemas.seed import CloudInitNoCloud
from virtbus.schemas.vm import Cpu, Disk, Firmware, VmSpec

UID = "0192f0c1-2d3e-7abc-8def-0123456789ab"
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIOMqqnkVzrm0SdG6UOoqKLsabgH5C9okWi0dh2l9GKJl web"
DIGEST = "sha256:" + "0f" * 32
HOSTILE_NAMES = [
    "x</name><devices>",
    "a&b",
    "]]>",
    "<!ENTITY x SYSTEM 'file:///etc/passwd'>",
    "..",
    " a",
    "-c",
    "a;b$(id)",
    "a\u202eb",
    "a" * 300,
    "a\nruncmd: [reboot]",
    "{{7*7}}",
    "%s",
    "{0.__class__}",
]
HOSTILE_SERIALS = ["a,b", "a=b,readonly=on", "a%sb", "a\nb", "x" * 1024, "a b", "", "a\x00", "é"]


def paths(error: ValidationError) -> set[str]:
    return {".".join(map(str, one["loc"])) for one in error.errors()}


@pytest.mark.parametrize("text", HOSTILE_NAMES)
@pytest.mark.parametrize("field", ["name", "namespace", "network"])
def test_a_hostile_name_is_refused(field: str, text: str) -> None:
    with pytest.raises(ValidationError) as caught:
        VmCreate.model_validate({"name": "web", "image": "tiny", field: text})
    assert paths(caught.value) == {field}


@pytest.mark.parametrize("text", HOSTILE_NAMES)
def test_a_hostile_hostname_or_disk_name_is_refused(text: str) -> None:
    with pytest.raises(ValidationError):
        CloudInitNoCloud(hostname=text)
    with pytest.raises(ValidationError):
        Disk(name=text)


@pytest.mark.parametrize("text", HOSTILE_SERIALS)
def test_a_hostile_serial_is_refused(text: str) -> None:
    with pytest.raises(ValidationError):
        Disk(name="root", serial=text)
    with pytest.raises(ValidationError):
        Firmware(serial=text)
    with pytest.raises(ValidationError):
        Cpu(model=text)


@pytest.mark.parametrize(
    "key", [KEY + "\nruncmd:", KEY + "\r", KEY + "\n", "a\x00" + KEY, "short", "x" * 8193, ""]
)
def test_a_hostile_ssh_key_is_refused_by_shorthand_and_spec(key: str) -> None:
    with pytest.raises(ValidationError):
        CloudInitNoCloud(ssh_keys=(key,))
    with pytest.raises(ValidationError):
        VmCreate(name="web", image="tiny", ssh_keys=(key,))


@pytest.mark.parametrize(
    "path", ["qemu_commandline", "raw", "emulator", "hooks", "spec.xml", "spec.domain.qemu"]
)
def test_unknown_fields_are_refused_not_ignored(path: str) -> None:
    value: dict[str, Any] = {"name": "web", "image": "tiny"}
    inner = value
    *parents, last = path.split(".")
    for part in parents:
        inner = inner.setdefault(part, {})
    inner[last] = "x"
    with pytest.raises(ValidationError) as caught:
        VmCreate.model_validate(value)
    assert paths(caught.value) == {path}


SHORTHAND_BOUNDS: list[dict[str, Any]] = [
    {"memory": "1"},
    {"memory": 0},
    {"memory": -1},
    {"memory": "17TiB"},
    {"disk": "1k"},
    {"disk": -5},
    {"disk": "65TiB"},
    {"cpus": 0},
    {"cpus": 257},
    {"cpus": 512},
    {"cpus": 2**70},
    {"cpus": True},
    {"cpus": "2"},
    {"memory": True},
    {"ssh_keys": (KEY,) * 65},
    {"user_data": "x" * (512 * 1024 + 1)},
    {"annotations": {str(i): "" for i in range(65)}},
    {"labels": {"a b": "x"}},
    {"labels": {"a": "x\n"}},
    {"labels": {"a": "x" * 64}},
]


@pytest.mark.parametrize("more", SHORTHAND_BOUNDS, ids=lambda more: str(more)[:40])
def test_shorthand_has_the_bounds_of_its_full_form(more: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        VmCreate.model_validate({"name": "web", "image": "tiny"} | more)
    assert {path.split(".")[0] for path in paths(caught.value)} == set(more)


def test_all_problems_of_a_create_are_found_at_once() -> None:
    value = {"name": "A", "cpus": 0, "memory": "x", "spec": {"run_strategy": "Often"}, "imge": "t"}
    with pytest.raises(ValidationError) as caught:
        VmCreate.model_validate(value)
    assert paths(caught.value) == {"name", "cpus", "memory", "spec.run_strategy", "imge"}


@pytest.mark.parametrize(
    ("model", "field"),
    [
        (VmUpdate, "revision"),
        (VmDelete, "grace_s"),
        (VmStop, "grace_s"),
        (VmList, "limit"),
        (EventList, "after"),
        (EventList, "limit"),
        (VmSpec, "termination_grace_s"),
        (Cpu, "cores"),
        (Cpu, "sockets"),
        (Cpu, "threads"),
        (Disk, "boot_order"),
    ],
)
@pytest.mark.parametrize("value", [True, "1", 1.0, [1]])
def test_a_number_in_a_command_is_a_number(model: type[BaseModel], field: str, value: Any) -> None:
    base = {"name": "root"} if model is Disk else {"revision": 1} if model is VmUpdate else {}
    with pytest.raises(ValidationError):
        model.model_validate(base | {field: value})


def test_a_reference_is_a_uid_or_a_name() -> None:
    assert VmRef(uid=UID.upper()).uid == UID
    assert VmRef(name="web").namespace == "default"


# --- MAC addresses ---------------------------------------------------------------------------
@pytest.mark.parametrize("text", ["02:00:5e:10:00:01", "02:00:5E:10:00:01", "52:54:00:ff:ff:ff"])
def test_a_unicast_mac_is_taken_in_lower_case(text: str) -> None:
    assert check_mac(text) == text.lower()


@pytest.mark.parametrize(
    "text",
    [
        "01:00:5e:00:00:01",
        "ff:ff:ff:ff:ff:ff",
        "00:00:00:00:00:00",
        "02-00-5e-10-00-01",
        "02:00:5e:10:00",
        "02:00:5e:10:00:01:02",
        "2:0:5e:10:0:1",
        "02:00:5e:10:00:0g",
        "02:00:5e:10:00:01\n",
        "02:00:5e:10:00:+1",
        "02:00:5e:10:00: 1",
        "\u06602:00:5e:10:00:01",
        "",
    ],
)
def test_a_mac_that_is_not_unicast_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be a"):
        check_mac(text)


# --- image references ------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "locator", "digest"),
    [
        ("tiny", "tiny", None),
        ("debian/12", "debian/12", None),
        ("debian/12:latest", "debian/12:latest", None),
        (f"tiny@{DIGEST}", "tiny", DIGEST),
        ("https://example.org/a.qcow2", "https://example.org/a.qcow2", None),
        (f"https://example.org/a.qcow2@{DIGEST}", "https://example.org/a.qcow2", DIGEST),
        ("https://user@example.org/a", "https://user@example.org/a", None),
        ("file:///srv/a.img", "file:///srv/a.img", None),
    ],
)
def test_image_references(text: str, locator: str, digest: str | None) -> None:
    assert parse_image_ref(text) == ImageSource(locator, digest)
    assert check_image_ref(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "a b",
        "a\n",
        "a\x00",
        "a\x7f",
        "-x.qcow2",
        "--output=/etc/x",
        "/etc/passwd",
        "../x",
        "a/../b",
        "a//b",
        "a/",
        "A",
        "json:{}",
        "nbd://host/x",
        "ftp://host/x",
        "HTTP://host/x",
        "ssh://host/x",
        "tiny@",
        "tiny@sha256:00",
        "tiny@md5:" + "0" * 32,
        f"tiny@{DIGEST.upper()}",
        f"tiny@{DIGEST}\n",
        f"tiny@{DIGEST}@{DIGEST}",
        "tiny@sha512:" + "0" * 128,
        "a" * 129,
        "/".join("a" * 20),
        "tiny:",
        "tiny:" + "x" * 128,
        "tíny",
    ],
)
def test_hostile_image_references_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"must be|digest"):
        parse_image_ref(text)


@given(st.text(max_size=60))
def test_an_adopted_name_can_be_a_path_below_a_folder(text: str) -> None:
    try:
        source = parse_image_ref(text)
    except ValueError:
        return
    if not source.is_url:
        parts = source.locator.split("/")
        assert not set(parts) & {"", ".", ".."}
        assert not any(part.startswith(("-", ".")) for part in parts)


# --- errors ----------------------------------------------------------------------------------
@pytest.mark.parametrize("code", Code)
def test_an_error_comes_back_as_it_was_sent(code: Code) -> None:
    error = VirtbusError(code, "why", "what to do", after_ms=5)
    again = VirtbusError.of(ErrorBody.model_validate(error.body.model_dump(mode="json")))
    assert (again.body, again.code, str(again)) == (error.body, int(code), "what to do")


def test_an_unknown_code_of_a_newer_peer_is_kept() -> None:
    error = VirtbusError.of(ErrorBody(code=451, reason="r", message="m"))
    assert error.code == 451
    assert error.expected


@pytest.mark.parametrize(
    ("code", "retry"),
    [
        (Code.INVALID, Retry.NEVER),
        (Code.CONFLICT, Retry.NEVER),
        (Code.EXHAUSTED, Retry.LATER),
        (Code.UNAVAILABLE, Retry.LATER),
        (Code.DEADLINE, Retry.SAME_ID),
        (Code.INTERNAL, Retry.SAME_ID),
    ],
)
def test_a_code_tells_if_a_retry_may_help(code: Code, retry: Retry) -> None:
    assert VirtbusError(code, "r", "m").body.retry is retry
    assert VirtbusError(code, "r", "m", retry=Retry.SAME_ID).body.retry is Retry.SAME_ID


def test_only_our_own_defects_are_unexpected() -> None:
    assert [code for code in Code if not VirtbusError(code, "r", "m").expected] == [Code.INTERNAL]


def test_a_default_that_is_a_model_equals_a_validated_one() -> None:
    """Defaults are made without validation, so that no import builds their validators."""
    defaults = [
        field.default
        for model in models()
        for field in model.model_fields.values()
        if isinstance(field.default, Model)
    ]
    assert defaults
    for default in defaults:
        valid = type(default)()
        assert (vars(default), default.model_fields_set) == (vars(valid), valid.model_fields_set)
