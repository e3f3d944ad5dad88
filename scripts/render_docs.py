"""Write the documents that come from code; ``make docs`` runs it, and a test compares them."""

from pathlib import Path

from kvtier.cli import manual
from kvtier.config import document
from kvtier.observe import reference

ROOT = Path(__file__).resolve().parent.parent

RENDERED = {
    "docs/operations/configuration.md": document.render_reference,
    "docs/operations/metrics.md": reference.render_reference,
    "docs/man/kvtier.1": manual.render_commands,
    "docs/man/kvtier.toml.5": manual.render_settings,
    "deploy/kvtier.toml.example": document.render_example,
}


def main() -> None:
    """Write each document in its place."""
    for name, render in RENDERED.items():
        path = ROOT / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(render())


if __name__ == "__main__":
    main()
