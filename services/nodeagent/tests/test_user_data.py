"""Several sources of user data become one message, and no part of them is lost (ADR 0043)."""

import email
import gzip
from email.message import Message
from typing import Any

import pytest
import yaml

from virtbus.nodeagent.core.user_data import (
    APPEND,
    MAX_VALUES,
    MERGED_BYTES,
    Config,
    combined,
    sources_of,
)
from virtbus.schemas.seed import CloudInit, UserDataPart
from virtbus.schemas.user_data import content_type

SCRIPT = "#!/bin/sh\necho '$(id)'\n"
FILE = {"path": "/etc/ours", "content": "b3Vycw==", "encoding": "b64"}
OURS: Config = {"hostname": "web", "ssh_authorized_keys": ["ours"]}


def made(*texts: str | bytes, defaults: Config | None = None, **added: Any) -> bytes:
    """Return the combined user data of these sources."""
    sources = [
        (content_type(data), data)
        for data in (one.encode() if isinstance(one, str) else one for one in texts)
    ]
    return combined(sources, defaults or {}, added) or b""


def parts(data: bytes) -> list[Message]:
    message = email.message_from_bytes(data)
    return [part for part in message.walk() if not part.is_multipart()]


def kinds(data: bytes) -> list[str]:
    return [part.get_content_type() for part in parts(data)]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("#!/bin/sh\n", "text/x-shellscript"),
        ("\n #Cloud-Config\n", "text/cloud-config"),
        ("#cloud-config-archive\n", "text/cloud-config-archive"),
        ("#cloud-config-jsonp\n", "text/cloud-config-jsonp"),
        ("#cloud-boothook\n", "text/cloud-boothook"),
        ("#part-handler\n", "text/part-handler"),
        ("#include http://a/b\n", "text/x-include-url"),
        ("#include-once\n", "text/x-include-once-url"),
        ("## template: jinja\n#cloud-config\n", "text/jinja2"),
        ("Content-Type: multipart/mixed; boundary=b\n", "multipart/mixed"),
        ("MIME-Version: 1.0\n", "multipart/mixed"),
        (gzip.compress(b"#!/bin/sh\n", mtime=0), "application/gzip"),
        ("hello\n", ""),
        ("", ""),
        (b"#!/bin/\xff", ""),
    ],
)
def test_a_kind_is_known_by_its_first_bytes(text: str | bytes, kind: str) -> None:
    assert content_type(text.encode() if isinstance(text, str) else text) == kind


@pytest.mark.parametrize(
    ("first", "second", "merged"),
    [
        ("a: {b: 1, c: 2}", "a: {b: 3, d: 4}", {"a": {"b": 3, "c": 2, "d": 4}}),
        ("a: {b: {c: [1]}}", "a: {b: {c: [2]}}", {"a": {"b": {"c": [1, 2]}}}),
        ("runcmd: [a, [b]]", "runcmd: [c]", {"runcmd": ["a", ["b"], "c"]}),
        ("a: 1", "a: two", {"a": "two"}),
        ("a: [1]", "a: 2", {"a": 2}),
        ("a: {b: 1}", "a: [2]", {"a": [2]}),
        ("a: 1", "", {"a": 1}),
        ("a: 1", "a:", {"a": None}),
    ],
)
def test_cloud_configs_are_merged_in_their_order(
    first: str, second: str, merged: dict[str, Any]
) -> None:
    data = made(f"#cloud-config\n{first}\n", f"#cloud-config\n{second}\n")
    assert data.startswith(b"#cloud-config\n")
    assert yaml.safe_load(data) == merged


def test_lists_of_the_platform_are_appended_to_the_users() -> None:
    theirs = "#cloud-config\nwrite_files: [{path: /etc/theirs}]\nhostname: mine\n"
    data = made(theirs, defaults=OURS, write_files=[FILE], mounts=[["/dev/a", "/b"]])
    assert yaml.safe_load(data) == {
        "hostname": "mine",
        "ssh_authorized_keys": ["ours"],
        "write_files": [{"path": "/etc/theirs"}, FILE],
        "mounts": [["/dev/a", "/b"]],
    }


def test_a_script_keeps_the_platforms_files_next_to_it() -> None:
    data = made(SCRIPT, write_files=[FILE])
    script, ours = parts(data)
    assert script.get_payload(decode=True) == SCRIPT.encode()
    assert ours.get_content_type() == "text/cloud-config"
    assert ours["X-Merge-Type"] == APPEND
    payload = ours.get_payload(decode=True)
    assert isinstance(payload, bytes)
    assert yaml.safe_load(payload) == {"write_files": [FILE]}


