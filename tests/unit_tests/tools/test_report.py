"""The report of a run: its numbers, its verdict, and its page in a browser."""

import http.client
import json
import re
import shutil
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request

import pytest

from megatron.commands.reporting import ReportServer
from megatron.core.dist_checkpointing import Lineage, Segment
from megatron.training.reporting import run_report
from megatron.training.reporting.recorded_launches import (
    compute_goodput,
    find_kept_iterations,
    read_record,
)
from megatron.training.reporting.run_record import RunRecord, failed_launch_recorded
from megatron.training.reporting.run_report import (
    PAGE,
    SAVE_SIZE,
    collect_facts,
)
from megatron.training.reporting.verdict import make_verdict
from tests import ROOT
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


def start(root, began, first, loaded, intervals, end, **fields):
    """A launch that is ready 5 seconds after it began and then trains intervals of 10 iterations
    in 20 seconds each.
    """
    clock = Clock(began)
    record = RunRecord(root, clock)
    clock.now += 5
    record.write(
        "start", began=began, iteration=first, loaded=loaded, layout=f"TP {1 + first}", train_iters=60,
        command=["pretrain_gpt.py", "</script><b>", "--load", "x"],
        summary={"model": "2 layers", "parameters": "5M, all"}, **fields,
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
            grad_norm=1.0 + last,
            learning_rate=1e-3,
            loss_scale=2.0**last,
            max_memory_bytes=1e9,
            max_load_over_mean=1.25,
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
    assert find_kept_iterations(starts)[:2] == [10, 40]
    starts[1].start["loading"] = 2.0
    starts[1].points.append({"values": {"local-save-blocking-time": 0.25}, "time": 0.0})
    assert compute_goodput(starts) == {
        "training": 20.0 + 60.0 + 40.0,
        "done again later": 40.0,
        "held up by saves": 1.5 + 0.25,
        "loading": 2.0,
        "starting": 15.0 - 2.0,
        "between starts": 35.0 + 34.0,
        "evaluation and other": pytest.approx(246 - 120 - 40 - 1.75 - 15 - 69),
    }


def test_facts_of_launches_and_checkpoints(run):
    (facts,) = collect_facts([run], verify_checkpoints=False)["runs"]
    first, second, _ = facts["launches"]
    assert first["curves"]["lm_loss"] == [(10, 4.5), (20, 4.0), (30, 3.5)]
    assert first["kept"] == 10
    assert first["failed"]
    assert second["first"] == 10
    assert second["validation"] == [(40, 4.5)]
    assert not second["failed"]
    stages = {
        "copy to host memory": 1.0,
        "write": 2.0,
        "commit": 0.5,
        "training lost": 0.5,
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
    assert rows[40]["branch"] == "current"
    assert rows[40]["bytes"] > 1000
    assert rows[40]["state"] == "it is not complete"
    assert not rows[40]["usable"]
    assert rows[40]["validation"] == 4.5
    assert rows[30]["validation"] == 4.5
    assert rows[40]["resume"] == (f"pretrain_gpt.py '</script><b>' --load {run} --ckpt-step 40")
    assert second["curves"]["grad_norm"] == [(20, 21.0), (30, 31.0), (40, 41.0)]


@pytest.mark.parametrize(
    ("tracker", "branch"), [("30", "left"), ("40", "current"), ("garbled", "current")]
)
def test_tracker_selects_the_current_branch(run, tracker, branch):
    (run / "latest_checkpointed_iteration.txt").write_text(tracker)
    rows = {
        row["iteration"]: row
        for row in collect_facts([run], verify_checkpoints=False)["runs"][0]["checkpoints"]
    }
    assert rows[40]["branch"] == branch
    assert rows[30]["branch"] == ("left" if branch == "current" else "current")


def test_long_curves_are_averaged(run, monkeypatch):
    monkeypatch.setattr(run_report, "MAX_POINTS", 2)
    (facts,) = collect_facts([run], verify_checkpoints=False)["runs"]
    assert facts["launches"][0]["curves"]["lm_loss"] == [(20, 4.25), (30, 3.5)]


def write_intervals(root, rows, first=0, **fields):
    """Record a launch with an interval for each (last iteration, number of iterations, loss)."""
    clock = Clock(1000.0 + first)
    record = RunRecord(root, clock)
    record.write("start", began=clock.now, iteration=first, train_iters=60, **fields)
    for iteration, iterations, loss in rows:
        clock.now += 1
        record.write(
            "interval", iteration=iteration, iterations=iterations, seconds=1.0 * iterations,
            lm_loss=loss, tokens_per_second=100.0 * iterations, tflops_per_gpu=40.0 * iterations,
        )  # fmt: skip
    return record


def test_curve_has_no_kink_where_a_launch_logs_its_first_iteration_alone(tmp_path):
    """Nor where it ends between two lines."""
    write_intervals(tmp_path, [(11, 1, 9.0), (20, 9, 4.0), (30, 10, 3.0), (32, 2, 9.0)], first=10)
    (facts,) = collect_facts([tmp_path], False)["runs"]
    curves = facts["launches"][0]["curves"]
    losses, speeds = dict(curves["lm_loss"]), dict(curves["tokens_per_second"])
    assert losses == pytest.approx({20: 4.5, 32: 4.0})
    assert speeds == pytest.approx({20: 820.0, 32: 10400 / 12})


def test_single_interval_of_a_launch_is_a_curve(tmp_path):
    write_intervals(tmp_path, [(1, 1, 9.0)])
    (facts,) = collect_facts([tmp_path], False)["runs"]
    assert facts["launches"][0]["curves"]["lm_loss"] == [(1, 9.0)]


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H100 80GB HBM3 with 85 GB on every rank", 989),
        ("NVIDIA H100 PCIe with 85 GB on every rank", 756),
        ("NVIDIA H200 with 151 GB on every rank", 989),
        ("NVIDIA H20 with 103 GB on every rank", 148),
        ("CPU, 4 threads on every rank", None),
    ],
)
def test_speed_of_a_launch(tmp_path, device, peak):
    """Without its first interval, which includes compilation."""
    rows = [(1, 1, 9.0), (10, 9, 4.0), (20, 10, 3.0)]
    write_intervals(tmp_path, rows, summary={"device": device})
    (facts,) = collect_facts([tmp_path], False)["runs"]
    tflops = 40 * (81 + 100) / 19
    assert facts["launches"][0]["speed"] == {
        "tokens_per_second": pytest.approx(100 * (81 + 100) / 19),
        "tflops": pytest.approx(tflops),
        "mfu": None if peak is None else pytest.approx(tflops / peak),
    }


