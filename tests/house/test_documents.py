"""Documents say what the code says, and point to what exists."""

import re
import runpy

import pytest
from source import ROOT

from kvtier.config import load_config
from kvtier.engine.request import DecisionReason, RestoreDecision
from kvtier.tiers.base import MissReason

RENDERED = runpy.run_path(str(ROOT / "scripts" / "render_docs.py"))["RENDERED"]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


@pytest.mark.parametrize("name", RENDERED)
def test_a_rendered_document_is_current(name):
    assert (ROOT / name).read_text() == RENDERED[name](), f"{name} is stale; run make docs"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target, place in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        other = page.parent / target if target else page
        assert other.exists(), f"{page.name} links to {target}"
        if place and other.suffix == ".md":
            assert place in places_of(other), f"{page.name} links to {target}#{place}"


def places_of(page):
    """Return the anchors that GitHub gives to a page's headings."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


def test_decisions_are_numbered_without_gaps():
    names = sorted(path.name for path in (ROOT / "docs" / "adr").glob("0*.md"))
    assert [name[:4] for name in names] == [f"{n:04}" for n in range(1, len(names) + 1)]


@pytest.mark.parametrize("closed", [MissReason, RestoreDecision, DecisionReason])
def test_closed_sets_are_explained(closed):
    page = (ROOT / "docs" / "concepts.md").read_text()
    missing = [value for value in closed if f"| `{value}` |" not in page]
    assert not missing, f"docs/concepts.md does not explain {', '.join(missing)}"


def test_the_example_configuration_is_one(tmp_path):
    example = (ROOT / "deploy" / "kvtier.toml.example").read_text()
    path = tmp_path / "kvtier.toml"
    # All at once, but for the one that stands for another.
    path.write_text(re.sub(r"^# (?!url_file)(?=\w+ = )", "", example, flags=re.MULTILINE))
    config = load_config(path, {}, {})
    assert config.cpu == load_config(None, {}, {}).cpu


def test_verbs_of_the_makefile_are_documented():
    makefile = (ROOT / "Makefile").read_text()
    verbs = set(re.findall(r"^([a-z-]+):.*##", makefile, flags=re.MULTILINE))
    phony = set(re.findall(r"^\.PHONY: ([a-z-]+)", makefile, flags=re.MULTILINE))
    assert verbs == phony
    pages = "\n".join(page.read_text() for page in PAGES)
    for verb in re.findall(r"`make ([a-z-]+)", pages):
        assert verb in verbs, f"make {verb} is documented and does not exist"
