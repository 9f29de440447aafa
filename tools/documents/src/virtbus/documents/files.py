"""Collects the contents of all generated files, and compares them with the work tree."""

from collections.abc import Iterator
from pathlib import Path

import yaml
from pydantic import BaseModel

from virtbus.documents import (
    asyncapi,
    data_fates_page,
    disk_buses,
    kubevirt_fields,
    kubevirt_states,
    manifests,
    pools,
    reference,
    states,
)
from virtbus.documents.crds import crd
from virtbus.documents.wire import FOLDER, editions, golden, json_schema, models, unread

ROOT = Path(__file__).parents[5]
COMMAND = "python -m virtbus.documents"

HANDWRITTEN = frozenset(
    {"cri.md", "faults.md", "glossary.md", "hostile-inputs.md", "invariants.md"}
)
"""Reference pages that people write."""


def generated(root: Path, *, fresh: bool = False) -> dict[Path, str]:
    """Return the contents of all generated files, by path."""
    return wire_files(root, fresh=fresh) | reference_files(root) | kubernetes_files(root)


def wire_files(root: Path, *, fresh: bool = False) -> dict[Path, str]:
    """Return the contents of schemas/wire, by path."""
    wire = root / "schemas" / "wire"
    files = {wire / "asyncapi.yaml": asyncapi.document()}
    for model in models():
        path = golden_path(root, model)
        kept = editions(path.read_text(encoding="utf-8")) if path.exists() and not fresh else []
        files[path] = golden(model, kept)
        files[wire / FOLDER / "schema" / f"{model.__name__}.json"] = json_schema(model)
    return files


def golden_path(root: Path, model: type[BaseModel]) -> Path:
    """Return the path of the file with a message's golden bytes."""
    return root / "schemas" / "wire" / FOLDER / "golden" / f"{model.__name__}.json"


def reference_files(root: Path) -> dict[Path, str]:
    """Return the contents of docs/reference, by path."""
    pages = {
        "subjects.md": reference.subjects(),
        "errors.md": reference.errors(root),
        "states.md": states.page(),
        "models.md": reference.model_pages(),
        "settings.md": reference.settings(),
        "data-fates.md": data_fates_page.page(),
        "disk-buses.md": disk_buses.page(),
        "pools.md": pools.page(),
        "kubevirt-fields.md": kubevirt_fields.page(),
        "kubevirt-states.md": kubevirt_states.page(),
    }
    note = f"<!-- Written by `{COMMAND}` (make docs) from the code; edit that. -->\n\n"
    return {
        root / "docs" / "reference" / name: note + text.rstrip("\n") + "\n"
        for name, text in pages.items()
    }


def kubernetes_files(root: Path) -> dict[Path, str]:
    """Return the CRDs and the plain manifests of the Helm chart, by path."""
    chart = root / "deploy" / "kubernetes"
    folder = chart / "crds"
    note = f"# Written by `{COMMAND}` (make docs) from the code; edit that.\n"
    files = {
        folder / f"{name}.yaml": note + yaml.safe_dump(one, sort_keys=False, width=120)
        for name, one in crd.definitions().items()
    }
    return files | {chart / "manifests" / "virtbus.yaml": manifests.manifests(chart)}


def differences(files: dict[Path, str], root: Path) -> list[str]:
    """Return paths whose content differs from `files`, and unexpected paths in the same folders."""
    found = [
        f"{path.relative_to(root)} differs from the generated text"
        for path, text in files.items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    stray = {
        other
        for folder in {path.parent for path in files}
        if folder.exists()
        for other in folder.iterdir()
        if other.is_file() and other not in files and other.name not in HANDWRITTEN
    }
    return found + [f"{path.relative_to(root)} is of nothing in the code" for path in sorted(stray)]


def broken(root: Path) -> Iterator[str]:
    """Yield a message for each value in a golden file that today's models read differently."""
    for model in models():
        path = golden_path(root, model)
        if path.exists():
            for number, one in enumerate(editions(path.read_text(encoding="utf-8")), start=1):
                for where in unread(model, one):
                    yield f"{model.__name__}, edition {number}: {where} is lost"