def test_speed_of_a_launch_without_intervals(tmp_path):
    write_intervals(tmp_path, [])
    (facts,) = collect_facts([tmp_path], False)["runs"]
    speed = facts["launches"][0]["speed"]
    assert speed == {"tokens_per_second": None, "tflops": None, "mfu": None}


def test_page_draws_every_phase_of_a_save():
    script = (PAGE / "script.js").read_text()
    phases = run_report.split_save_time(dict.fromkeys((*run_report.SAVE_TIMES, SAVE_SIZE), 1.0))
    assert [name for name in phases if f'"{name}"' not in script and f".{name}" not in script] == []


def test_directory_without_a_record_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="no record of a run"):
        collect_facts([tmp_path], verify_checkpoints=False)


def test_changes_between_launches(tmp_path):
    flags = {"lr": "0.003", "seed": "1"}
    start(tmp_path, 1000, 0, None, 3, "end", arguments=flags, world_size=2, host="a")
    flags = {"lr": "0.001", "seed": "1", "new": "x"}
    start(tmp_path, 2000, 30, "x", 3, "end", arguments=flags, world_size=1, host="a")
    first, second = collect_facts([tmp_path], False)["runs"][0]["launches"]
    assert first["changes"] == []
    assert second["changes"] == ["--lr 0.003 -> 0.001", "ranks 2 -> 1"]


def test_failed_launches_are_listed(run):
    command = ["pretrain_gpt.py", "--lr", "x"]
    with pytest.raises(ValueError, match="--lr"), failed_launch_recorded(run, command):
        raise ValueError("--lr is not a number: x")
    (failed,) = collect_facts([run], False)["runs"][0]["failed"]
    assert failed["reason"] == "--lr is not a number: x"


