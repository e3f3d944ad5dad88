"""Rules in the format of Prometheus."""

from typing import Any

import yaml

from deploy.source.alert import ALERTS
from deploy.source.recording import RECORDINGS

__all__ = ["alerts", "recordings", "render"]

_HEAD = "# Written by `make docs` from deploy/source; change it there.\n"


def recordings() -> str:
    """Return the file of recording rules."""
    return _render(
        "kvtier.recording", [{"record": each.record, "expr": each.expr} for each in RECORDINGS]
    )


def alerts(runbook: str) -> str:
    """Return the file of alerts; ``runbook`` is the URL or path of the runbook."""
    return _render(
        "kvtier.alerts",
        [
            {
                "alert": each.name,
                "expr": each.expr,
                "for": each.hold,
                "labels": {"severity": each.severity},
                "annotations": {
                    "summary": each.summary,
                    "description": each.description,
                    "runbook_url": f"{runbook}#{each.name.lower()}",
                },
            }
            for each in ALERTS
        ],
    )


class _Dumper(yaml.SafeDumper):
    """Writes multi-line text as block scalars."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", text, "|" if "\n" in text else None)


_Dumper.add_representer(str, _Dumper.represent_text)


def _render(name: str, rules: list[dict[str, Any]]) -> str:
    return render({"groups": [{"name": name, "rules": rules}]})


def render(document: dict[str, Any]) -> str:
    """Return a document as YAML with the header of generated files."""
    return _HEAD + yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=100)
