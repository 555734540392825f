"""Runs of an earlier version go on: checkpoints, node-local tier, record and export."""

import shutil

import pytest

from megatron.core.dist_checkpointing.files import run_name
from tests.support.training_harness import LLAMA, get_losses, train
from tests.support.unpacked import unpacked
from tests.unit_tests.conversion.convert_tool import run_convert
from tools import report
from tools.checkpoint import inspect_checkpoint

FLAGS = (
    f"{LLAMA} --num-layers 2 --hidden-size 16 --num-attention-heads 2 --ffn-hidden-size 24 "
    "--global-batch-size 4 --hidden-dropout 0.1 --mock-data --train-iters 10 --device cpu "
    "--use-distributed-optimizer --use-dist-ckpt --async-save --ckpt-fully-parallel-save "
)
LAYOUTS = {
    "dense": "--tensor-model-parallel-size 2 --sequence-parallel ",
    "moe": "--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss "
    "--moe-aux-loss-coeff 1e-2 --expert-model-parallel-size 2 --moe-router-enable-expert-bias "
    "--moe-router-score-function sigmoid ",
}
LOSSES = {  # of iterations 6 to 10
    "dense": [3.983484, 3.905876, 3.918976, 3.887325, 3.902905],
    "moe": [3.992290, 3.912544, 3.917412, 3.896607, 3.889668],
}
ROUNDING = 2e-6  # of the printed losses, and between processors

dense = pytest.mark.parametrize("name", ["dense"])


@pytest.fixture(params=sorted(LAYOUTS))
def name(request):
    return request.param


@pytest.fixture
def earlier(name, tmp_path, tmp_path_factory):
    """A copy of the golden directory, with the node-local tier that belongs to the copied run."""
    directory = tmp_path / name
    shutil.copytree(unpacked(tmp_path_factory, f"earlier_version/{name}"), directory)
    (tier,) = (directory / "nodes").iterdir()
    tier.rename(tier.with_name(run_name(directory / "run")))
    return directory


def resume(pool, name, directory, flags=""):
    run = directory / "run"
    flags = f"{FLAGS} {LAYOUTS[name]} --save {run} --load {run} --save-interval 5 {flags}"
    outcomes = pool.run(train, 2, flags)
    assert {outcome.iteration for outcome in outcomes} == {10}
    return get_losses(outcomes)


def test_the_checkpoint_continues_with_the_same_losses(pool, name, earlier):
    assert resume(pool, name, earlier) == pytest.approx(LOSSES[name], abs=ROUNDING)


def test_the_node_local_checkpoint_continues_with_the_same_losses(pool, name, earlier):
    flags = (
        "--non-persistent-ckpt-type local --non-persistent-save-interval 2 "
        f"--non-persistent-local-ckpt-dir {earlier / 'nodes'}"
    )
    losses = resume(pool, name, earlier, flags)
    assert losses == pytest.approx(LOSSES[name][3:], abs=ROUNDING)


def test_every_tensor_has_the_same_bits(name, earlier, capsys):
    assert inspect_checkpoint.main(["digest", str(earlier / "run")]) == 0
    assert capsys.readouterr().out == (earlier / "digest.txt").read_text()


@dense
def test_the_export_has_the_same_bytes(earlier, tmp_path):
    result = run_convert(
        "--load-dir", earlier / "run", "--saver", "hf", "--save-dir", tmp_path / "hf"
    )
    assert result.returncode == 0, result.stderr
    for path in sorted((earlier / "hf").iterdir()):
        assert (tmp_path / "hf" / path.name).read_bytes() == path.read_bytes(), path.name


@dense
def test_the_report_reads_the_record(earlier):
    assert report.main([str(earlier / "run")]) == 0
    assert "TP 2 x PP 1 x DP 1" in (earlier / "run/report.html").read_text()
