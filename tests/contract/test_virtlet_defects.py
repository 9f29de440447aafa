"""Virtlet's twenty defects: the page names a test for each, and the test exists."""

import re
from pathlib import Path

from tests.contract.virtlet_seeds import Case, block, seed_of

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/explanation/virtlet-defects.md"


def test_each_defect_names_tests_that_exist() -> None:
    rows = re.findall(r"^\| (\d+) \|.*\| (.*) \|$", PAGE.read_text(), flags=re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 21))
    for number, cell in rows:
        named = re.findall(r"`([^`]+)::([^`]+)`", cell)
        assert named, number
        for path, name in named:
            assert f"def {name}(" in (ROOT / path).read_text(), f"{number}: {path}::{name}"


def test_the_users_commands_stay_with_a_block_volume() -> None:
    mine = "runcmd:\n- echo mine\n"
    seed = seed_of(Case({"VirtletCloudInitUserData": mine}, block("/dev/testpvc")))
    whole = "\n".join(seed.values())
    assert "echo mine" in whole
    assert "/dev/testpvc" in whole
