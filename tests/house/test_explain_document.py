"""What an operator is told of fates and reasons is what the code says of them."""

import re

import pytest
from source import ROOT

from kvtier.core.fate import Fate
from kvtier.core.plan import PlanReason
from kvtier.daemon.status.explain import FATE_SENTENCES, PLAN_SENTENCES

PAGE = (ROOT / "docs" / "operations" / "explain.md").read_text()


def section(title: str) -> dict[str, str]:
    """Return the table below a heading: word and sentence."""
    text = PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]
    return dict(re.findall(r"^\| `(\w+)` \| ([^|]+?) \|", text, flags=re.MULTILINE))


@pytest.mark.parametrize(
    ("title", "closed", "sentences"),
    [
        ("What became of a block", Fate, FATE_SENTENCES),
        ("Why so much was restored", PlanReason, PLAN_SENTENCES),
    ],
    ids=["fates", "reasons"],
)
def test_each_word_is_explained_in_the_words_of_the_code(title, closed, sentences):
    assert set(sentences) == set(closed)
    assert section(title) == {word.value: sentences[word] for word in closed}
