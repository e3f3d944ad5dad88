"""Dashboards in the format of Grafana, built with its own library."""

import json
from collections.abc import Mapping
from typing import Any

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as options
from grafana_foundation_sdk.models import dashboard as model

from deploy.source import vllm
from deploy.source.board import Board, Kind, Panel, Section
from kvtier.observe.metrics import BUILD

__all__ = ["COLOURS", "render"]

COLOURS: Mapping[str, str] = {
    "gpu": "green",
    "cpu": "blue",
    "ssd": "orange",
    "remote": "purple",
    "computed": "#9a9a9a",
    "absent": "#9a9a9a",
    "lost": "red",
    "vLLM": "#f2cc0c",
    "without": "red",
}
"""Series name -> colour, the same on every dashboard."""

_STATE_COLOURS: Mapping[str, str] = {
    "/(out|open)$/": "red",
    "/(degraded|half_open|drained|detached)$/": "orange",
    "/off$/": "#9a9a9a",
}
"""Suffix of a series name -> colour; the last match wins."""

_PRESENT = f"{BUILD.name}|{vllm.ATTACHED.name}"
"""Every daemon and engine exposes one of them."""

_SOURCE = model.DataSourceRef(type_val="prometheus", uid="${datasource}")


def render(board: Board, runbook: str) -> str:
    """Return the file to import or provision; ``runbook`` is the URL or path of the runbook."""
    page = (
        dashboard.Dashboard(board.title)
        .uid(f"kvtier-{board.name}")
        .description(board.description)
        .tags(["kvtier"])
        .time("now-1h", "now")
        .refresh("30s")
        .tooltip(model.DashboardCursorSync.CROSSHAIR)
        .readonly()
        .link(
            dashboard.DashboardLink("kvtier")
            .type(model.DashboardLinkType.DASHBOARDS)
            .tags(["kvtier"])
            .include_vars(True)
            .keep_time(True)
        )
        .link(_link("Runbook", runbook))
    )
    for variable in _variables():
        page = page.with_variable(variable)
    for section in board.sections:
        page = _add(page, section, runbook)
    built = page.build()
    for number, panel in enumerate(built.panels or (), 1):
        panel.id_val = number  # Grafana would renumber them at each import
    return _written(json.loads(json.dumps(built, cls=JSONEncoder, sort_keys=True)))


def _written(page: Mapping[str, Any]) -> str:
    """Write one panel per line, so that a change of a panel changes one line."""
    panels = ",\n".join(f"  {json.dumps(panel)}" for panel in page["panels"])
    lines = [f' "{key}": {json.dumps(value)}' for key, value in page.items() if key != "panels"]
    lines.append(f' "panels": [\n{panels}\n ]')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _link(title: str, url: str) -> dashboard.DashboardLink:
    return (
        dashboard.DashboardLink(title)
        .type(model.DashboardLinkType.LINK)
        .url(url)
        .target_blank(True)
    )


def _variables() -> tuple[dashboard.DatasourceVariable, *tuple[dashboard.QueryVariable, ...]]:
    """Return the variables for data source, job and instance; all are selected by default."""
    every = model.VariableOption(text="All", value="$__all", selected=True)
    chosen = [
        dashboard.QueryVariable(name)
        .label(name)
        .datasource(_SOURCE)
        .query(f"label_values({source}, {name})")
        .refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(model.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(every)
        for name, source in (
            ("job", f'{{__name__=~"{_PRESENT}"}}'),
            ("instance", f'{{__name__=~"{_PRESENT}", job=~"$job"}}'),
        )
    ]
    where = dashboard.DatasourceVariable("datasource").label("data source").type("prometheus")
    return (where, *chosen)


def _add(page: dashboard.Dashboard, section: Section, runbook: str) -> dashboard.Dashboard:
    page = page.with_row(dashboard.Row(section.title))
    for panel in section.panels:
        drawn = _number(panel) if panel.kind in {Kind.NUMBER, Kind.STATES} else _graph(panel)
        page = page.with_panel(_dress(drawn, panel, runbook))
    return page


def _dress(
    drawn: stat.Panel | timeseries.Panel, panel: Panel, runbook: str
) -> stat.Panel | timeseries.Panel:
    """Set the properties that all kinds of panels have."""
    drawn = (
        drawn.title(panel.title)
        .description(panel.description)
        .datasource(_SOURCE)
        .unit(panel.unit)
        .span(panel.span)
        .height(4 if panel.kind in {Kind.NUMBER, Kind.STATES} else 8)
        .thresholds(_thresholds(panel))
    )
    if panel.max is not None:
        drawn = drawn.max(panel.max)
    if panel.alert:
        link = _link(f"Runbook: {panel.alert}", f"{runbook}#{panel.alert.lower()}")
        drawn = drawn.links([link])
    for number, query in enumerate(panel.queries):
        target = (
            prometheus.Dataquery()
            .expr(query.expr)
            .legend_format(query.legend)
            .ref_id(chr(ord("A") + number))
        )
        is_instant = panel.kind in {Kind.NUMBER, Kind.STATES}
        drawn = drawn.with_target(target.instant() if is_instant else target.range())
    return drawn


def _thresholds(panel: Panel) -> dashboard.ThresholdsConfig:
    steps = [model.Threshold(value=None, color=panel.below)]
    steps += [model.Threshold(value=value, color=colour) for value, colour in panel.thresholds]
    return dashboard.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(steps)


def _number(panel: Panel) -> stat.Panel:
    is_alone = panel.kind is Kind.NUMBER
    drawn = (
        stat.Panel()
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .graph_mode(options.BigValueGraphMode.NONE)
        .color_mode(options.BigValueColorMode.VALUE)
        .text_mode(
            options.BigValueTextMode.VALUE if is_alone else options.BigValueTextMode.VALUE_AND_NAME
        )
    )
    for pattern, colour in () if is_alone else _STATE_COLOURS.items():
        drawn = drawn.override_by_regexp(pattern, [_fixed(colour)])
    return drawn


def _graph(panel: Panel) -> timeseries.Panel:
    is_stacked = panel.kind is Kind.STACK
    drawn = (
        timeseries.Panel()
        .line_width(1)
        .fill_opacity(40 if is_stacked else 5)
        .show_points(options.VisibilityMode.NEVER)
        .axis_soft_min(0)
        .tooltip(common.VizTooltipOptions().mode(options.TooltipDisplayMode.MULTI))
        .legend(
            common.VizLegendOptions()
            .show_legend(True)
            .display_mode(options.LegendDisplayMode.LIST)
            .placement(options.LegendPlacement.BOTTOM)
        )
    )
    if is_stacked:
        drawn = drawn.stacking(common.StackingConfig().mode(options.StackingMode.NORMAL))
    if panel.thresholds:
        style = options.GraphThresholdsStyleMode.DASHED
        drawn = drawn.thresholds_style(common.GraphThresholdsStyleConfig().mode(style))
    for name in _coloured(panel):
        drawn = drawn.override_by_name(name, [_fixed(COLOURS[name])])
    return drawn


def _fixed(colour: str) -> model.DynamicConfigValue:
    return model.DynamicConfigValue("color", {"mode": "fixed", "fixedColor": colour})


def _coloured(panel: Panel) -> list[str]:
    """Return the names of the panel's series that have a fixed colour."""
    legends = {query.legend for query in panel.queries}
    has_tiers = not legends.isdisjoint({"{{tier}}", "{{source}}"})
    return [name for name in COLOURS if has_tiers or name in legends]
