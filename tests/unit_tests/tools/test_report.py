"""The report of a run: what is counted, and that a browser shows it."""

import json
import re
import shutil
import subprocess

import pytest

from megatron.core.dist_checkpointing import Lineage, Segment
from megatron.training.reporting.run_record import RunRecord, read_record
from tools import report

SAVE = {"blocking": 0.5, "staging": 1.0, "writing": 3.0, "commit": 0.25, "total": 3.5}
POINTS = {f"save-{name}-time": seconds for name, seconds in SAVE.items()} | {
    "save-gigabytes": 0.002
}


class Clock:
    """A clock that the test moves."""

    def __init__(self, now):
        self.now = now

    def __call__(self):
        return self.now


def start(root, began, first, loaded, intervals, end):
    """A start that is ready 5 seconds after it began and then trains intervals of 10 iterations in
    20 seconds each.
    """
    clock = Clock(began)
    record = RunRecord(root, clock)
    clock.now += 5
    record.write(
        "start", began=began, iteration=first, loaded=loaded, layout=f"TP {1 + first}", train_iters=60,
        command=["pretrain_gpt.py", "</script><b>"], summary={"model": "2 layers", "parameters": "5M, all"},
    )  # fmt: skip
    for index in range(intervals):
        clock.now += 20
        last = first + 10 * (index + 1)
        record.write(
            "interval",
            iteration=last,
            iterations=10,
            seconds=20.0,
            lm_loss=5 - last / 20,
            tokens_per_second=100,
        )
    record.write("point", iteration=last, values={"lm loss validation": 4.5} | POINTS)
    if end:
        clock.now += 1
        record.write("end", iteration=last, reason=end, failed=False)


@pytest.fixture
def run(tmp_path):
    """Three starts: killed at iteration 30, then from 10 to 40, then from there to 60."""
    start(tmp_path, 1000, 0, None, 3, None)  # until 1065
    start(tmp_path, 1100, 10, "run/iter_0000010", 3, "complete")  # until 1166
    start(tmp_path, 1200, 40, "run/iter_0000040", 2, "complete")  # until 1246
    lineages = {
        30: (None, Lineage((Segment(1, 30),))),
        40: (10, Lineage((Segment(1, 10), Segment(2, 40)))),
    }
    for iteration, (parent, lineage) in lineages.items():
        directory = tmp_path / f"iter_{iteration:07d}"
        directory.mkdir()
        (directory / "data.bin").write_bytes(bytes(1000))
        (directory / "lineage.json").write_bytes(lineage.encode(parent))
    return tmp_path


def test_goodput(run):
    starts = read_record(run)
    assert report.find_kept_iterations(starts)[:2] == [10, 40]
    starts[1].start["loading"] = 2.0
    starts[1].points.append({"values": {"local-save-blocking-time": 0.25}, "time": 0.0})
    assert report.compute_goodput(starts) == {
        "training": 20.0 + 60.0 + 40.0,
        "done again later": 40.0,
        "held up by saves": 1.5 + 0.25,
        "loading": 2.0,
        "starting": 15.0 - 2.0,
        "between starts": 35.0 + 34.0,
        "evaluation and other": pytest.approx(246 - 120 - 40 - 1.75 - 15 - 69),
    }


def test_facts_of_launches_and_checkpoints(run):
    facts = report.collect_facts(run, verify_checkpoints=False)
    first, second, _ = facts["launches"]
    assert (
        first["loss"] == [(10, 4.5), (20, 4.0), (30, 3.5)]
        and first["kept"] == 10
        and first["failed"]
    )
    assert second["first"] == 10 and second["validation"] == [(40, 4.5)] and not second["failed"]
    stages = {
        "copy to host memory": 1.0,
        "write": 2.0,
        "commit": 0.5,
        "training waited": 0.5,
        "bytes": 2e6,
    }
    assert second["saves"] == [(40, stages)]
    rows = {row["iteration"]: row for row in facts["checkpoints"]}
    assert (rows[30]["launch"], rows[30]["parent"], rows[30]["branch"]) == (
        1,
        "random weights",
        "left",
    )
    assert (rows[40]["launch"], rows[40]["parent"], rows[40]["layout"]) == (
        2,
        "iter_0000010",
        "TP 11",
    )
    assert rows[40]["branch"] == "current" and rows[40]["bytes"] > 1000
    assert rows[40]["state"] == "it is not complete"


