"""Optional parts of training on fake devices: the CPU's values, the same bits with delays and after
a resume from an asynchronous save, and no waits for the device.
"""

import functools
from dataclasses import dataclass

import pytest

from tests.fake_cuda.forks import run_ranks
from tests.fake_cuda.test_resume import assert_continued
from tests.fake_cuda.trainings import hash_files, train_on_node
from tests.support.find_waits import find_waits
from tests.support.training_harness import COMMON, DISTRIBUTED_OPTIMIZER, LLAMA

BASE = "--mock-data --train-iters 4 --num-layers 2 --deterministic-mode --log-interval 100 "
SAVES = "--async-save --save saved --save-interval 2 "
RANDOM_DELAYS = {"FAKE_CUDA_RANDOM_US": "1000", "FAKE_CUDA_MESSAGE_US": "2000"}

TP2_SP = "--tensor-model-parallel-size 2 --sequence-parallel "
PP2 = "--pipeline-model-parallel-size 2 "
CP2 = "--context-parallel-size 2 "
EVALUATION = "--eval-iters 2 --eval-interval 1 --split 80,20,0 "
AVERAGE = f"{LLAMA}--ema-decay 0.9 --eval-ema {EVALUATION}"
ROUNDED = "--bf16 --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --use-precision-aware-optimizer "
SCALED = "--bf16 --exp-avg-dtype fp8 --exp-avg-sq-dtype fp16 --main-params-dtype fp16 "
MUP = (
    f"{LLAMA}--use-mup --mup-base-hidden-size 8 --mup-embedding-mult 3 --mup-base-head-dim 4 "
    "--mup-attn-scale-power 0.75 "
)
MTP = f"{LLAMA}--num-layers 4 --mtp-num-layers 2 --mtp-loss-scaling-factor 0.3 "
LONGROPE = (
    "--position-embedding-type rope --rope-type longrope --rotary-scaling-factor 4 "
    "--original-max-position-embeddings 8 --longrope-short-factor 1 1 1 1 "
    "--longrope-long-factor 1 1.5 2.5 4 --untie-embeddings-and-output-weights "
)
XIELU = "--disable-bias-linear --xielu --output-layer-bias "


@dataclass(frozen=True)
class Feature:
    """A run: the model and optimizer, and how they are distributed."""

    flags: str
    num_devices: int
    layout: str

    @property
    def is_exact(self) -> bool:
        """Return whether the CPU has the same losses up to the order of fp32 sums."""
        return "--bf16" not in self.flags


FEATURES = {
    "average": Feature(AVERAGE, 2, TP2_SP),
    "average_bf16": Feature(f"{AVERAGE}--bf16 ", 2, DISTRIBUTED_OPTIMIZER),
    "exports": Feature(f"{LLAMA}--bf16 --save-hf hf --save-hf-interval 2 ", 2, PP2),
    "exports_sharded": Feature(
        f"{LLAMA}--save-hf hf --save-hf-interval 2 --save-hf-dtype fp16 ", 2, DISTRIBUTED_OPTIMIZER
    ),
    "lion": Feature(f"{LLAMA}--optimizer lion --lr 1e-4 ", 2, DISTRIBUTED_OPTIMIZER),
    "mup": Feature(MUP, 2, TP2_SP),
    "mup_muon": Feature(f"{MUP}--optimizer muon ", 2, TP2_SP),
    "multi_token_prediction": Feature(
        MTP, 2, f"{PP2}--pipeline-model-parallel-layout Et*3|tmmL {DISTRIBUTED_OPTIMIZER}"
    ),
    "multi_token_prediction_interleaved": Feature(
        MTP, 2, f"{PP2}--virtual-pipeline-model-parallel-size 2 "
    ),
    "rounded_moments": Feature(f"{LLAMA}{ROUNDED}", 2, DISTRIBUTED_OPTIMIZER),
    "scaled_state": Feature(f"{LLAMA}{SCALED}", 2, DISTRIBUTED_OPTIMIZER),
    "longrope": Feature(f"{LONGROPE}{XIELU}", 2, CP2),
    "parallel_residual": Feature(f"{LLAMA}--parallel-residual ", 2, TP2_SP),
    "gated_attention": Feature(
        f"{LLAMA}--attention-output-gate --clip-qkv 1 --no-norm-weights ", 2, TP2_SP
    ),
    "shared_norm": Feature(f"{LLAMA}--parallel-residual --share-parallel-norm ", 2, PP2),
}


def run(feature, directory, more="", device="cuda", **delays):
    """Return the outcomes of all ranks. `directory` receives checkpoints and exports."""
    directory.mkdir(exist_ok=True)
    flags = f"{BASE}{feature.flags}{feature.layout}--device {device} {more}"
    return run_ranks(train_on_node, feature.num_devices, flags, str(directory), None, **delays)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return the outcomes of a feature's run without delays, and its directory."""

    @functools.cache
    def run_once(name):
        directory = tmp_path_factory.mktemp(name)
        return run(FEATURES[name], directory, SAVES), directory

    return run_once


@pytest.mark.parametrize("name", FEATURES)
def test_values_of_the_cpu(name, undisturbed, tmp_path):
    """Training and validation losses and gradient norms are those of one CPU process."""
    feature = FEATURES[name]
    outcomes, _ = undisturbed(name)
    reference = run(Feature(feature.flags, 1, ""), tmp_path, SAVES, device="cpu")
    (expected,) = reference
    (actual,) = [outcome for outcome in outcomes if outcome["losses"]]
    tolerance = 3e-6 if feature.is_exact else 3e-3
    assert actual["losses"] == pytest.approx(expected["losses"], rel=tolerance)
    assert actual["evaluations"] == pytest.approx(expected["evaluations"], rel=tolerance)
    assert bool(actual["evaluations"]) == (EVALUATION in feature.flags)
    for depths, expected_depths in zip(actual["mtp_losses"], expected["mtp_losses"], strict=True):
        assert depths == pytest.approx(expected_depths, rel=tolerance)


@pytest.mark.parametrize("name", FEATURES)
def test_same_bits_with_delays(name, undisturbed, tmp_path):
    outcomes, directory = undisturbed(name)
    assert run(FEATURES[name], tmp_path, SAVES, **RANDOM_DELAYS) == outcomes
    files = hash_files(str(directory))
    assert hash_files(str(tmp_path)) == files
    folders = {folder for folder, _, _ in files}
    assert folders == ({"saved", "hf"} if "--save-hf" in FEATURES[name].flags else {"saved"})


@pytest.mark.parametrize("name", FEATURES)
def test_no_waits_for_the_device(name, tmp_path):
    """The host launches whole iterations ahead, except for evaluations, which return a loss."""
    feature = FEATURES[name]
    flags = f"{COMMON}{BASE}{feature.flags}{feature.layout}--device cuda --eval-iters 0 "
    for export in ("--save-hf hf", "--save-hf-interval 2", "--save-hf-dtype fp16"):
        flags = flags.replace(export, "")
    assert run_ranks(find_waits, feature.num_devices, flags)[0] == {}


@pytest.mark.parametrize("name", FEATURES)
def test_resuming_is_bitwise(name, undisturbed, tmp_path):
    outcomes, directory = undisturbed(name)
    resumed = run(FEATURES[name], tmp_path, f"{SAVES}--load {directory}/saved --ckpt-step 2 ")
    assert_continued(resumed, outcomes)
