"""Runs continue from merged checkpoints, which torchrun processes load at other layouts."""

import pytest
import torch

from megatron.conversion.model_space.optimizer_states import optimizer_key
from megatron.conversion.opening import open_checkpoint
from megatron.core.run_checkpoint.keys import WORD_EMBEDDINGS
from tests.support.compare import read_whole
from tests.support.training_harness import LAYOUTS, MODELS, train, whole
from tests.unit_tests.conversion.convert_tool import run_merge

FLAGS = f"--mock-data --train-iters 8 {MODELS['llama']} --num-layers 2 --bf16 "


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
    """Return the mean of the main parameter over the three checkpoints, in fp64."""
    total = torch.zeros((), dtype=torch.float64)
    for iteration in (2, 4, 6):
        source = open_checkpoint(root, step=iteration)
        main = read_whole(source, optimizer_key("param", key))
        total = total + main.double()
    return total / 3


@pytest.mark.parametrize("layout", ["tp2", "dp2_distributed_optimizer", "pp2"])
def test_run_continues_with_the_optimizer_of_one_input(pool, run, tmp_path, layout):
    root, losses = run
    merged = tmp_path / "merged"
    options = ("--input", root, "--average-last", 3, "--optimizer", "from=LAST")
    done = run_merge(*options, "--output", merged)
    assert done.returncode == 0

    # The main parameters are averages, the moments are those of the last input.
    world_size, flags = LAYOUTS[layout]
    load = f"{FLAGS} {flags} --load {merged}"
    loaded = whole(pool.run(train, world_size, f"{load} --skip-train"))
    average = average_main_parameters(root, WORD_EMBEDDINGS)
    main = loaded[optimizer_key("param", WORD_EMBEDDINGS)].double()
    torch.testing.assert_close(main, average, rtol=1e-6, atol=1e-8)

    moment = optimizer_key("exp_avg", WORD_EMBEDDINGS)
    expected = read_whole(open_checkpoint(root, step=6), moment)
    assert torch.equal(loaded[moment], expected)

    continued = pool.run(train, world_size, load)[0]
    assert continued.iteration == 8
    assert continued.consumed_train_samples == 8 * 8
    assert max(continued.measured.losses) < losses[0]


@pytest.mark.parametrize("saver", ["torch_dist", "legacy", "hf"])
def test_run_continues_without_optimizer_state(pool, run, tmp_path, saver):
    root, losses = run
    merged = tmp_path / "merged"
    options = ("--input", root, "--average-last", 3, "--dtype", "fp32", "--saver", saver)
    done = run_merge(*options, "--output", merged)
    assert done.returncode == 0

    world_size, flags = LAYOUTS["dp2_distributed_optimizer"]
    load = f"{FLAGS} {flags} --lr-warmup-iters 0 --load {merged}"
    load += " --finetune" if saver == "hf" else " --no-load-optim"
    loaded = whole(pool.run(train, world_size, f"{load} --skip-train"))
    average = average_main_parameters(root, WORD_EMBEDDINGS)
    expected = average.float().bfloat16()
    assert torch.equal(loaded[WORD_EMBEDDINGS], expected)

    continued = pool.run(train, world_size, load)[0]
    assert continued.iteration == 8
    assert max(continued.measured.losses) < losses[0]


def test_optimizer_state_that_was_dropped_is_an_error(pool, run, tmp_path):
    root, _ = run
    options = ("--input", root, "--average-last", 2, "--output", tmp_path / "merged")
    done = run_merge(*options)
    assert done.returncode == 0
    with pytest.raises(ValueError, match=r"holds no optimizer: .*--no-load-optim"):
        pool.run(train, 1, f"{FLAGS} --load {tmp_path / 'merged'}")
