"""Write the dashboards as Grafana's JSON, from `panels.py` and `more_panels.py`:

    python deploy/grafana/build.py [DIR]

DIR is `areal_async/show/dashboards/grafana` unless it is given; a test compares what is there with what this
makes. It needs grafana-foundation-sdk, an extra of development: a user has the JSON.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

from grafana_foundation_sdk.builders import bargauge, common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DataSourceRef,
    VariableHide,
    VariableRefresh,
    VariableSort,
)
from more_panels import BOARDS
from panels import Board, Panel

OUT = Path(__file__).parents[2] / "areal_async" / "show" / "dashboards" / "grafana"
SOURCE = DataSourceRef(type_val="prometheus", uid="${source}")
MATCHERS = {
    "<job>": 'job=~"$job"',
    "<policy>": 'job=~"$job", policy=~"$policy"',
    "<rate>": "$__rate_interval",
}
HEIGHTS = {"stat": 4}


def main(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for board in BOARDS:
        text = JSONEncoder(sort_keys=True, indent=1).encode(built(board).build())
        (out / f"{board.uid}.json").write_text(text + "\n", encoding="utf-8")


def built(board: Board) -> dashboard.Dashboard:
    made = (
        dashboard.Dashboard(board.title)
        .uid(board.uid)
        .description(board.help)
        .tags(["areal-async"])
        .refresh("10s")
        .time("now-1h", "now")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .link(
            dashboard.DashboardLink("areal-async")
            .type("dashboards")
            .tags(["areal-async"])
            .as_dropdown(True)
            .keep_time(True)
            .include_vars(True)
        )
        .with_variable(dashboard.DatasourceVariable("source").label("Data source").type("prometheus"))
        .with_variable(chosen("job", "label_values(areal_busy_seconds_total, job)"))
        .with_variable(chosen("policy", 'label_values(areal_buffer_version{job=~"$job"}, policy)'))
    )
    numbers = itertools.count(1)  # by which a link names a panel
    for row in board.rows:
        made = made.with_row(dashboard.Row(row.title).id(next(numbers)))
        for panel in row.panels:
            made = made.with_panel(drawn(panel).id(next(numbers)))
    return made


def chosen(name: str, query: str) -> dashboard.QueryVariable:
    """A variable whose values are asked for again whenever the span of time changes: jobs come and go."""
    return (
        dashboard.QueryVariable(name)
        .label(name.capitalize())
        .query(query)
        .datasource(SOURCE)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
        .hide(VariableHide.DONT_HIDE)
    )


def drawn(panel: Panel) -> stat.Panel | bargauge.Panel | timeseries.Panel:
    if panel.kind == "stat":
        made = stat.Panel().graph_mode(common_models.BigValueGraphMode.AREA)
    elif panel.kind == "bars":
        made = bargauge.Panel().orientation(common_models.VizOrientation.HORIZONTAL)
    else:
        made = timeseries.Panel().line_width(1).fill_opacity(30 if panel.kind == "stacked" else 5)
        made = made.legend(
            common.VizLegendOptions()
            .show_legend(True)
            .display_mode(common_models.LegendDisplayMode.LIST)
            .placement(common_models.LegendPlacement.BOTTOM)
        ).tooltip(common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI))
        if panel.kind == "stacked":
            made = made.stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL))
    made = made.title(panel.title).description(panel.help).unit(panel.unit).datasource(SOURCE)
    made = made.span(panel.width).height(HEIGHTS.get(panel.kind, 8))
    if panel.low is not None:
        made = made.min(panel.low)
    if panel.high is not None:
        made = made.max(panel.high)
    for place, (legend, expression) in enumerate(panel.queries.items()):
        if "<job>" in expression or "<policy>" in expression:
            legend = f"{legend} {{{{job}}}}".strip()
        for short, matchers in MATCHERS.items():
            expression = expression.replace(short, matchers)
        query = prometheus.Dataquery().expr(expression).legend_format(legend).ref_id(chr(ord("A") + place))
        made = made.with_target(query.instant() if panel.kind == "bars" else query.range())
    return made


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else OUT)
