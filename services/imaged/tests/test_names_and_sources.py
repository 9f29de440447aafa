"""Names, addresses, redirects, ranges: the pure rules (IMG-16, IMG-18, SRC-01 … SRC-04)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virtbus.imaged.core.links import file_name, hex_of
from virtbus.imaged.core.sources import (
    Validators,
    beneath,
    check_url,
    redirect_target,
    resumed_total,
    shown,
)
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.image import parse_image_ref


@pytest.mark.parametrize(
    "name", ["..", ".", "", "a\0b", "a\nb", "-a", "a" * 300, "a%b", "A", "é", "/a", "a//b", "a/"]
)
def test_names_that_could_be_paths_are_no_names(name: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        parse_image_ref(name)


@given(st.text(max_size=50), st.text(max_size=50))
def test_each_name_has_its_own_plain_file_name(one: str, other: str) -> None:
    assert (file_name(one) == file_name(other)) == (one == other)
    assert len(file_name(one)) == 64
    assert file_name(one).isalnum()


@pytest.mark.parametrize(
    "digest", ["sha256:../../x", "sha256:" + "A" * 64, "sha256:0", "md5:" + "0" * 64, "", "0" * 64]
)
def test_digests_are_checked_before_they_become_paths(digest: str) -> None:
    with pytest.raises(ValueError, match="sha256"):
        hex_of(digest)


@pytest.mark.parametrize(
    "url",
    ["ftp://h/x", "http://", "http:///x", "http://h:99999/", "http://[::1", "x", "http://h:0/"],
)
def test_a_url_that_is_not_http_is_refused(url: str) -> None:
    with pytest.raises(VirtbusError):
        check_url(url)


def test_a_redirect_may_not_leave_https_nor_enter_this_machine() -> None:
    first = "https://h/a"
    assert redirect_target(first, first, "/b") == "https://h/b"
    for location in ("http://h/b", "https://localhost/b", "https://[::1]/b", "gopher://h/"):
        with pytest.raises(VirtbusError, match="redirect"):
            redirect_target(first, first, location)


def test_a_malformed_address_in_a_redirect_or_a_file_url_is_refused() -> None:
    with pytest.raises(VirtbusError, match="no URL that can be fetched"):
        redirect_target("https://h/a", "https://h/a", "https://[")
    with pytest.raises(VirtbusError, match="outside the directories"):
        beneath("file://[", ("/srv/images",))


@given(st.text(max_size=60), st.integers(0, 1 << 40))
def test_only_an_exact_continuation_resumes(text: str, offset: int) -> None:
    assert resumed_total(text, offset) is None
    assert resumed_total(f"bytes {offset}-{offset + 9}/{offset + 10}", offset) == offset + 10
    assert resumed_total(f"bytes {offset}-{offset + 9}/{offset + 11}", offset) is None
    assert resumed_total(f"bytes {offset}-{offset + 9}/*", offset) is None


def test_weak_etags_do_not_resume() -> None:
    assert Validators('"a"').if_range == '"a"'
    assert Validators('W/"a"').if_range == ""
    assert Validators('W/"a"', "Thu").if_range == "Thu"


def test_queries_are_not_shown() -> None:
    assert shown("https://h/a?signature=secret#x") == "https://h/a"


@given(st.lists(st.sampled_from(["a", "..", ".", "", "%2e%2e", "%00", "%2f", "b.img"]), max_size=6))
def test_file_urls_stay_beneath_their_root(parts: list[str]) -> None:
    try:
        root, names = beneath("file:///srv/images/" + "/".join(parts), ("/srv/images",))
    except VirtbusError:
        return
    assert root == "/srv/images"
    assert not {"", ".", ".."} & set(names)
    assert all("/" not in name and "\0" not in name for name in names)
