"""Each setting says why its default is what it is, and what is called live is."""

import re

import pytest
from source import ROOT

from kvtier.config.model import all_settings
from kvtier.config.section import extra_of

FIELDS = list(all_settings())

ADOPTED = "\n".join(
    (ROOT / "kvtier" / name).read_text()
    for name in (
        "daemon/daemon.py",
        "daemon/policies.py",
        "tiers/ssd/backend.py",
        "tiers/ssd/settings.py",
        "tiers/redis/backend.py",
        "tiers/redis/settings.py",
    )
)
"""Where a reload is applied."""


@pytest.mark.parametrize(("key", "section", "name", "field"), FIELDS, ids=[f[0] for f in FIELDS])
def test_a_setting_is_explained(key, section, name, field):
    reason = extra_of(field).get("reason", "")
    for text in (field.description or "", reason):
        assert re.fullmatch(r"[^|\n]{8,}\.", text), f"{key}: {text!r} is no sentence"
    assert reason not in field.description, f"{key} says the same twice"


LIVE = [each for each in FIELDS if extra_of(each[3]).get("live")]


@pytest.mark.parametrize(("key", "section", "name", "field"), LIVE, ids=[f[0] for f in LIVE])
def test_a_live_setting_is_applied(key, section, name, field):
    assert re.search(rf"\.{name}\b", ADOPTED), f"{key} is called live, and no reload applies it"
