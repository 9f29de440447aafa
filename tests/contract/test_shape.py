"""Rules that no linter checks: sizes, names, docstrings, and the one configuration."""

import ast
import tomllib
from pathlib import Path

import pytest
import yaml

from virtbus.schemas.version import VERSION

ROOT = Path(__file__).parents[2]
CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
MEMBERS = sorted(
    path
    for pattern in CONFIG["tool"]["uv"]["workspace"]["members"]
    for path in ROOT.glob(pattern)
    if (path / "pyproject.toml").exists()
)
PROJECTS = {
    project["name"]: project
    for member in MEMBERS
    for project in [tomllib.loads((member / "pyproject.toml").read_text("utf-8"))["project"]]
}
TOOLS = {"virtbus-documents"}
"""Members that only this repository needs: no host and no image has them."""
MODULES = sorted(
    path
    for folder in [*(member / "src" for member in MEMBERS), *(m / "tests" for m in MEMBERS)]
    for path in folder.rglob("*.py")
) + sorted((ROOT / "tests").rglob("*.py"))
PACKAGES = [path for path in MODULES if path.name == "__init__.py"]
LINES = 400
LINES_OF_TESTS = 600
"""A module of tests may be longer: its tests are independent and read one by one."""
NAMES_OF_EVERYTHING = {
    "utils",
    "util",
    "helpers",
    "helper",
    "common",
    "misc",
    "manager",
    "managers",
}


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def limit(path: str) -> int:
    return LINES if "/src/" in path else LINES_OF_TESTS


def test_no_module_collects_everything() -> None:
    sizes = {name(path): len(path.read_text(encoding="utf-8").splitlines()) for path in MODULES}
    assert {path: lines for path, lines in sizes.items() if lines > limit(path)} == {}


def test_no_module_is_named_for_everything() -> None:
    named = {part for path in MODULES for part in (path.stem, path.parent.name)}
    assert named & NAMES_OF_EVERYTHING == set()


def test_mypy_reads_every_member_and_nothing_else() -> None:
    given = [path for path in CONFIG["tool"]["mypy"]["mypy_path"] if path != "typings"]
    assert sorted(given) == sorted(name(member / "src") for member in MEMBERS)


def test_every_member_is_a_dependency_of_the_root() -> None:
    assert set(CONFIG["project"]["dependencies"]) == set(PROJECTS) - TOOLS
    assert set(CONFIG["tool"]["uv"]["sources"]) == set(PROJECTS)


def test_a_tool_of_the_repository_is_installed_nowhere_else() -> None:
    assert set(CONFIG["dependency-groups"]["dev"]) >= TOOLS
    needed = {one for project in PROJECTS.values() for one in project["dependencies"]}
    assert needed & TOOLS == set()


def test_the_version_is_said_once() -> None:
    given = {one["name"]: one["version"] for one in (CONFIG["project"], *PROJECTS.values())}
    chart = yaml.safe_load((ROOT / "deploy" / "kubernetes" / "Chart.yaml").read_text("utf-8"))
    values = yaml.safe_load((ROOT / "deploy" / "kubernetes" / "values.yaml").read_text("utf-8"))
    given |= {key: chart[key] for key in ("version", "appVersion")}
    given["image"] = values["image"].rpartition(":")[2]
    assert set(given.values()) == {VERSION}, given


def test_no_member_hides_the_others() -> None:
    """`virtbus` is a namespace (PEP 420): a single `virtbus/__init__.py` hides all members."""
    assert [name(path) for path in PACKAGES if path.parent.name == "virtbus"] == []


@pytest.mark.parametrize("path", PACKAGES, ids=name)
def test_a_package_defines_its_content(path: Path) -> None:
    said = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    assert len(said.split()) >= 4


@pytest.mark.parametrize("path", [path for path in PACKAGES if "src" in path.parts], ids=name)
def test_a_package_holds_no_code(path: Path) -> None:
    allowed = (ast.Expr, ast.Import, ast.ImportFrom, ast.Assign)
    body = ast.parse(path.read_text(encoding="utf-8")).body
    assert [type(node).__name__ for node in body if not isinstance(node, allowed)] == []