def verdict_of(run, now=1250.0, checkpoints=(), goodput=None):
    launches = read_record(run)
    goodput = goodput or compute_goodput(launches)
    return [tuple(row.values()) for row in make_verdict(launches, 60, checkpoints, goodput, now)]


def test_verdict_of_a_complete_run(run):
    usable = {"iteration": 60, "usable": True}
    damaged = {"iteration": 40, "usable": False}
    verdict = verdict_of(run, checkpoints=[usable], goodput={"training": 95.0, "loading": 5.0})
    assert verdict == [
        ("good", "Finished: all 60 iterations."),
        ("good", "All losses are finite; no iteration was skipped."),
        ("good", "Training loss 2.000, -20.00% over the last 10% of it."),
        ("good", "Newest usable checkpoint: iteration 60; all 1 are usable."),
        ("good", "95% of the time was productive training; most was lost by: loading 5.0 s."),
    ]
    verdict = verdict_of(run, checkpoints=[usable, damaged])
    assert verdict[3] == (
        "warn",
        "Newest usable checkpoint: iteration 60; 1 of 2 are not usable.",
    )
    assert verdict[4] == (
        "warn",
        "49% of the time was productive training; most was lost by: time between launches 69.0 s, "
        "iterations repeated later 40.0 s.",
    )
    assert verdict_of(run, checkpoints=[damaged])[3] == (
        "bad",
        "None of 1 checkpoints is usable.",
    )


@pytest.mark.parametrize(
    ("end", "now", "expected"),
    [
        (None, 1100.0, ("good", "Running: iteration 20 of 60.")),
        (
            None,
            1_000_000.0,
            (
                "bad",
                "Killed or hanging: no end is recorded, and the last line, at iteration 20 of 60, "
                "is 11.6 days old.",
            ),
        ),
        ("signal", 0.0, ("warn", "Ended early at iteration 20 of 60: signal")),
    ],
)
def test_verdict_of_an_incomplete_run(tmp_path, end, now, expected):
    start(tmp_path, 1000, 0, None, 2, end)
    assert verdict_of(tmp_path, now)[0] == expected


def test_verdict_of_a_constant_loss(tmp_path):
    record = RunRecord(tmp_path, Clock(1000.0))
    record.write("start", began=1000.0, iteration=0, train_iters=60)
    for iteration in range(1, 61):
        loss = 2.0 - 1e-6 * iteration
        record.write("interval", iteration=iteration, iterations=1, seconds=1.0, lm_loss=loss)
    assert verdict_of(tmp_path)[2] == (
        "good",
        "Training loss 2.000, unchanged over the last 10% of it.",
    )


def test_verdict_of_a_run_with_nan(tmp_path):
    clock = Clock(1000.0)
    record = RunRecord(tmp_path, clock)
    record.write("start", began=1000.0, iteration=0, train_iters=60)
    fields = {"iterations": 10, "seconds": 1.0, "lm_loss": float("nan")}
    record.write("interval", iteration=10, **fields, nan=0, skipped=2)
    assert verdict_of(tmp_path)[1] == ("warn", "All losses are finite; skipped iterations: 2.")
    record.write("interval", iteration=20, **fields, nan=3, skipped=1)
    record.write("end", iteration=20, reason="NotFiniteError", failed=True)
    verdict = verdict_of(tmp_path)
    assert verdict[0] == ("bad", "Failed at iteration 20 of 60: NotFiniteError")
    assert verdict[1] == ("bad", "Losses that are not finite: 3; skipped iterations: 3.")


def noisy_losses(num_points):
    """Return (iteration, iterations, loss) of a falling curve with noise."""
    return [(n, 1, 4.0 - 0.01 * n + 0.02 * (n % 3)) for n in range(1, num_points + 1)]


