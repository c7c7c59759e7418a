"""`report.html`: a single file that shows one run, or compares several runs.

The file contains everything, so nothing is fetched. Its size is limited: long series are thinned, and only a
few episodes are kept. Text of a model cannot run as a script, because the file's content security policy
allows only the page's scripts, by hash."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from areal_async.base.own_files import write_whole
from areal_async.base.secrecy import shown
from areal_async.base.yaml_file import dump_yaml
from areal_async.config.fields import leaves_of
from areal_async.config.job import JobConfig
from areal_async.service.record import as_it_became, read_run_log
from areal_async.show.figures import rows_of, thinned
from areal_async.show.page import folder as reading
from areal_async.show.page.app import STATIC, static_text
from areal_async.show.page.folder import Json, UnknownName

REPORT = "report.html"
MOST_ROWS = 500  # Limit per policy and kind of row
MOST_FILES, MOST_EPISODES = 6, 3  # Sample files per run, and episodes per file
SAMPLE_BYTES = 2 << 20  # Bytes of all episodes of a run in a report

LINKED = re.compile(
    r'<link rel="stylesheet" href="page/(?P<css>[^"]+)">|<script src="page/(?P<js>[^"]+)"></script>'
)


def write_report(folders: Sequence[Path], path: Path, jobs: Sequence[JobConfig] | None = None) -> None:
    """Write the report of one run, or a comparison of several runs, to `path`. Raises `RunFolderError` and
    OSError."""
    names, jobs = _names(folders), jobs or [*map(reading.job_of, folders)]
    data = {
        "title": ", ".join(names),
        "made": f"Report of {datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "runs": [_run(*each) for each in zip(names, folders, jobs, strict=True)],
        "differences": differences([job.model_dump(mode="json") for job in jobs]),
    }
    write_whole(path, _one_file(data).encode())


def differences(contents: Sequence[Json]) -> list[Json]:
    """Return the fields in which jobs differ, each with its values as YAML. `job` and `run_dir` are
    omitted."""
    leaves = [dict(leaves_of(JobConfig, content)) for content in contents]
    told = [dict(leaves_of(JobConfig, shown(content, JobConfig))) for content in contents]
    fields = sorted({name for each in leaves for name in each} - {"job", "run_dir"})
    return [
        {"field": name, "values": [dump_yaml(each.get(name)).removesuffix("...\n").strip() for each in told]}
        for name in fields
        if any(each.get(name) != leaves[0].get(name) for each in leaves)
    ]


def _names(folders: Sequence[Path]) -> list[str]:
    """Return names that distinguish runs: the folder names, with their parent folders if needed."""
    names = [folder.name for folder in folders]
    if len(set(names)) < len(names):
        names = [f"{folder.parent.name}/{folder.name}" for folder in folders]
    return [name if names.index(name) == i else f"{name} ({i + 1})" for i, name in enumerate(names)]


def _run(name: str, folder: Path, job: JobConfig) -> Json:
    rows, _ = rows_of(as_it_became(read_run_log(folder / reading.RECORDS)))
    overview = reading.overview(folder, job)
    return {"name": name, "overview": overview, "rows": thinned(rows, MOST_ROWS), "samples": _samples(folder)}


def _samples(folder: Path) -> list[Json]:
    files, kept, left = reading.list_samples(folder), [], SAMPLE_BYTES
    count = min(MOST_FILES, len(files))
    for index in sorted({round(i * (len(files) - 1) / max(1, count - 1)) for i in range(count)}):
        file, episodes = files[index], []
        with suppress(UnknownName):
            for episode in reading.episodes_in(folder, file["key"])[:MOST_EPISODES]:
                size = len(msgspec.json.encode(episode))
                if size <= left:
                    left -= size
                    episodes.append(episode)
        if episodes:
            kept.append({**file, "episodes": episodes})
    return kept


def _one_file(data: Any) -> str:
    """Return the page as one file that contains its scripts, styles and data."""
    hashes: dict[str, list[str]] = {"script": [], "style": []}

    def inside(match: re.Match[str]) -> str:
        kind, name = ("style", match["css"]) if match["css"] else ("script", match["js"])
        assert name in STATIC
        content = static_text(name)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        hashes[kind].append(f"'sha256-{digest}'")
        return f"<{kind}>{content}</{kind}>"

    # `<` is escaped, because it could close the script element or begin a comment in it.
    encoded = msgspec.json.encode(data).decode()
    encoded = encoded.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    block = f'<script id="data" type="application/json">{encoded}</script>'
    head, _, body = static_text("index.html").partition("</main>")
    page = f"{LINKED.sub(inside, head)}</main>\n{block}{LINKED.sub(inside, body)}"
    policy = (
        f"default-src 'none'; script-src {' '.join(hashes['script'])}; "
        f"style-src {' '.join(hashes['style'])}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    charset = '<meta charset="utf-8">'
    return page.replace(
        charset, f'{charset}\n<meta http-equiv="Content-Security-Policy" content="{policy}">', 1
    )
