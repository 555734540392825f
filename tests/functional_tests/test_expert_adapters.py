"""Adapters of experts train the same at every layout: the configurations of Megatron-Bridge#5635.

They ran there and trained wrong numbers, without an error: the output of an adapter was whole where
that of the frozen product is a summand, or was scaled by the number of ranks.
"""

import pytest
import torch

from tests.support.lora_runs import TRAINING
from tests.support.training_harness import DISTRIBUTED_OPTIMIZER, get_losses, train, whole

MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 48 --swiglu "
    "--position-embedding-type rope --normalization RMSNorm --disable-bias-linear "
    "--untie-embeddings-and-output-weights --max-position-embeddings 32 --num-experts 4 "
    "--moe-router-topk 2 --moe-ffn-hidden-size 24 --moe-shared-expert-intermediate-size 16 "
    "--moe-aux-loss-coeff 0 --tokenizer-type NullTokenizer --vocab-size 59 "
    "--make-vocab-size-divisible-by 4 --init-method-std 0.2 "
)
LORA = "--lora-rank 4 --lora-alpha 8 "
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
LAYOUTS = {
    "ep2": (2, f"--expert-model-parallel-size 2 {DISTRIBUTED_OPTIMIZER}"),
    "etp2": (2, TP2),
    "tp2_etp1": (2, f"{TP2} --expert-tensor-parallel-size 1 --use-distributed-optimizer"),
    "tp2_ep2_etp2": (
        4,
        f"{TP2} --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall",
    ),
}


@pytest.fixture(scope="module")
def base(pool, tmp_path_factory):
    directory = tmp_path_factory.mktemp("experts") / "base"
    pool.run(train, 1, f"{MODEL} {TRAINING} --save {directory} --train-iters 1", "")
    return directory


def run(pool, base, size, flags):
    flags = f"{MODEL} {TRAINING} {LORA} --pretrained-checkpoint {base} {flags}"
    return pool.run(train, size, flags, "")


@pytest.fixture(scope="module")
def single(pool, base):
    outcomes = {}
    for flags in ("", "--lora-dora"):
        outcomes[flags] = run(pool, base, 1, flags)
    return outcomes


def assert_same(outcomes, expected):
    assert get_losses(outcomes) == pytest.approx(get_losses(expected), abs=1e-5)
    expected_tensors = whole(expected)
    tensors = whole(outcomes)
    assert tensors.keys() == expected_tensors.keys()
    assert any("mlp.experts.experts.linear_fc2.down_proj.lora_B" in key for key in tensors)
    for key, tensor in tensors.items():
        torch.testing.assert_close(tensor, expected_tensors[key], atol=2e-5, rtol=1e-3, msg=key)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_train_the_same_adapters_of_experts(pool, base, single, layout):
    size, flags = LAYOUTS[layout]
    assert_same(run(pool, base, size, flags), single[""])


def test_bridge_5635_dropout_of_experts(pool, base):
    with pytest.raises(ValueError, match=r"--lora-dropout 0\.1 with adapters of experts"):
        run(pool, base, 2, f"{TP2} --lora-dropout 0.1")


def test_bridge_5635_dora_of_experts_and_shared_experts(pool, base, single):
    size, flags = LAYOUTS["tp2_ep2_etp2"]
    assert_same(run(pool, base, size, f"{flags} --lora-dora"), single["--lora-dora"])


def test_files_of_peft_start_another_run(pool, tmp_path):
    model = MODEL.replace("--moe-shared-expert-intermediate-size 16 ", "")
    flags = f"{model} {TRAINING}"
    pool.run(train, 1, f"{flags} --save {tmp_path / 'base'} --train-iters 1", "")
    adapter = tmp_path / "adapter"
    flags += f" {LORA} --pretrained-checkpoint {tmp_path / 'base'}"
    expected = pool.run(train, 1, f"{flags} --save-hf {adapter}", "")
    outcomes = pool.run(train, 2, f"{flags} {TP2} --lora-load {adapter} --train-iters 1 --lr 0", "")
    tensors = whole(outcomes)

    for key, tensor in whole(expected).items():
        assert key.startswith("optimizer.") or torch.equal(tensors[key], tensor), key

    with pytest.raises(ValueError, match="--save-hf with --lora-dora of experts"):
        pool.run(train, 1, f"{flags} --lora-dora --save-hf {tmp_path / 'dora'}", "")


@pytest.mark.parametrize("layout", ["etp2", pytest.param("tp2_ep2_etp2", marks=pytest.mark.slow)])
def test_encoded_experts_train_the_same_adapters(pool, tmp_path, layout):
    """The rows of each expert and of gate and up are encoded separately on ETP ranks."""
    sizes = "--hidden-size 128 --moe-ffn-hidden-size 128 --moe-shared-expert-intermediate-size 128"
    model = f"{MODEL} {sizes} --init-method-std 0.05 {TRAINING} --train-iters 1"
    pool.run(train, 1, f"{model} --save {tmp_path / 'base'}", "")
    lora = f"{LORA} --lora-base-encoding nf4 --train-iters 2 --adam-eps 1e-4"
    flags = f"{model} {lora} --pretrained-checkpoint {tmp_path / 'base'}"
    expected = pool.run(train, 1, flags, "")
    size, split = LAYOUTS[layout]
    assert_same(pool.run(train, size, f"{flags} {split}", ""), expected)