@pytest.mark.parametrize(
    ("spikes", "expected"),
    [
        ({}, None),
        (
            {30: 6.0, 31: 7.0, 40: 5.0},
            ("warn", "Loss spikes: 2; the largest from 3.825 to 7.000, at iterations 30 to 31."),
        ),
        (
            {59: 8.0, 60: 6.0},
            (
                "bad",
                "Loss spikes: 1; the largest from 3.535 to 8.000, at iterations 59 to 60. The loss "
                "has not come down since iteration 59.",
            ),
        ),
        (
            {30: 9.0, 59: 8.0, 60: 6.0},
            (
                "bad",
                "Loss spikes: 2; the largest from 3.825 to 9.000, at iteration 30. The loss has "
                "not come down since iteration 59.",
            ),
        ),
    ],
)
def test_verdict_of_loss_spikes(tmp_path, spikes, expected):
    rows = [(n, count, spikes.get(n, loss)) for n, count, loss in noisy_losses(60)]
    write_intervals(tmp_path, rows)
    sentences = [row for row in verdict_of(tmp_path) if row[1].startswith("Loss spikes")]
    assert sentences == ([] if expected is None else [expected])


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ([(3, 1.5), (3, 1.4), (0, 1.1)], "Rank 3 is slow: it works 1.45 times as long"),
        ([(3, 1.5), (1, 1.4), (0, 1.3)], "No rank is permanently slower"),
        ([(3, 1.1), (3, 1.1), (3, 1.1)], "No rank is permanently slower"),
    ],
)
def test_verdict_of_slow_ranks(tmp_path, ratios, expected):
    record = write_intervals(tmp_path, noisy_losses(3))
    for iteration, (rank, ratio) in enumerate(ratios):
        values = {"slowest-rank": rank, "slowest-rank-ratio": ratio}
        record.write("point", iteration=iteration, values=values)
    assert sum(text.startswith(expected) for _, text in verdict_of(tmp_path)) == 1


@pytest.mark.parametrize(("waited", "count"), [(0.04, 0), (0.25, 1)])
def test_verdict_of_input_waits(tmp_path, waited, count):
    """The first interval, in which workers start, does not count."""
    record = write_intervals(tmp_path, [])
    for iteration, seconds in ((1, 9.0), (2, waited), (3, waited)):
        record.write(
            "interval", iteration=iteration, iterations=1, seconds=1.0, input_seconds=seconds,
            input_rank=5,
        )  # fmt: skip
    text = "25% of the training time was spent waiting for data, longest on rank 5"
    assert sum(sentence.startswith(text) for _, sentence in verdict_of(tmp_path)) == count


def test_comparison_of_runs(tmp_path, capsys):
    for name, lr in (("one", "0.003"), ("two", "0.001")):
        (tmp_path / name).mkdir()
        start(tmp_path / name, 1000, 0, None, 3, "end", arguments={"lr": lr, "seed": "1"})
    roots = [tmp_path / "one", tmp_path / "two"]
    facts = collect_facts(roots, False)
    assert facts["differences"] == [["--lr", "0.003", "0.001"]]
    output = tmp_path / "page.html"
    paths = [str(root) for root in roots]
    assert report.main([*paths, "--compare", "--output", str(output)]) == 0
    assert output.exists()
    with pytest.raises(SystemExit):
        report.main(paths)
    assert "--compare and two or more runs go together" in capsys.readouterr().err


