"""Write the rules, the dashboards and the page that lists them; ``make docs`` runs this."""

import argparse
from pathlib import Path

from deploy.source.files import RUNBOOK, files

__all__ = ["main"]

_ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    """Write each file below ``--out``."""
    parser = argparse.ArgumentParser(prog="python -m deploy.source", description=__doc__)
    parser.add_argument("--out", type=Path, default=_ROOT, help="default: this repository")
    parser.add_argument("--runbook", default=RUNBOOK, help="URL of the published runbook")
    chosen = parser.parse_args()
    for name, text in files(chosen.runbook).items():
        path = chosen.out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    main()
