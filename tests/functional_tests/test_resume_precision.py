"""Checkpoints of any precision resume in any other: all replicas start from the main parameters."""

import pytest
import torch

from tests.support.training_harness import DISTRIBUTED_OPTIMIZER, MODELS, train, whole

FLAGS = f"--mock-data --train-iters 3 --global-batch-size 4 {MODELS['gpt2']} --num-layers 2"
PRECISIONS = {
    "fp32": ("", torch.float32),
    "bf16": ("--bf16", torch.bfloat16),
    "fp16": ("--fp16", torch.float16),
}
LAYOUTS = {
    "dp2": DISTRIBUTED_OPTIMIZER,
    "dp2_replicated": "",
    "tp2": "--tensor-model-parallel-size 2",
}
MAIN = "optimizer.state.param."


@pytest.fixture(scope="module")
def saved(pool, tmp_path_factory):
    """Return a checkpoint and the global tensors that it was made of, by precision."""
    result = {}
    for name, (flag, _) in PRECISIONS.items():
        directory = tmp_path_factory.mktemp(name)
        flags = f"{FLAGS} {flag} --initial-loss-scale 1024 --save {directory}"
        result[name] = directory, whole(pool.run(train, 1, flags))
    return result


def list_cases():
    """Return all combinations. Those are slow that are neither loads into fp32 nor in a Latin
    square, which contains every pair of values once.
    """
    cases = []
    for old_index, old in enumerate(PRECISIONS):
        for new_index, new in enumerate(PRECISIONS):
            for layout_index, layout in enumerate(LAYOUTS):
                in_square = (old_index + new_index + layout_index) % 3 == 0
                marks = []
                if not in_square and new != "fp32":
                    marks.append(pytest.mark.slow)
                cases.append(pytest.param(old, new, layout, marks=marks))
    return cases


@pytest.mark.parametrize(("old", "new", "layout"), list_cases())
def test_weights_and_main_parameters_agree_on_every_replica(pool, saved, old, new, layout):
    """Weights of an fp32 model are its main parameters, the same memory: a bf16 weight must not be
    read over them.
    """
    directory, expected = saved[old]
    flag, dtype = PRECISIONS[new]
    flags = (
        f"{FLAGS} {flag} --initial-loss-scale 1024 {LAYOUTS[layout]} --load {directory} "
        "--skip-train"
    )
    loaded = whole(pool.run(train, 2, flags))  # replicas that differ fail here
    for key, tensor in loaded.items():
        if key.startswith("optimizer."):
            assert torch.equal(tensor, expected[key]), key
        else:
            assert torch.equal(tensor, expected[MAIN + key].to(dtype)), key
