"""The CRD manifests in the tree equal the generated ones."""

from virtbus.schemas.generate import ROOT, differences, kubernetes_files


def test_the_manifests_match_the_code() -> None:
    assert differences(kubernetes_files(ROOT), ROOT) == []
