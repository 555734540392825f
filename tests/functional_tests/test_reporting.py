"""Log, run record and TensorBoard of a run with two launches."""

import contextlib
import io
import json

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron.training.reporting.recorded_launches import read_failed_launches, read_record
from megatron.training.reporting.run_record import RUN_FILE
from tests.support.training_harness import COMMON, train

FLAGS = (
    "--mock-data --train-iters 6 --eval-iters 1 --eval-interval 2 --save {0} --load {0} "
    "--save-interval 2 "
    "--log-interval 2 --position-embedding-type rope --log-validation-ppl-to-tensorboard "
)


def capture_output(rank, world_size, flags):
    """Return the standard output of a training run."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        train(rank, world_size, flags)
    return output.getvalue()


@pytest.fixture(scope="module")
def launches(pool, tmp_path_factory):
    """Return the directory of a run with two launches, DP 2 and then TP 2, and the output of each
    rank of each launch.
    """
    directory = tmp_path_factory.mktemp("run")
    flags = FLAGS.format(directory)
    first = pool.run(
        capture_output,
        2,
        flags + f"--exit-interval 4 --print-args --tensorboard-dir {directory}/tensorboard",
    )
    second = pool.run(capture_output, 2, flags + "--tensor-model-parallel-size 2 --log-format json")
    return directory, first, second


def test_text_log(launches):
    directory, (rank_0, rank_1), _ = launches
    assert rank_1 == ""

    lines = rank_0.splitlines()
    assert lines.count(f" > {directory} holds no checkpoint yet: starting from scratch") == 1
    assert any(line.startswith("   layout      TP 1 x PP 1 x DP 2 on 2 ranks") for line in lines)
    assert "  train_iters ..................................... 6" in lines
    assert f"  successfully saved checkpoint from iteration       2 to {directory}" in lines

    first_iteration = next(
        index for index, line in enumerate(lines) if "] iteration        1/" in line
    )
    end_of_arguments = lines.index("-------------------- end of arguments ---------------------")
    assert end_of_arguments < first_iteration

    reason = "iteration 4 is a multiple of --exit-interval 4"
    assert lines[-1] == f" > exiting after iteration 4: {reason}"


def test_unwritable_record_and_other_mathematics_are_warnings(pool, tmp_path):
    (tmp_path / "runs").write_text("a file in the way")
    flags = f"{FLAGS.format(tmp_path)} --goodput --lr-warmup-iters 0 --train-iters 2 --eval-iters 0"
    first = pool.run(capture_output, 1, f"{flags} --exit-interval 1")[0]

    assert " > WARNING: --goodput: the record in " in first
    assert "iteration        1/" in first

    second = pool.run(capture_output, 1, f"{flags} --norm-epsilon 1e-3")[0]
    assert "WARNING: " in second
    assert "other mathematics: norm_epsilon: 1e-05 in the checkpoint, 0.001 now" in second


def test_launch_with_wrong_flags_is_recorded(launches, launcher):
    directory, _, _ = launches
    job = launcher.start(1, f"{COMMON} --save {directory} --unfused")
    job.until(job.has_ended)
    (failed,) = read_failed_launches(directory)
    assert failed["reason"].startswith("unknown flag --unfused")
    assert "--unfused" in failed["command"]
    assert len(read_record(directory)) == 2


def test_json_log(launches):
    directory, _, (rank_0, _) = launches
    lines = [json.loads(line) for line in rank_0.splitlines()]
    intervals = [line for line in lines if line.get("event") == "interval"]

    assert [line["iteration"] for line in intervals] == [5, 6]
    assert intervals[0].keys() >= {
        "lm_loss",
        "grad_norm",
        "tokens_per_second",
        "eta_seconds",
        "consumed_samples",
    }

    (start,) = (line for line in lines if line.get("event") == "start")
    assert start["layout"].startswith("TP 2 x PP 1 x DP 1")
    assert "iter_0000004" in start["start"]

    saves = [line for line in lines if line.get("event") == "save"]
    assert [line["iteration"] for line in saves] == [6]

    evaluations = [line for line in lines if line.get("event") == "evaluation"]
    assert {line["split"] for line in evaluations} == {"validation", "test"}


def test_run_record(launches):
    directory, _, _ = launches
    one, two = read_record(directory)
    assert (one.first, one.last, two.first, two.last) == (0, 4, 4, 6)
    assert one.end["reason"].startswith("iteration 4 is a multiple")
    assert not one.end["failed"]
    assert two.end["reason"] == "complete"
    assert two.start["loaded"].endswith("iter_0000004")
    assert [row["iteration"] for row in one.intervals] == [1, 2, 4]

    saves = []
    for launch in (one, two):
        for row in launch.points:
            if "save-total-time" in row["values"]:
                saves.append(row["iteration"])

    assert saves == [2, 4, 6]
    assert one.began <= one.start["time"] <= one.ended <= two.began

    run = json.loads((directory / RUN_FILE).read_text())
    assert run["arguments"]["tensor_model_parallel_size"] == 2
    assert run["layout"] == two.start["layout"]


def test_tensorboard_curves_over_samples(launches):
    directory, _, _ = launches
    events = EventAccumulator(str(directory / "tensorboard")).Reload()
    sample_events = EventAccumulator(str(directory / "tensorboard/samples")).Reload()
    over_iterations = events.Scalars("lm loss")
    over_samples = sample_events.Scalars("lm loss vs samples")

    assert [event.step for event in over_iterations] == [1, 2, 3, 4]
    assert [event.step for event in over_samples] == [8, 16, 24, 32]
    assert [event.value for event in over_samples] == [event.value for event in over_iterations]

    names = {*events.Tags()["scalars"], *sample_events.Tags()["scalars"]}
    assert {
        "world-size",
        "world-size vs samples",
        "grad-norm vs samples",
        "lm loss validation vs samples",
    } <= names
    assert {
        "lm loss validation ppl vs samples",
        "learning-rate vs samples",
        "batch-size vs samples",
    } <= names
    assert events.Scalars("world-size")[0].value == 2
    assert any(tag.startswith("train_iters") for tag in events.Tags()["tensors"])  # the text tab
