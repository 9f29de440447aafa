"""Directories that guests mount: their paths, roots and names."""

import pytest
from pydantic import ValidationError

from virtbus.schemas.filesystem import Filesystem, filesystem_problems, is_below, root_of


@pytest.mark.parametrize(
    "path",
    ["", "/", "srv", "/srv/", "//srv", "/srv/../etc", "/srv/./a", "/srv//a", "/a\nb", "/a\0b"],
)
def test_a_path_is_absolute_and_leads_nowhere_else(path: str) -> None:
    with pytest.raises(ValidationError):
        Filesystem(name="www", directory=path)


@pytest.mark.parametrize("name", ["", "A", "a.b", "a" * 37, "-a", "a,b"])
def test_a_tag_is_short_and_plain(name: str) -> None:
    with pytest.raises(ValidationError):
        Filesystem(name=name, directory="/srv")


def test_a_directory_belongs_to_the_longest_root_above_it() -> None:
    roots = ("/srv", "/srv/a", "/srv/ab")
    assert root_of("/srv/a/x y", roots) == "/srv/a"
    assert root_of("/srv/abc", roots) == "/srv"
    assert root_of("/srv/ab", roots) == "/srv/ab"
    assert not root_of("/srvx", roots)
    assert not is_below("/srv", "/srv/a")


def test_names_are_unique_among_directories_and_volumes() -> None:
    names = ("a", "a", "data")
    given = [Filesystem(name=name, directory=f"/srv/{n}") for n, name in enumerate(names)]
    found = {one.path: one.message for one in filesystem_problems(given, ["data"])}
    at = "spec.domain.devices.filesystems[{}].name".format
    assert found == {
        at(1): "'a' is used twice",
        at(2): "'data' is the name of a volume, too",
    }


@pytest.mark.parametrize(
    ("first", "second", "readonly", "why"),
    [
        ("/srv/a", "/srv/a", False, "is at or below /srv/a of 'one'"),
        ("/srv/a", "/srv/a/b", False, "is at or below /srv/a of 'one'"),
        ("/srv/a/b", "/srv/a", False, "is above /srv/a/b of 'one'"),
        ("/srv/a/b", "/srv/a", True, ""),
        ("/srv/a", "/srv/ab", False, ""),
    ],
)
def test_directories_of_one_vm_do_not_overlap_unless_all_are_read(
    first: str, second: str, why: str, *, readonly: bool
) -> None:
    given = [
        Filesystem(name="one", directory=first, readonly=readonly),
        Filesystem(name="two", directory=second, readonly=readonly),
    ]
    found = [one.message.partition(";")[0] for one in filesystem_problems(given, [])]
    assert found == ([why] if why else [])