def test_served_page_shows_the_run_in_progress(run):
    command = [sys.executable, str(ROOT / "tools/report.py"), str(run), "--serve", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        address = re.search(r"http://127.0.0.1:\d+", server.stdout.readline())[0]
        before = urllib.request.urlopen(address, timeout=60).read().decode()
        start(run, 2000, 60, "run/iter_0000060", 1, None)
        after = urllib.request.urlopen(address, timeout=60).read().decode()
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{address}/runs", timeout=60)
        # A browser that shows an error reloads, too: the file may be repaired.
        damaged = run / "runs/20990101T000000-000000.jsonl"
        damaged.write_text('{"kind": "start", "time": "yesterday"}\n')
        with pytest.raises(urllib.error.HTTPError, match="500") as failed:
            urllib.request.urlopen(address, timeout=60)
        assert failed.value.headers["Refresh"] == "15"
        assert failed.value.read().startswith(b"error: ")
    finally:
        server.terminate()
        server.wait()
    assert [len(read_facts(page)["launches"]) for page in (before, after)] == [3, 4]
    assert '<meta http-equiv="refresh" content="15">' in after


def test_serve_waits_for_the_first_record(tmp_path):
    run = tmp_path / "run"
    command = [sys.executable, str(ROOT / "tools/report.py"), str(run), "--serve", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert f"waiting for the first record: {run}: no record" in server.stdout.readline()
        address = re.search(r"http://127.0.0.1:\d+", server.stdout.readline())[0]
        with pytest.raises(urllib.error.HTTPError, match="503") as waiting:
            urllib.request.urlopen(address, timeout=60)
        assert waiting.value.headers["Refresh"] == "15"
        assert waiting.value.read().startswith(b"waiting for the first record: ")
        run.mkdir()
        start(run, 1000, 0, None, 1, None)
        page = urllib.request.urlopen(address, timeout=60).read().decode()
    finally:
        server.terminate()
        server.wait()
    assert len(read_facts(page)["launches"]) == 1


def read_facts(page):
    return json.loads(re.search(r"^const facts = (.*);$", page, re.MULTILINE)[1])["runs"][0]


def relative_luminance(color):
    """Return the relative luminance as defined by WCAG 2."""
    channels = []
    for index in (1, 3, 5):
        value = int(color[index : index + 2], 16) / 255
        channels.append(value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4)
    return 0.2126 * channels[0] + 0.7152 * channels[1] + 0.0722 * channels[2]


def test_colors_of_both_themes_have_enough_contrast():
    light, dark = (PAGE / "style.css").read_text().split("prefers-color-scheme: dark")
    for theme in (light, dark):
        colors = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", theme))
        for name, color in colors.items():
            if name in ("card", "line", "paper", "spent-copy", "spent-commit"):
                continue
            pair = sorted([relative_luminance(color), relative_luminance(colors["paper"])])
            contrast = (pair[1] + 0.05) / (pair[0] + 0.05)
            assert contrast >= 3, (name, color, contrast)


def test_page_loads_nothing_over_the_network(run, capsys):
    assert report.main([str(run)]) == 0
    html = (run / "report.html").read_text()
    assert "default-src 'none'" in html
    assert not re.findall(
        r"""(?:src|href)=["'](?!data:)|url\(|@import|https?://(?!www\.w3\.org/2000/svg)""", html
    )
    assert html.count("</script>") == 1  # the one of the command is escaped
    assert read_facts(html)["train_iters"] == 60


BROWSER = shutil.which("chromium")


needs_browser = pytest.mark.skipif(
    BROWSER is None, reason="no chromium on this machine (Debian: apt-get install chromium)"
)


# Reports the layout of the page to the wrapper: elements whose content is cut off, texts of charts
# that overlap each other or leave the image, and what was drawn.
MEASURE = """<script>
const find = selector => [...document.querySelectorAll(selector)];
const name = node => `${node.tagName} ${node.className.baseVal ?? node.className}: ${node.textContent.slice(0, 40)}`;
const cut = find("main, .verdict, .tile, .tile b, .legend, .scroll, .controls, h1, h2, dd, code")
  .filter(node => node.scrollWidth > node.clientWidth + 1 && getComputedStyle(node).display !== "inline").map(name);
const texts = [];
for (const image of find("svg")) {
  const frame = image.getBoundingClientRect();
  if (image.outerHTML.includes("NaN")) texts.push(`${image.ariaLabel} has an undefined value`);
  const boxes = [...image.querySelectorAll("text")].map(text => [text.textContent, text.getBoundingClientRect()]);
  boxes.forEach(([text, box], n) => {
    if (box.left < frame.left - 1 || box.right > frame.right + 1) texts.push(`${text} leaves the image`);
    for (const [other, place] of boxes.slice(n + 1)) {
      const isApart = box.right <= place.left || place.right <= box.left || box.bottom <= place.top + 2 || place.bottom <= box.top + 2;
      if (!isApart) texts.push(`${text} overlaps ${other}`);
    }
  });
}
const body = getComputedStyle(document.body).backgroundColor;
const width = document.documentElement.scrollWidth;
const counts = { svg: find("svg").length, table: find("table").length, repeated: find(".repeated").length };
const countLines = node => {
  const range = document.createRange();
  range.selectNodeContents(node);
  return new Set([...range.getClientRects()].map(box => Math.round(box.top))).size;
};
const cells = find("td[data-name=began], td[data-name=host]").filter(node => countLines(node) > 1);
const verdicts = find(".verdict li").filter(node => node.clientHeight > 40);
const wrapped = [...cells, ...verdicts].map(name);
const legend = Math.max(...find(".legend").map(node => node.clientHeight));
parent.postMessage(JSON.stringify({ cut, texts, body, width, counts, legend, wrapped }), "*");
</script></body>"""

WRAPPER = """<!doctype html><body style="margin:0"><iframe src="measured.html" style="border:0;width:{width}px;height:6000px"></iframe>
<script>onmessage = event => {{ document.body.dataset.measured = event.data; }};</script></body>"""
BACKGROUND = {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 24, 31)"}
BLINK_SCHEME = {"dark": 0, "light": 1}


def run_browser(page, profile, width, theme, *arguments):
    command = [
        BROWSER,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--disable-background-networking",
        "--enable-logging=stderr",
        f"--blink-settings=preferredColorScheme={BLINK_SCHEME[theme]}",
        f"--user-data-dir={profile}",
        f"--window-size={width},1800",
        "--virtual-time-budget=5000",
        *arguments,
        page if isinstance(page, str) else f"file://{page}",
    ]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert shown.returncode == 0, shown.stderr
    console = [line for line in shown.stderr.splitlines() if "CONSOLE" in line]
    assert not console, console
    return shown.stdout


def measure(page, output, width, theme="light"):
    """Return the measurements of a page at a width in pixels."""
    measured = page.read_text().replace("</body>", MEASURE)
    (output / "measured.html").write_text(measured)
    (output / "wrapper.html").write_text(WRAPPER.format(width=width))
    # A window of a browser has a minimum width, which the frame in it does not have.
    shown = run_browser(
        output / "wrapper.html", output / "profile", max(width, 800), theme, "--dump-dom"
    )
    text = re.search(r'data-measured="([^"]*)"', shown)[1]
    return json.loads(text.replace("&quot;", '"').replace("&amp;", "&"))


def assert_readable(measured, width, theme):
    assert measured["cut"] == []
    assert measured["texts"] == []
    assert measured["width"] <= width
    assert measured["body"] == BACKGROUND[theme]


LAYOUTS = [(390, "light"), (390, "dark"), (1280, "light"), (1280, "dark"), (1920, "light")]


@needs_browser
@pytest.mark.parametrize(("width", "theme"), LAYOUTS)
def test_browser_draws_the_page_without_errors(run, tmp_path_factory, width, theme):
    output = tmp_path_factory.mktemp("browser")
    report.main([str(run), "--output", str(output / "report.html")])
    measured = measure(output / "report.html", output, width, theme)
    assert_readable(measured, width, theme)
    # Loss, 6 curves, saves; iterations 20 and 30 of the first launch were repeated.
    assert measured["counts"] == {"svg": 8, "table": 2, "repeated": 7}


# Selects an option when the page is loaded for the first time, and shows its state after each load.
SELECT_ONCE = """<script>
const loads = Number(sessionStorage.getItem("loads")) + 1;
sessionStorage.setItem("loads", loads);
const box = document.querySelector("input[type=checkbox]");
document.body.dataset.state = `${loads}: ${box.checked}`;
if (loads === 1) box.click();
</script></body>"""


class SelectingServer(ReportServer):
    """Server of a page that selects an option, and reloads once, after a second."""

    loads = 0

    def render(self):
        self.loads += 1
        page = super().render().decode().replace("</body>", SELECT_ONCE)
        # The browser would wait for the end of reloads.
        wait = "1" if self.loads == 1 else "1000"
        return page.replace('content="15"', f'content="{wait}"').encode()


@needs_browser
def test_served_page_keeps_the_selected_options_when_it_reloads(run, tmp_path):
    with SelectingServer(0, [run], False) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        address = f"http://127.0.0.1:{server.server_port}"
        try:
            shown = run_browser(address, tmp_path / "profile", 1280, "light", "--dump-dom")
        finally:
            server.shutdown()
            thread.join()
    assert 'data-state="2: true"' in shown


def write_long_run(root, num_launches=50, iterations=2000):
    """A run of launches with long layouts and long error messages."""
    layout = "TP 2 x PP 4 (2 chunks) x DP 16, experts ETP 1 x EP 8 x DP 4, sequence parallel, "
    error = "DistBackendError: NCCL error in: /opt/pytorch/torch/csrc/ProcessGroupNCCL.cpp:3690, "
    for index in range(num_launches):
        first = iterations * index
        clock = Clock(1.8e9 + first)
        record = RunRecord(root, clock)
        record.write(
            "start", began=clock.now, iteration=first, loaded=None, command=[], summary={},
            train_iters=num_launches * iterations, layout=layout + "distributed optimizer",
            host="node-0017.cluster.example.com", arguments={"lr": str(index)},
        )  # fmt: skip
        for iteration in range(first + 10, first + iterations + 1, 10):
            clock.now += 1
            loss = 2.5 + 100 / iteration
            record.write(
                "interval", iteration=iteration, iterations=10, seconds=1.0, lm_loss=loss,
                tokens_per_second=1e6, grad_norm=loss, learning_rate=1e-4,
            )  # fmt: skip
        record.write("point", iteration=iteration, values=POINTS)
        record.write("end", iteration=iteration, reason=error * 4, failed=True)
        directory = root / f"iter_{iteration:07d}"
        directory.mkdir()
        (directory / "data.bin").write_bytes(bytes(1000))


@needs_browser
@pytest.mark.parametrize("width", [1280, 1920])
def test_many_launches_of_a_long_layout_fit_the_page(tmp_path, width):
    """No text is cut off, the legends stay small, and the page has a moderate size."""
    (tmp_path / "run").mkdir()
    write_long_run(tmp_path / "run")
    report.main([str(tmp_path / "run")])
    page = tmp_path / "run/report.html"
    assert page.stat().st_size < 2e6
    measured = measure(page, tmp_path, width)
    assert_readable(measured, width, "light")
    assert measured["legend"] < 60
    # Long errors are folded, dates and hosts are in one line.
    assert measured["wrapped"] == []


@needs_browser
def test_browser_draws_a_comparison(run, tmp_path_factory):
    output = tmp_path_factory.mktemp("browser")
    (output / "other").mkdir()
    start(output / "other", 1000, 0, None, 3, "end", arguments={"lr": "0.003"})
    page = output / "report.html"
    report.main([str(run), str(output / "other"), "--compare", "--output", str(page)])
    measured = measure(page, output, 1280)
    assert_readable(measured, 1280, "light")
    assert measured["counts"] == {"svg": 4, "table": 2, "repeated": 0}


def test_linked_directory_of_records_is_refused(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run")
    (copy / "runs").rename(tmp_path / "records")
    (copy / "runs").symlink_to(tmp_path / "records")
    with pytest.raises(ValueError, match=r"runs is a link to .*, outside of the run"):
        collect_facts([copy], False)


def ask_for_page(server, host):
    """Return status and body of a request for a page with a Host name."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.request("GET", "/", headers={"Host": host})
    response = connection.getresponse()
    return response.status, response.read().decode()


def test_server_rejects_other_hosts_and_survives_idle_connections(run):
    with ReportServer(0, [run], False) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            # An idle connection blocked all others.
            with socket.create_connection(("127.0.0.1", server.server_port)):
                status, page = ask_for_page(server, f"127.0.0.1:{server.server_port}")
                assert status == 200
                assert "<html" in page
                assert ask_for_page(server, "LOCALHOST")[0] == 200
                # A page of another site, whose name resolves to 127.0.0.1 by now.
                status, page = ask_for_page(server, "evil.example.com")
                assert status == 403
                assert "unknown Host" in page
                assert "<script" not in page
        finally:
            server.shutdown()
            thread.join()
