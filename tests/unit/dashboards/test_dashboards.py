"""The dashboards and rules that come with the package: made by their generator, asked for series that
exist, and taken by the programs that read them."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard
from typer.testing import CliRunner

from areal_async.cli.main import app
from areal_async.config.cluster import DIR_VARIABLE
from areal_async.show.dashboards.files import HERE as FILES
from areal_async.show.dashboards.files import ListedJobs, write_files
from tests.panels import FOREIGN, OF_TARGET, asked, declared, panel_queries, rules, uses
from tests.waiting import LIMIT_S

ROOT = Path(__file__).parents[3]
SCHEMA = json.loads((ROOT / "tests" / "deploy" / "schemas" / "grafana.json").read_text())
needs_promtool = pytest.mark.skipif(
    not shutil.which("promtool"), reason="needs promtool, of the Debian package prometheus"
)


def test_the_dashboards_are_what_their_generator_makes(tmp_path):
    subprocess.run([sys.executable, ROOT / "deploy" / "grafana" / "build.py", tmp_path], check=True)
    made = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert len(made) == 7
    assert made == {path.name: path.read_text() for path in (FILES / "grafana").iterdir()}


def test_the_dashboards_are_as_grafana_publishes_its_schema():
    for path in (FILES / "grafana").iterdir():
        content = json.loads(path.read_text())
        for variable in content["templating"]["list"]:
            for field in ("auto", "auto_count", "auto_min"):  # of one kind; the SDK gives all kinds
                del variable[field]
        assert schema_problems(content) == [], path.name


def schema_problems(dashboard):
    parts = [(SCHEMA["dashboard"], dashboard)]
    for panel in (panel for panel in dashboard["panels"] if panel["type"] != "row"):
        parts.append((SCHEMA["options"][panel["type"]], panel["options"]))
        if panel["type"] in SCHEMA:
            parts.append((SCHEMA[panel["type"]], panel["fieldConfig"]["defaults"]["custom"]))
    checked = ((jsonschema.Draft7Validator(schema), content) for schema, content in parts)
    return [error.message for validator, content in checked for error in validator.iter_errors(content)]


@pytest.mark.parametrize(
    ("field", "value"), [("unit", 5), ("decimal", 1), ("custom", {"lineWide": 1}), ("color", {"mode": "red"})]
)
def test_a_field_that_grafana_does_not_know_is_found(field, value):
    content = json.loads((FILES / "grafana" / "areal-buffer.json").read_text())
    content["templating"]["list"] = []
    assert schema_problems(content) == []
    content["panels"][1]["fieldConfig"]["defaults"][field] = value
    assert len(schema_problems(content)) == 1


def test_the_dashboards_are_what_the_models_of_grafana_know():
    """A field that the published schema does not have would be lost on the way through its models."""
    for path in (FILES / "grafana").iterdir():
        content = json.loads(path.read_text())
        assert json.loads(JSONEncoder().encode(Dashboard.from_json(content))) == content, path.name
        drawn = [panel for panel in content["panels"] if panel["type"] != "row"]
        assert [v["name"] for v in content["templating"]["list"]] == ["source", "job", "policy"]
        for panel in drawn:
            assert panel["description"].endswith((".", "…")), panel["title"]
        taken = [place for panel in content["panels"] for place in places(**panel["gridPos"])]
        assert len(taken) == len(set(taken)), f"{path.name}: panels on top of each other"
        height = 1 + max(y for _, y in taken)
        assert set(taken) == places(0, 0, 24, height), f"{path.name}: holes, or panels beyond the edge"
        assert len({panel["id"] for panel in content["panels"]}) == len(content["panels"])


def places(x, y, w, h):
    return {(x + right, y + down) for right in range(w) for down in range(h)}


def test_a_legend_has_every_label_that_tells_its_lines_apart():
    assert [(query.where, missing) for query in panel_queries() if (missing := unnamed(query))] == []


def unnamed(query):
    """Labels in which lines of a query may differ, and that its legend does not say. A process says its
    service; of services other than rollout a job has one process."""
    used, series = uses(query.expression), declared()
    differ = used.grouped or {label for name, _ in used.series for label in series.get(name, ())}
    if not used.grouped and all(name.startswith("areal_rollout") for name, _ in used.series):
        differ = differ | {"process"}
    if "job=" in query.expression:
        differ = differ | {"job"}
    by_equality = set(re.findall(r'(\w+)="', query.expression))
    return differ - by_equality - {"le", "service"} - set(re.findall(r"{{(\w+)}}", query.where))


def query_problems(expression: str) -> list[str]:
    """What in an expression the product does not serve."""
    series, recorded, problems = declared(), {rule["record"]: rule["expr"] for rule in rules("recording")}, []
    used = uses(expression)
    known = set(OF_TARGET)
    for name, labels in used.series:
        if name in recorded:  # its labels are in its name and in its own expression
            known |= uses(recorded[name]).grouped
        elif name in FOREIGN or name in series:
            of_it = OF_TARGET | FOREIGN.get(name, series.get(name, set()))
            known |= of_it
            problems += [f"{name} has no label {label}" for label in sorted(labels - of_it)]
        else:
            problems.append(f"nobody serves {name}")
    return problems + [f"nothing has the label {label}" for label in sorted(used.grouped - known)]


def test_every_query_asks_for_series_and_labels_that_the_product_serves():
    assert [f"{one.where}: {text}" for one in asked() for text in query_problems(one.expression)] == []
    assert len(asked()) > 150


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("rate(areal_rollout_tokens[1m])", "nobody serves areal_rollout_tokens"),
        ('areal_trainer_loss{poilcy="p"}', "areal_trainer_loss has no label poilcy"),
        ("sum by (reason) (areal_buffer_groups)", "nothing has the label reason"),
        ("job:areal_rollout_token:rate1m", "nobody serves job:areal_rollout_token:rate1m"),
    ],
)
def test_a_renamed_series_or_label_is_found(expression, problem):
    assert query_problems(expression) == [problem]


def test_every_series_is_on_a_dashboard():
    shown = {name for one in panel_queries() for name, _ in uses(one.expression).series}
    shown |= {name for rule in rules("recording") for name, _ in uses(rule["expr"]).series}
    whole = {name for name in declared() if not name.endswith(("_sum", "_count"))}
    assert whole - shown == set()


@needs_promtool
def test_prometheus_reads_every_query_and_file(tmp_path):
    every = [{"record": f"a:b{n}", "expr": one.expression} for n, one in enumerate(asked())]
    (tmp_path / "all.yaml").write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": every}]}))
    promtool("check", "rules", tmp_path / "all.yaml")


@needs_promtool
def test_every_alert_fires_on_what_it_is_about_and_on_nothing_healthy():
    tests = Path(__file__).with_name("alerts.test.yaml")
    promtool("test", "rules", tests)
    fired = set(re.findall(r'ALERTS\{alertname="(\w+)", alertstate="firing"', tests.read_text()))
    assert fired == {rule["alert"] for rule in rules("alerts")}


def promtool(*arguments):
    done = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_says_what_to_do_and_names_a_section_of_the_docs():
    for rule in rules("alerts"):
        page, _, anchor = rule["annotations"]["docs"].partition("#")
        headings = re.findall(r"^#+ (.+)$", (ROOT / page).read_text(), re.MULTILINE)
        assert anchor in [heading.lower() for heading in headings], rule["alert"]
        assert anchor == rule["alert"].lower()
        assert len(rule["annotations"]["description"]) > 60
        assert rule["labels"]["severity"] in ("warning", "critical")


def test_the_files_are_written_for_a_place(tmp_path, monkeypatch):
    monkeypatch.setenv(DIR_VARIABLE, str(tmp_path / "cluster"))
    command = ["dashboards", "write", str(tmp_path / "d"), "--runs", str(tmp_path / "runs")]
    done = CliRunner().invoke(app, [*command, "--prometheus", "http://p:9090", "--json"])
    assert done.exit_code == 0, done.output
    assert len(json.loads(done.output)["files"]) == 14
    provisioning = tmp_path / "d" / "provisioning"
    assert read(provisioning / "datasources" / "areal.yaml")["datasources"][0]["url"] == "http://p:9090"
    path = read(provisioning / "dashboards" / "areal.yaml")["providers"][0]["options"]["path"]
    assert sorted(Path(path).iterdir()) == sorted((tmp_path / "d" / "grafana").iterdir())
    (scrape,) = read(tmp_path / "d" / "prometheus.yaml")["scrape_configs"]
    assert scrape["file_sd_configs"][0]["files"] == [str(tmp_path / "runs" / "prometheus" / "*.json")]
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 0, "a second time"
    started = [line.split() for line in again.output.splitlines() if line.startswith("  ") and "=" in line]
    assert started[0][:2] == ["prometheus", f"--config.file={tmp_path}/d/prometheus.yaml"]
    assert started[0][-1] == "--web.listen-address=127.0.0.1:9090"
    assert {"GF_SERVER_HTTP_ADDR=127.0.0.1", f"--config={tmp_path}/d/grafana.ini"} <= {*started[1]}

    (tmp_path / "file").touch()
    refused = CliRunner().invoke(app, ["dashboards", "write", str(tmp_path / "file")])
    assert refused.exit_code != 0
    assert "cannot be written" in refused.output


def test_jobs_of_a_controller_are_found_where_it_lists_them(tmp_path):
    token = tmp_path / "look.token"
    token.write_text("secret")
    listed = ListedJobs("http://127.0.0.1:8470", token)
    write_files(tmp_path / "d", [tmp_path / "runs"], "http://p:9090", listed)
    scrapes = {each["job_name"]: each for each in read(tmp_path / "d" / "prometheus.yaml")["scrape_configs"]}
    (found,) = scrapes["areal-jobs"]["http_sd_configs"]
    assert found["url"] == "http://127.0.0.1:8470/v1/targets"
    assert found["authorization"] == {"credentials_file": str(token)}
    assert scrapes["controller"]["static_configs"] == [{"targets": ["127.0.0.1:8470"]}]
    assert "secret" not in (tmp_path / "d" / "prometheus.yaml").read_text()
    if (tool := shutil.which("promtool")) is not None:
        command = [tool, "check", "config", str(tmp_path / "d" / "prometheus.yaml")]
        assert subprocess.run(command, capture_output=True, timeout=LIMIT_S).returncode == 0


def read(path):
    return yaml.safe_load(path.read_text())
