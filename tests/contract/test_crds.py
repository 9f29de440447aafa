"""The CRD manifests in the tree equal the generated ones."""

from virtbus.schemas.generate import ROOT, differences, kubernetes_files


def test_the_manifests_are_what_the_code_says() -> None:
    assert differences(kubernetes_files(ROOT), ROOT) == []
