"""docs/metrics.md lists the series that the code declares: no more, no fewer."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_every_series_is_documented_and_every_documented_series_exists():
    sources = [path for path in ROOT.glob("*_*/**/metrics.py") if "tests" not in path.parts]
    declared = names("\n".join(re.findall(r'"(areal_[a-z_]+)"', "\n".join(map(Path.read_text, sources)))))
    assert names((ROOT / "docs" / "metrics.md").read_text()) == declared


def names(text):
    """Series as declared: the client library adds `_total` to a counter by itself."""
    found = re.findall(r"\bareal_[a-z]+_[a-z_]+", text)
    return {name.removesuffix("_total") for name in found} - {"areal_async"}
