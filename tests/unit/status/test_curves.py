import numpy as np
from matplotlib.image import imread

from areal_async.status.curves import draw_curves, field, ratio, rolling_mean, series


def run(steps, scale=1.0):
    for step in range(steps):
        yield {
            "kind": "step",
            "step": step,
            "version": step + 1,
            "reward_mean": scale * (0.4 + 0.3 * step / steps),
            "tokens": 4600,
            "step_s": 0.6,
            "busy_s": 0.5,
            "wait_s": 0.05,
            "staleness_mean": min(step, 2.5),
            "staleness_max": min(step, 4),
        }
        if step % 25 == 0:
            yield {"kind": "evaluation", "version": step, "accuracy": 0.4 + 0.3 * step / steps, "n": 500}


def colours(path):
    """The distinct colours of the page: a blank panel has few."""
    pixels = (imread(path)[..., :3] * 255).astype(int)
    return len(np.unique(pixels.reshape(-1, 3), axis=0))


def shape(path):
    return imread(path).shape[:2]


def test_an_rl_run_gives_a_page_of_four_panels(tmp_path):
    page = draw_curves(run(200), tmp_path / "curves.png", title="demo", max_staleness=4)
    height, width = shape(page)
    assert (width, height) == (1456, 962)
    assert colours(page) > 300


def test_a_supervised_run_gives_its_two_panels(tmp_path):
    records = [{"kind": "sft", "step": i, "loss": 2.0 / (i + 1), "accuracy": 0.01 * i} for i in range(40)]
    height, width = shape(draw_curves(records, tmp_path / "curves.png"))
    assert (width, height) == (1456, 507)


def test_an_evaluations_interval_is_drawn_as_a_band(tmp_path):
    def with_figures(record, width, samples=1):
        if record["kind"] != "evaluation":
            return record
        value = record["accuracy"]
        figures = {name: [value + up, value - width, value + width] for name, up in FIGURES}
        return {**record, **figures, "samples": samples}

    drawn = {
        name: imread(draw_curves([with_figures(r, *how) for r in run(200)], tmp_path / f"{name}.png"))
        for name, how in {"narrow": (0.001,), "wide": (0.2,), "several": (0.2, 4)}.items()
    }
    # Orange that is neither the line nor the page: the band.
    shaded = {name: int(is_band(pixels[..., :3]).sum()) for name, pixels in drawn.items()}
    assert shaded["wide"] > 10 * (shaded["narrow"] + 1)
    assert (drawn["several"] != drawn["wide"]).any()  # best@n and maj@n have lines of their own


FIGURES = [("mean", 0.0), ("best", 0.1), ("maj", 0.05)]


def is_band(pixels):
    """Orange at the band's opacity on white."""
    orange = np.array([0xD9, 0x78, 0x1E]) / 255
    return (np.abs(pixels - (0.18 * orange + 0.82)) < 0.01).all(-1)


def test_nothing_covers_the_line_of_the_staleness_bound(tmp_path):
    # Everywhere below the line there is a curve, so that a legend has no better place than on it.
    rng = np.random.default_rng(0)
    means, most = rng.uniform(0.3, 2.9, 650), rng.integers(1, 4, 650)
    records = [
        {"kind": "step", "step": step, "staleness_max": int(most[step]), "staleness_mean": means[step]}
        for step in range(650)
    ]
    page = imread(draw_curves(records, tmp_path / "curves.png", max_staleness=4))[..., :3]
    grey = np.abs(page - np.array([0x6B, 0x72, 0x80]) / 255).max(axis=2) < 0.02
    line = np.flatnonzero(grey[grey.sum(axis=1).argmax()])
    # Dashes at equal distances from one end to the other.
    assert line[-1] - line[0] > 0.8 * page.shape[1]
    assert np.diff(line).max() < 12


def test_any_part_of_a_run_can_be_drawn(tmp_path):
    whole = list(run(30))
    cases = {
        "nothing": [],
        "first step only": whole[:1],
        "an evaluation only": [{"kind": "evaluation", "version": 0, "accuracy": 0.4}],
        "one task, no interval": [{"kind": "evaluation", "version": 0, "mean": [0.4, None, None]}],
        "rewards beyond one": list(run(30, scale=-5.0)),
        "nulls": [{**record, "reward_mean": None, "staleness_mean": None} for record in whole],
        "unknown kinds": [{"kind": "something else", "x": 1}],
        "bare steps": [{"kind": "step", "step": 3}],
        "zero seconds": [{**record, "step_s": 0.0} for record in whole],
        "an accuracy without a number": [{"kind": "sft", "step": 1, "accuracy": float("nan")}],
    }
    for name, records in cases.items():
        path = draw_curves(records, tmp_path / f"{name}.png", max_staleness=0)
        assert path.stat().st_size > 1000, name


def test_series_are_sorted_and_skip_what_has_no_number():
    records = [
        {"kind": "step", "step": 2, "loss": 0.2},
        {"kind": "step", "step": 1, "loss": 0.1},
        {"kind": "step", "step": 3, "loss": None},
        {"kind": "step", "loss": 0.4},
        {"kind": "sft", "step": 4, "loss": 0.5},
    ]
    x, y = series(records, "step", "step", field("loss"))
    assert (x.tolist(), y.tolist()) == ([1.0, 2.0], [0.1, 0.2])


def test_a_ratio_needs_both_numbers():
    value = ratio("tokens", "step_s")
    assert value({"tokens": 10, "step_s": 4}) == 2.5
    assert value({"tokens": 10, "step_s": 0}) is None
    assert value({"tokens": 10}) is None


def test_a_rolling_mean_keeps_length_and_mean_of_a_constant():
    assert rolling_mean(np.arange(5.0), 3).tolist() == [0.5, 1.0, 2.0, 3.0, 3.5]
    assert rolling_mean(np.full(7, 2.0), 4).tolist() == [2.0] * 7
    assert rolling_mean(np.array([]), 3).tolist() == []
