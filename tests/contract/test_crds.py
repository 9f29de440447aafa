"""The manifests of the CRDs in the tree are those that the code makes."""

from virtbus.schemas.generate import ROOT, crd_files, differences


def test_the_manifests_are_what_the_code_says() -> None:
    assert differences(crd_files(ROOT), ROOT) == []
