"""Compare Transformer Engine's kernels with torch's: losses, fp8 and fp4 recipes, resumes between
them.
"""

import functools
import importlib.util
import os
import re
import subprocess
import sys

import pytest
import torch

from megatron.core.dist_checkpointing.loading.reader import Reader
from tests import ROOT
from tests.support.training_harness import COMMON, LLAMA

# With a second cuDNN in the CUDA toolkit, Transformer Engine would open parts of both.
_cudnn = importlib.util.find_spec("nvidia.cudnn") if importlib.util.find_spec("nvidia") else None
if _cudnn is not None and _cudnn.submodule_search_locations:
    os.environ.setdefault("CUDNN_HOME", _cudnn.submodule_search_locations[0])

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        importlib.util.find_spec("transformer_engine") is None,
        reason="no Transformer Engine",
    ),
]
WIDER = COMMON.replace("--hidden-size 32", "--hidden-size 256").replace(
    "--seq-length 16",
    "--seq-length 64",
)
MODEL = LLAMA.replace("--ffn-hidden-size 48", "--ffn-hidden-size 512")
TE = "--transformer-impl transformer_engine "
EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 256 "
FUSED = "--cross-entropy-loss-fusion --cross-entropy-fusion-impl te "
WEIGHTS = "--use-distributed-optimizer --fp8-param-gather "
DELAYED = "--fp8-amax-history-len 16 --fp8-amax-compute-algo max --deterministic-mode "


@pytest.fixture(scope="module", autouse=True)
def _requires_library():
    """Skip if the library does not load, e.g. because of two cuDNNs; the reason is its error."""
    try:
        importlib.import_module("transformer_engine.pytorch")
    except (ImportError, OSError) as error:
        pytest.skip(f"Transformer Engine does not load: {error}")


def train_alone(flags, iterations=50):
    """Return the losses of a process of its own: torch's attention uses cuDNN, too."""
    return logged_losses(1, f"--distributed-backend gloo {flags}", iterations)


train_local = functools.cache(train_alone)


@pytest.mark.parametrize(
    "more",
    ["", "--qk-layernorm", "--window-size 20,0", "--reset-attention-mask", EXPERTS, FUSED],
)
def test_bf16_curves_agree(more):
    # Later, roundings have changed the choices of a router, and curves diverge.
    compared = 12 if more == EXPERTS else 50
    expected = train_local(more.replace(FUSED, ""))[:compared]
    assert train_alone(TE + more)[:compared] == pytest.approx(expected, rel=1e-2)


SUPPORT = {"blockwise": "fp8_block_scaling", "mxfp8": "mxfp8", "nvfp4": "nvfp4"}


@pytest.mark.parametrize("more", ["", WEIGHTS])
@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise", "mxfp8", "nvfp4"])
def test_narrow_formats_follow_bf16(recipe, more):
    te = pytest.importorskip("transformer_engine.pytorch")
    if more and recipe in ("mxfp8", "nvfp4"):
        pytest.skip("--fp8-param-gather is refused")
    checks = getattr(te, "quantization", None) or te.fp8
    if recipe in SUPPORT and not getattr(checks, f"check_{SUPPORT[recipe]}_support")()[0]:
        pytest.skip(f"this GPU has no {recipe}")
    fp8 = (
        f"--fp8-format {'hybrid' if recipe in ('delayed', 'tensorwise') else 'e4m3'} "
        f"--fp8-recipe {recipe}"
    )
    narrow = "--fp4-format e2m1" if recipe == "nvfp4" else fp8
    measured = train_alone(f"{TE} {narrow} {more} --first-last-layers-bf16")
    assert measured == pytest.approx(train_local(""), rel=5e-2)


@pytest.mark.parametrize("more", ["", WEIGHTS])
def test_fp8_resumes_bitwise_and_goes_on_in_bf16(tmp_path, more):
    """Tensors and scales at the end of the resumed and the uninterrupted run are bitwise equal."""
    fp8 = f"{TE} --fp8-format hybrid {DELAYED} {more} "
    saving = f"{fp8} --save {tmp_path} --save-interval 5"
    straight = train_alone(saving, 10)
    expected = extra_states(tmp_path / "iter_0000010")
    assert expected

    for flags, tolerance in ((fp8, 0.0), ("", 2e-2), (TE, 2e-2)):
        (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")
        again = train_alone(f"{flags} --load {tmp_path}", 10)
        assert again == pytest.approx(straight[5:], rel=tolerance, abs=0.0)

    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")
    elsewhere = tmp_path / "again"
    train_alone(f"{fp8} --load {tmp_path} --save {elsewhere}", 10)
    resumed = Reader(elsewhere / "iter_0000010")
    uninterrupted = Reader(tmp_path / "iter_0000010")
    assert resumed.metadata.tensors.keys() == uninterrupted.metadata.tensors.keys()

    for key in uninterrupted.metadata.tensors:
        value = uninterrupted.view(key).read_all()
        assert torch.equal(resumed.view(key).read_all(), value), key
    actual = extra_states(elsewhere / "iter_0000010")
    assert actual.keys() == expected.keys()

    for key, state in expected.items():
        assert all(
            torch.equal(actual[key][name], value)
            for name, value in state.items()
            if name != "recipe"
        ), key


def extra_states(directory):
    reader = Reader(directory)
    states = {
        key: reader.read_object(key) for key in reader.metadata.objects if "_extra_state" in key
    }
    return {key: state for key, state in states.items() if isinstance(state, dict)}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each of two ranks")
@pytest.mark.parametrize("more", ["p2p", "all_gather", "a2a --reset-attention-mask"])
def test_context_parallelism(more):
    """Two ranks with half of each sequence, using Transformer Engine's attention."""
    more = f"--cp-comm-type {more}"
    whole = logged_losses(1, more)
    assert logged_losses(2, f"{TE} --context-parallel-size 2 {more}") == pytest.approx(
        whole,
        rel=1e-2,
    )


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each of two ranks")
def test_overlapped_tensor_parallelism():
    """User buffers over NVLink; UB_SKIPMC for hardware without multicast."""
    split = "--tensor-model-parallel-size 2 --sequence-parallel"
    expected = logged_losses(2, split)
    assert logged_losses(2, f"{TE} {split} --tp-comm-overlap") == pytest.approx(expected, rel=1e-2)


def logged_losses(ranks, flags, iterations=10):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
    ]
    command += [
        "pretrain_gpt.py",
        *f"{WIDER}{MODEL} --bf16 --mock-data --train-iters {iterations} {flags}".split(),
    ]
    environment = {
        k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    environment |= {"UB_SKIPMC": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    result = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return [float(loss) for loss in re.findall(r"lm loss: (\d\.\d+E[+-]\d+)", result.stdout)]
