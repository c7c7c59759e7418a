"""The picture of the terminal shows what a real program drew, in its order."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.waiting import LIMIT_S

pytest.importorskip("pyte")
RECORDING = Path(__file__).parents[2] / "docs" / "theme" / "recording.py"
PROGRAM = """
import sys, time
print("head < line")
for step in range(3):
    print(f"\\r\\033[1;32mstep {step}\\033[0m", end="", flush=True)
    time.sleep(0.25)
print("\\rdone  ", sys.stdout.isatty())
"""


def test_a_program_is_recorded_and_drawn(tmp_path: Path) -> None:
    cast, picture = tmp_path / "run.cast", tmp_path / "terminal.svg"
    for words in (
        ["record", str(cast), "--", sys.executable, "-c", PROGRAM],
        ["draw", str(cast), str(picture), "--seconds", "6"],
    ):
        subprocess.run([sys.executable, str(RECORDING), *words], check=True, timeout=LIMIT_S)
    texts = ["".join(each.itertext()) for each in ET.parse(picture).iter("{http://www.w3.org/2000/svg}text")]
    drawn = [text for text in texts if text.startswith(("head", "step", "done"))]
    assert (drawn[0], drawn[-1]) == ("head < line", "done   True")
    assert drawn[1:-1] == sorted(
        set(drawn[1:-1]) & {"step 0", "step 1", "step 2"}
    )  # some may have stood too shortly
