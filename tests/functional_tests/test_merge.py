"""Runs continue from merged checkpoints, which torchrun processes load at other layouts."""

import pytest
import torch

from megatron.conversion.model_space.optimizer_states import optimizer_key
from megatron.conversion.opening import open_checkpoint
from tests.support.compare import read_whole
from tests.support.training_harness import LAYOUTS, MODELS, train, whole
from tests.unit_tests.conversion.convert_tool import run_merge

FLAGS = f"--mock-data --train-iters 8 {MODELS['llama']} --num-layers 2 --bf16 "
WORD = "embedding.word_embeddings.weight"


@pytest.fixture(scope="module")
def run(pool, tmp_path_factory):
    """Return the directory of a run that saved iterations 2, 4 and 6, and its losses."""
    root = tmp_path_factory.mktemp("run")
    world_size, layout = LAYOUTS["tp2"]
    outcome = pool.run(
        train,
        world_size,
        f"{FLAGS} {layout} --exit-interval 6 --save-interval 2 --save {root}",
    )[0]
    return root, outcome.measured.losses


def average_main_parameters(root, key):
    total = torch.zeros((), dtype=torch.float64)
    for iteration in (2, 4, 6):
        source = open_checkpoint(root, step=iteration)
        total = total + read_whole(source, optimizer_key("param", key)).double()
    return total / 3


@pytest.mark.parametrize("layout", ["tp2", "dp2_distributed_optimizer", "pp2"])
def test_run_continues_with_the_optimizer_of_one_input(pool, run, tmp_path, layout):
    root, losses = run
    words = ("--input", root, "--average-last", 3, "--optimizer", "from=LAST")
    assert run_merge(*words, "--output", tmp_path / "merged").returncode == 0
    world_size, flags = LAYOUTS[layout]
    load = f"{FLAGS} {flags} --load {tmp_path / 'merged'}"
    loaded = whole(pool.run(train, world_size, f"{load} --skip-train"))
    average = average_main_parameters(root, WORD)
    main = loaded[optimizer_key("param", WORD)].double()
    torch.testing.assert_close(main, average, rtol=1e-6, atol=1e-8)
    moment = optimizer_key("exp_avg", WORD)
    assert torch.equal(loaded[moment], read_whole(open_checkpoint(root, step=6), moment))
    continued = pool.run(train, world_size, load)[0]
    assert continued.iteration == 8
    assert continued.consumed_train_samples == 8 * 8
    assert all(loss < losses[0] for loss in continued.measured.losses)


@pytest.mark.parametrize("saver", ["torch_dist", "legacy", "hf"])
def test_run_continues_without_optimizer_state(pool, run, tmp_path, saver):
    root, losses = run
    words = ("--input", root, "--average-last", 3, "--dtype", "fp32", "--saver", saver)
    assert run_merge(*words, "--output", tmp_path / "merged").returncode == 0
    world_size, flags = LAYOUTS["dp2_distributed_optimizer"]
    load = f"{FLAGS} {flags} --lr-warmup-iters 0 --load {tmp_path / 'merged'}"
    load += " --finetune" if saver == "hf" else " --no-load-optim"
    loaded = whole(pool.run(train, world_size, f"{load} --skip-train"))
    assert torch.equal(loaded[WORD], average_main_parameters(root, WORD).float().bfloat16())
    continued = pool.run(train, world_size, load)[0]
    assert continued.iteration == 8
    assert all(loss < losses[0] for loss in continued.measured.losses)


def test_optimizer_state_that_was_dropped_is_an_error(pool, run, tmp_path):
    root, _ = run
    words = ("--input", root, "--average-last", 2, "--output", tmp_path / "merged")
    assert run_merge(*words).returncode == 0
    with pytest.raises(ValueError, match=r"holds no optimizer: .*--no-load-optim"):
        pool.run(train, 1, f"{FLAGS} --load {tmp_path / 'merged'}")
