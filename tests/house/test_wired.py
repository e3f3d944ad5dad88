"""A setting that nothing reads, or a metric that nothing records, promises what is not kept."""

import re
from functools import cache

import pytest
from source import SOURCE

from kvtier.config.model import section_models
from kvtier.config.section import key_of
from kvtier.observe import table

SETTINGS = [
    (section, name) for section, model in section_models().items() for name in model.model_fields
]
METRICS = [name for name in table.__all__ if name.isupper() and not name.endswith("_METRICS")]


@cache
def text_outside(package: str) -> str:
    return "\n".join(
        "\n".join(module.lines)
        for module in SOURCE
        if not module.name.startswith(f"kvtier/{package}/")
    )


@pytest.mark.parametrize(("section", "name"), SETTINGS, ids=key_of)
def test_a_setting_is_read(section, name):
    is_read = re.search(rf"\.{name}\b", text_outside("config")) is not None
    assert is_read, f"nothing reads {section}.{name}"


@pytest.mark.parametrize("name", METRICS)
def test_a_metric_is_recorded(name):
    # REFUSED_SAMPLES is recorded by the recorder itself.
    outside = text_outside("observe") if name != "REFUSED_SAMPLES" else text_outside("config")
    is_recorded = re.search(rf"\b{name}\b", outside) is not None
    assert is_recorded, f"nothing records {name}"


def test_every_metric_belongs_to_a_process():
    exposed = {metric.name for metric in (*table.DAEMON_METRICS, *table.ENGINE_METRICS)}
    assert exposed == {getattr(table, name).name for name in METRICS}
