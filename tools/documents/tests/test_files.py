"""The generated files in the tree equal the generated text, and strays are found."""

from pathlib import Path

from virtbus.documents import files, reference
from virtbus.documents.files import ROOT, differences


def test_generated_files_match_the_code() -> None:
    assert differences(files.generated(ROOT), ROOT) == [], (
        f"run `{files.COMMAND}` (make docs), and commit the files that it writes"
    )


def test_a_stale_file_and_an_empty_file_are_reported(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("old")
    (tmp_path / "b.json").write_text("whose?")
    assert differences({tmp_path / "a.json": "new"}, tmp_path) == [
        "a.json differs from the generated text",
        "b.json is of nothing in the code",
    ]


def test_the_page_of_settings_has_every_service() -> None:
    services = {path.parent.name for path in ROOT.glob("services/*/src/virtbus/*/settings.py")}
    assert set(reference.SETTINGS) == services
