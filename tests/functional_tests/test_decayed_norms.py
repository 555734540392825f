"""--apply-wd-to-qk-layernorm decays the norms of queries and keys only."""

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

    decayed_keys = set()
    for key, tensor in plain.items():
        is_state = key.startswith("optimizer.state.") and ".param." not in key
        is_norm = "q_layernorm" in key or "k_layernorm" in key
        if is_norm and not is_state:
            decayed_keys.add(key)
            decay = torch.full_like(tensor, 0.005)
            torch.testing.assert_close(tensor - decayed[key], decay)
        else:
            assert torch.equal(tensor, decayed[key]), key

    # Query and key of two layers: weights and main parameters.
    assert len(decayed_keys) == 2 * 2 * 2


def test_decayed_norms_resume_at_another_layout(pool, tmp_path):
    flags = f"{FLAGS} --apply-wd-to-qk-layernorm --train-iters 4"
    at_once = whole(pool.run(train, 2, f"{flags} {DISTRIBUTED_OPTIMIZER}"))
    first = f"{flags} {DISTRIBUTED_OPTIMIZER} --exit-interval 2 --save {tmp_path}"
    pool.run(train, 2, first)
    resumed = whole(pool.run(train, 2, f"{flags} --load {tmp_path}"))
    for key, tensor in at_once.items():
        assert torch.equal(tensor, resumed[key]), key
