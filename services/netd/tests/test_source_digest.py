"""The digest of a program's source files."""

import subprocess
import sys
from pathlib import Path

import pytest

import virtbus
from virtbus.netd.edge.resolver_launch import RESOLVER
from virtbus.netd.edge.source_digest import source_digest, sources_of

LOADED = (
    f"import {RESOLVER}.__main__, sys; "
    "print(*(name for name, one in sys.modules.items() "
    "if name.startswith('virtbus') and getattr(one, '__file__', None)))"
)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program of virtbus that imports `b`, which imports the package `c`."""
    monkeypatch.setattr(virtbus, "__path__", [str(tmp_path)])
    (tmp_path / "c").mkdir()
    (tmp_path / "a.py").write_text("import os\nfrom virtbus.b import name\n")
    (tmp_path / "b.py").write_text("def name():\n    from virtbus import c\n")
    (tmp_path / "c" / "__init__.py").write_text("")
    (tmp_path / "c" / "other.py").write_text("raise ValueError\n")
    return tmp_path


@pytest.mark.parametrize(("changed", "differs"), [("b.py", True), ("c/other.py", False)])
def test_the_digest_is_that_of_the_imported_modules(
    tree: Path, changed: str, differs: bool
) -> None:
    before = source_digest("virtbus.a")
    assert source_digest("virtbus.a") == before
    (tree / changed).write_text((tree / changed).read_text() + "# changed\n")
    assert (source_digest("virtbus.a") != before) == differs


def test_the_digest_of_the_resolver_has_each_module_that_it_loads() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOADED], capture_output=True, check=True, text=True
    )
    assert set(done.stdout.split()) == set(sources_of(f"{RESOLVER}.__main__"))