@pytest.mark.parametrize(
    ("tracker", "branch"), [("30", "left"), ("40", "current"), ("garbled", "current")]
)
def test_tracker_selects_the_current_branch(run, tracker, branch):
    (run / "latest_checkpointed_iteration.txt").write_text(tracker)
    rows = {
        row["iteration"]: row
        for row in report.collect_facts(run, verify_checkpoints=False)["checkpoints"]
    }
    assert rows[40]["branch"] == branch and rows[30]["branch"] == (
        "left" if branch == "current" else "current"
    )


def test_long_curves_are_averaged(run, monkeypatch):
    monkeypatch.setattr(report, "MAX_POINTS", 2)
    assert report.collect_facts(run, verify_checkpoints=False)["launches"][0]["loss"] == [
        (20, 4.25),
        (30, 3.5),
    ]


def test_directory_without_a_record_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="no record of a run"):
        report.collect_facts(tmp_path, verify_checkpoints=False)


def test_page_loads_nothing_over_the_network(run, capsys):
    assert report.main([str(run)]) == 0
    html = (run / "report.html").read_text()
    assert "default-src 'none'" in html
    assert not re.findall(
        r"""(?:src|href)=["'](?!data:)|url\(|@import|https?://(?!www\.w3\.org/2000/svg)""", html
    )
    assert html.count("</script>") == 1  # the one of the command is escaped
    assert json.loads(re.search(r"^const run = (.*);$", html, re.MULTILINE)[1])["train_iters"] == 60


BROWSER = shutil.which("chromium")


needs_browser = pytest.mark.skipif(
    BROWSER is None, reason="no chromium on this machine (Debian: apt-get install chromium)"
)


def open_in_browser(page, profile, width):
    """Return the page after its script has run, and the messages of the browser's console."""
    command = [
        BROWSER,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        "--dump-dom",
        f"--user-data-dir={profile}",
        f"--window-size={width},2000",
        f"file://{page}",
    ]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert shown.returncode == 0, shown.stderr
    return shown.stdout, [line for line in shown.stderr.splitlines() if "CONSOLE" in line]


@needs_browser
@pytest.mark.parametrize("width", [500, 1280])
def test_browser_draws_the_page_without_errors(run, tmp_path_factory, width):
    output = tmp_path_factory.mktemp("browser")
    report.main([str(run), "--output", str(output / "report.html")])
    html, console = open_in_browser(output / "report.html", output / "profile", width)
    assert not console, console
    assert html.count("<svg") == 3 and html.count("<table") == 2
    assert html.count('stroke-dasharray="5 4"') == 2  # repeated iterations, in two charts
    widths = [int(text) for text in re.findall(r'viewBox="0 0 (\d+)', html)]
    assert len(widths) == 3 and max(widths) <= width and max(widths) > 0.6 * min(width, 1160)


MEASURE_OVERFLOW = """<script>
const find = selector => [...document.querySelectorAll(selector)];
const boxes = find(".scroll, .tile, .legend");
document.body.dataset.overflow = boxes.filter(box => box.scrollWidth > box.clientWidth).length;
document.body.dataset.legend = Math.max(...find(".legend").map(legend => legend.clientHeight));
</script></body>"""


@needs_browser
@pytest.mark.parametrize("width", [1280, 1920])
def test_many_launches_of_a_long_layout_fit_the_page(tmp_path, width):
    """No column of a table is cut off, and the legends stay small."""
    layout = "TP 2 x PP 4 (2 chunks) x DP 16, experts ETP 1 x EP 8 x DP 4, sequence parallel, "
    error = "DistBackendError: NCCL error in: /opt/pytorch/torch/csrc/ProcessGroupNCCL.cpp:3690, "
    for number in range(18):
        first = 10_000 * number
        clock = Clock(1.8e9 + first)
        record = RunRecord(tmp_path, clock)
        record.write(
            "start", began=clock.now, iteration=first, loaded=None, train_iters=200_000,
            layout=layout + "distributed optimizer", command=[], summary={},
        )  # fmt: skip
        last = first + 10_000
        record.write("interval", iteration=last, iterations=10_000, seconds=20.0, lm_loss=2.5)
        record.write("point", iteration=last, values=POINTS)
        record.write("end", iteration=last, reason=error * 4, failed=True)
        directory = tmp_path / f"iter_{last:07d}"
        directory.mkdir()
        (directory / "data.bin").write_bytes(bytes(1000))
    report.main([str(tmp_path)])
    page = tmp_path / "report.html"
    page.write_text(page.read_text().replace("</body>", MEASURE_OVERFLOW))
    html, console = open_in_browser(page, tmp_path / "profile", width)
    assert not console, console
    assert 'data-overflow="0"' in html
    assert int(re.search(r'data-legend="(\d+)"', html)[1]) < 60
