"""Virtlet's cases of cloud-init data have the seeds of the golden file, without its defects."""

import pytest
import yaml
from tests.contract.virtlet_seeds import CASES, KEY, SCRIPT, golden, seed_of

GOLDEN = golden()


@pytest.mark.parametrize("name", CASES)
def test_a_pod_of_virtlet_gets_its_seed(name: str) -> None:
    assert seed_of(CASES[name]) == GOLDEN[name]


def test_the_golden_file_has_no_other_cases() -> None:
    assert set(GOLDEN) == set(CASES)


def test_a_script_loses_neither_its_first_line_nor_the_platforms_part() -> None:
    seed = GOLDEN["script with an environment"]
    assert seed["user-data"] == SCRIPT
    (file,) = yaml.safe_load(seed["vendor-data"])["write_files"]
    assert file["path"] == "/etc/cloud/environment"
    assert KEY in yaml.safe_load(seed["meta-data"])["public-keys"]


def test_the_users_lists_are_kept_and_ours_appended() -> None:
    merged = yaml.safe_load(GOLDEN["environment and the user's write_files"]["user-data"])
    assert [one["path"] for one in merged["write_files"]] == ["/etc/foo", "/etc/cloud/environment"]
    mounted = yaml.safe_load(GOLDEN["block device with the user's mounts"]["user-data"])
    assert mounted["mounts"] == [["/dev/testpvc", "/mnt"]]
    assert mounted["bootcmd"][-1][-1] == "/dev/testpvc"
