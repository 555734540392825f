"""--apply-wd-to-qk-layernorm decays the norms of queries and keys, and nothing else."""

import pytest
import torch

from tests.support.training_harness import DISTRIBUTED_OPTIMIZER, MODELS, train, whole

FLAGS = (
    f"--mock-data {MODELS['llama']} --num-layers 2 --qk-layernorm --train-iters 1 --lr 1e-2 "
    "--min-lr 1e-2 --weight-decay 0.5 --lr-warmup-iters 0 --lr-decay-style constant "
    "--clip-grad 0 "
)
LAYOUTS = {
    "one": (1, ""),
    "dp2": (2, DISTRIBUTED_OPTIMIZER),
    "muon": (1, "--optimizer muon"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_first_step_differs_by_the_decay_of_the_initial_norms(pool, layout):
    """AdamW subtracts lr x decay x weight, and norms begin at 1.

    Without clipping: the norm of the gradient is summed by bucket, and the buckets differ.
    """
    ranks, flags = LAYOUTS[layout]
    plain = whole(pool.run(train, ranks, f"{FLAGS} {flags}"))
    decayed = whole(pool.run(train, ranks, f"{FLAGS} {flags} --apply-wd-to-qk-layernorm"))
    assert plain.keys() == decayed.keys()
    names = set()
    for key, tensor in plain.items():
        is_state = key.startswith("optimizer.state.") and ".param." not in key
        if not is_state and ("q_layernorm" in key or "k_layernorm" in key):
            names.add(key)
            torch.testing.assert_close(tensor - decayed[key], torch.full_like(tensor, 0.005))
        else:
            assert torch.equal(tensor, decayed[key]), key
    assert len(names) == 2 * 2 * 2  # query and key of two layers: weights and main parameters


def test_decayed_norms_resume_at_another_layout(pool, tmp_path):
    flags = f"{FLAGS} --apply-wd-to-qk-layernorm --train-iters 4"
    at_once = whole(pool.run(train, 2, f"{flags} {DISTRIBUTED_OPTIMIZER}"))
    first = f"{flags} {DISTRIBUTED_OPTIMIZER} --exit-interval 2 --save {tmp_path}"
    pool.run(train, 2, first)
    resumed = whole(pool.run(train, 2, f"{flags} --load {tmp_path}"))
    for key, tensor in at_once.items():
        assert torch.equal(tensor, resumed[key]), key
