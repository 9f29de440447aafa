"""`python -m virtbus.schemas.generate [--check]`: write, or verify, the generated files.

A build tool: unlike the rest of this package it reads and writes files. It writes `schemas/wire/`,
`docs/reference/`, and `crds/` and `manifests/` of `deploy/kubernetes/`. It needs the whole
workspace, because it reads tables of the services. With `--fresh` golden files drop their earlier
editions; use it only for shapes that no release wrote.
"""

import argparse
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml
from pydantic import BaseModel

from virtbus.schemas import (
    generate_asyncapi,
    generate_manifests,
    generate_reference,
    generate_states,
)
from virtbus.schemas.generate_wire import FOLDER, editions, golden, json_schema, models, unread

ROOT = Path(__file__).parents[4]
COMMAND = "python -m virtbus.schemas.generate"
FIELDS_PAGE = "virtbus.kubebridge.core.documents.fields"
STATES_PAGE = "virtbus.kubebridge.core.documents.states"
CRDS = "virtbus.kubebridge.core.crds.crd"

HANDWRITTEN = frozenset({"faults.md", "glossary.md", "hostile-inputs.md", "invariants.md"})
"""Reference pages that people write."""


def wire_files(root: Path, *, fresh: bool = False) -> dict[Path, str]:
    """Return the contents of schemas/wire, by path."""
    wire = root / "schemas" / "wire"
    files = {wire / "asyncapi.yaml": generate_asyncapi.document()}
    for model in models():
        path = golden_path(root, model)
        kept = editions(path.read_text(encoding="utf-8")) if path.exists() and not fresh else []
        files[path] = golden(model, kept)
        files[wire / FOLDER / "schema" / f"{model.__name__}.json"] = json_schema(model)
    return files


def golden_path(root: Path, model: type[BaseModel]) -> Path:
    """Return the path of a message's golden bytes."""
    return root / "schemas" / "wire" / FOLDER / "golden" / f"{model.__name__}.json"


def reference_files(root: Path) -> dict[Path, str]:
    """Return the contents of docs/reference, by path."""
    pages = {
        "subjects.md": generate_reference.subjects(),
        "errors.md": generate_reference.errors(root),
        "states.md": generate_states.page(),
        "models.md": generate_reference.model_pages(),
        "settings.md": generate_reference.settings(root),
        "kubevirt-fields.md": importlib.import_module(FIELDS_PAGE).page(),
        "kubevirt-states.md": importlib.import_module(STATES_PAGE).page(),
    }
    note = f"<!-- Written by `{COMMAND}` (make docs) from the code; edit that. -->\n\n"
    return {
        root / "docs" / "reference" / name: note + text.rstrip("\n") + "\n"
        for name, text in pages.items()
    }


def kubernetes_files(root: Path) -> dict[Path, str]:
    """Return the CRDs and the plain manifests, by path; the folder of both is the Helm chart."""
    chart = root / "deploy" / "kubernetes"
    folder = chart / "crds"
    note = f"# Written by `{COMMAND}` (make docs) from the code; edit that.\n"
    crds = importlib.import_module(CRDS).definitions()
    files = {
        folder / f"{name}.yaml": note + yaml.safe_dump(one, sort_keys=False, width=120)
        for name, one in crds.items()
    }
    return files | {chart / "manifests" / "virtbus.yaml": generate_manifests.manifests(chart)}


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
    """Yield golden editions that today's models read differently."""
    for model in models():
        path = golden_path(root, model)
        if path.exists():
            for number, one in enumerate(editions(path.read_text(encoding="utf-8")), start=1):
                for where in unread(model, one):
                    yield f"{model.__name__}, edition {number}: {where} is lost"


def main(argv: list[str] | None = None) -> int:
    """Return the exit code: 0, or 1 if `--check` found something."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help=("change nothing, report the differences")
    )
    parser.add_argument("--fresh", action="store_true", help="drop earlier golden editions")
    options = parser.parse_args(argv)
    files = wire_files(ROOT, fresh=options.fresh) | reference_files(ROOT) | kubernetes_files(ROOT)
    if options.check:
        found = differences(files, ROOT) + list(broken(ROOT))
        for line in found:
            sys.stderr.write(f"{line}\n")
        if found:
            sys.stderr.write(f"run `{COMMAND}` (make docs) and commit what it writes\n")
        return 1 if found else 0
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    sys.stdout.write(json.dumps({"written": len(files)}) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
