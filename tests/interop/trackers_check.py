"""Two launches of a run report to the real MLflow, trackio and Weights & Biases (offline).

python tests/interop/trackers_check.py DIRECTORY     with these packages installed
"""

from __future__ import annotations

import os
import sqlite3
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from megatron.training.config.run_options import LoggingConfig  # noqa: E402
from megatron.training.reporting.dashboards import FaultTolerantWriter  # noqa: E402
from megatron.training.reporting.intervals import Interval, Iteration  # noqa: E402
from megatron.training.reporting.writers import make_writers  # noqa: E402

ARGS = {"num_layers": 4, "lr": 1e-3, "finetune": False, "data_path": ["x" * 1000]}


def write_launch(directory: Path, first: int, **flags: object) -> None:
    """Report iterations `first + 1` and `first + 2`, and a validation loss."""
    config = LoggingConfig(
        mlflow_experiment="experiment",
        trackio_project="project",
        wandb_project="project",
    )
    writers = make_writers(config, str(directory), ARGS | flags, first, 8 * first)
    iterations = [
        Iteration(iteration, 8 * iteration, 8, 1e-3, 1.0, lm_loss=10.0 - iteration, grad_norm=1.0)
        for iteration in (first + 1, first + 2)
    ]
    for writer in writers:
        assert isinstance(writer, FaultTolerantWriter)
        writer.interval(Interval(iterations, 2.0, tokens=64, flops=1e12, world_size=1))
        writer.scalars({"lm loss validation": 5.0}, first + 2)
        writer.close()
        assert writer._writer is not None, f"{writer._name} failed"


def read_mlflow(directory: Path) -> list[list[tuple[int, float]]]:
    """Return the loss curve of each run, the newest run first."""
    from mlflow import MlflowClient

    client = MlflowClient()
    experiment = client.get_experiment_by_name("experiment")
    curves = []
    for run in client.search_runs([experiment.experiment_id]):
        assert run.info.status == "FINISHED"
        assert run.data.params["num_layers"] == "4"
        history = client.get_metric_history(run.info.run_id, "lm loss")
        curves.append([(metric.step, metric.value) for metric in history])
    return curves


def read_trackio(directory: Path) -> dict[str, set[int]]:
    """Return the steps of each run by its name."""
    steps: dict[str, set[int]] = {}
    with sqlite3.connect(directory / "trackio/project.db") as database:
        for name, step in database.execute("select run_name, step from metrics"):
            steps.setdefault(name, set()).add(step)
    return steps


def main(directory: Path) -> None:
    os.environ |= {
        "MLFLOW_TRACKING_URI": f"file://{directory}/mlflow",
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "TRACKIO_DIR": f"{directory}/trackio",
        "WANDB_MODE": "offline",
    }
    save = directory / "run"
    save.mkdir()
    write_launch(save, 0)
    write_launch(save, 2)
    write_launch(save, 2, ckpt_step=2)  # a branch begins another run

    losses = [(iteration, 10.0 - iteration) for iteration in (1, 2, 3, 4)]
    assert sorted(read_mlflow(directory)) == [losses, losses[2:]], read_mlflow(directory)

    steps = read_trackio(directory)
    assert sorted(map(sorted, steps.values())) == [[1, 2, 3, 4], [3, 4]], steps

    offline = list(save.glob("wandb/wandb/offline-run-*"))
    ids = {path.name.rpartition("-")[2] for path in offline}
    assert len(offline) == 3, offline
    assert len(ids) == 2, offline

    print("trackers: ok")


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