def test_all_cloud_configs_are_one_part_before_the_others_and_ours_is_the_last() -> None:
    data = made(SCRIPT, "#cloud-config\na: 1\n", "#include http://a\n", "#cloud-config\nb: 2\n")
    assert kinds(data) == ["text/cloud-config", "text/x-shellscript", "text/x-include-url"]
    payload = parts(data)[0].get_payload(decode=True)
    assert isinstance(payload, bytes)
    assert yaml.safe_load(payload) == {"a": 1, "b": 2}
    data = made(SCRIPT, "#cloud-config\na: 1\n", write_files=[FILE])
    assert kinds(data) == ["text/cloud-config", "text/x-shellscript", "text/cloud-config"]


@pytest.mark.parametrize(
    "unmerged",
    [
        "#cloud-config\n- a\n",
        "#cloud-config\na: [\n",
        "#cloud-config\na: 2001-99-99\n",
        "#cloud-config\nmerge_how: list(append)\n",
        f"#cloud-config\na: {'x' * MERGED_BYTES}\n",
    ],
)
def test_a_cloud_config_that_cannot_be_merged_is_a_part_of_its_own(unmerged: str) -> None:
    data = made("#cloud-config\na: 1\n", unmerged, write_files=[FILE])
    first, second, ours = parts(data)
    assert first.get_payload(decode=True) == b"#cloud-config\na: 1\n"
    assert second.get_payload(decode=True) == unmerged.encode()
    assert ours["X-Merge-Type"] == APPEND


def test_all_cloud_configs_share_one_budget_of_values() -> None:
    third = f"#cloud-config\nruncmd: [{'a, ' * (MAX_VALUES // 3)}]\n"
    assert made(third, third).startswith(b"#cloud-config\n")
    assert len(parts(made(third, third, third))) == 3


def test_gzip_is_unpacked_within_its_bound_and_kept_packed_above_it() -> None:
    packed = gzip.compress(b"#cloud-config\na: 1\n", mtime=0)
    assert made(packed) == packed
    assert yaml.safe_load(made(packed, "#cloud-config\nb: 2\n")) == {"a": 1, "b": 2}
    members = packed + gzip.compress(b"c: 3\n", mtime=0) + bytes(8)
    assert yaml.safe_load(made(members, "#cloud-config\nb: 2\n")) == {"a": 1, "b": 2, "c": 3}
    message = gzip.compress(b"Content-Type: text/x-shellscript\n\n#!/bin/sh\n", mtime=0)
    assert kinds(made(message, write_files=[FILE]))[0] == "text/x-shellscript"
    bomb = gzip.compress(b"#!/bin/sh\n" + bytes(8 * 1024 * 1024))
    for odd in (bomb, gzip.compress(b"unknown", mtime=0), packed[:20]):
        part = parts(made(odd, write_files=[FILE]))[0]
        assert part.get_content_type() == "application/gzip"
        assert part.get_payload(decode=True) == odd


def test_large_user_data_is_a_part_of_its_size() -> None:
    large = b"#cloud-config\na: " + b"x" * (500 * 1024)
    theirs, ours = parts(made(large, write_files=[FILE]))
    assert theirs.get_payload(decode=True) == large
    assert ours["X-Merge-Type"] == APPEND
    assert made(large, defaults=OURS) == large


def test_a_single_source_without_additions_is_unchanged() -> None:
    for data in (SCRIPT, "#cloud-config\na: 1  # kept\n", "unknown", "#include http://a\n"):
        assert made(data) == data.encode()
    assert made() == b""


def test_sources_are_user_data_first_and_then_its_parts_with_their_types() -> None:
    seed = CloudInit(
        user_data="#!/bin/sh\n",
        user_data_parts=(
            UserDataPart(data="  \n", content_type="text/plain"),
            UserDataPart(data_base64="AP8=", content_type="application/x-own"),
            UserDataPart(data="#cloud-config\n"),
        ),
    )
    assert sources_of(seed) == [
        ("text/x-shellscript", b"#!/bin/sh\n"),
        ("application/x-own", b"\0\xff"),
        ("text/cloud-config", b"#cloud-config\n"),
    ]
