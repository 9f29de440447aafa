"""Writes the generated files, or verifies them: `python -m virtbus.documents [--check]`.

The files are in `schemas/wire/`, `docs/reference/`, and `crds/` and `manifests/` of
`deploy/kubernetes/`. Golden files also keep the earlier shapes of their messages. `--fresh` drops
these earlier shapes. Use `--fresh` only if no release wrote messages of these shapes.
"""

import argparse
import json
import sys

from virtbus.documents.files import COMMAND, ROOT, broken, differences, generated


def main(argv: list[str] | None = None) -> int:
    """Return the exit code: 0, or 1 if `--check` found something."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help=("change nothing, report the differences")
    )
    parser.add_argument("--fresh", action="store_true", help="drop earlier golden editions")
    options = parser.parse_args(argv)
    files = generated(ROOT, fresh=options.fresh)
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
