import io
import shlex
import threading

from rich.console import Console

from areal_async.show.progress import progress, progress_line, track


class Paper(io.StringIO):
    """What is printed; `told` is set by its first line."""

    def __init__(self):
        super().__init__()
        self.told = threading.Event()

    def write(self, text):
        count = super().write(text)
        if "\n" in text:
            self.told.set()
        return count


def test_a_line_says_how_far_it_is_and_what_is_left():
    line = progress_line("train of gsm8k", 300, 1200, 30.0)
    assert dict(pair.split("=") for pair in shlex.split(line)) == {
        "doing": "train of gsm8k",
        "time": "0:30",
        "done": "300/1200",
        "left": "1:30",
    }
    assert progress_line("rows", 0, 10, 1.0) == "doing=rows time=0:01 done=0/10"
    assert progress_line("rows", 7, None, 1.0) == "doing=rows time=0:01 done=7"
    assert progress_line("loading", 0, None, 61.0) == "doing=loading time=1:01"


def test_without_a_terminal_work_of_any_kind_is_told_now_and_then(monkeypatch):
    monkeypatch.setattr("areal_async.show.progress.EVERY_S", 0.01)
    paper = Paper()
    with progress("reading a checkpoint", console=Console(file=paper)):
        assert paper.told.wait(10), "though the work itself says nothing"
    assert paper.getvalue().startswith('doing="reading a checkpoint" time=0:00\n')
    paper = Paper()
    with progress("rows", 4, console=Console(file=paper)) as advance:
        advance()
        assert paper.told.wait(10)
    assert paper.getvalue().startswith("doing=rows time=0:00 done=1/4 left=0:00\n")


def test_short_work_says_nothing_and_a_terminal_keeps_nothing_of_a_bar(capsys):
    assert [*track(iter("abc"), "letters")] == ["a", "b", "c"]
    assert capsys.readouterr() == ("", "")
    paper = io.StringIO()
    with progress("rows [b]", 2, console=Console(file=paper, force_terminal=True, width=80)) as advance:
        advance()
        advance()
    assert "rows [b]" in paper.getvalue()
    assert "2/2" in paper.getvalue()
    assert paper.getvalue().endswith("\x1b[2K"), "the last thing done is to wipe the line"
