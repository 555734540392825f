"""Models with experts: on every layout, from every form and back, they go on along the curve of Megatron-LM."""

import shlex

import pytest

from megatron.conversion.convert import compare
from megatron.conversion.open_checkpoint import open_checkpoint
from megatron.training.config.run_config import parse_args
from megatron.training.training import pretrain
from tests import ROOT
from tests.training_harness import Measurements, datasets_provider, forward_step, model_provider
from tests.unpacked import unpacked

GOLDEN = ROOT / "tests/golden"
PATHS = ("--save", "--load", "--data-path", "--data-cache-path", "--save-interval")
LAYOUT = (
    "--use-distributed-optimizer",
    "--moe-token-dispatcher-type",
    "--no-load-optim",
    "--no-load-rng",
    "--finetune",
)
ZERO, ALLTOALL = "--use-distributed-optimizer", "--moe-token-dispatcher-type alltoall"
OVERLAP = f"{ZERO} --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 3000"
LAYOUTS = {  # name -> (processes, flags)
    "single": (1, ZERO),
    "ep2": (2, f"--expert-model-parallel-size 2 {ALLTOALL} {OVERLAP}"),
    "ep2_gathered_not_sharded": (2, "--expert-model-parallel-size 2"),
    "ep4": (4, f"--expert-model-parallel-size 4 {ALLTOALL} {ZERO}"),
    "dp4_ep2": (4, f"--expert-model-parallel-size 2 {ALLTOALL} {OVERLAP}"),
    "tp2": (2, f"--tensor-model-parallel-size 2 --sequence-parallel {ZERO}"),
    "tp2_etp1": (2, f"--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1 {ZERO}"),
    "tp2_ep2_etp1": (
        4,
        "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 "
        f"--expert-tensor-parallel-size 1 {ALLTOALL} {ZERO}",
    ),
    "tp2_ep2_etp2": (
        4,
        f"--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 {ALLTOALL} {ZERO}",
    ),
    "tp2_ep2_etp2_gathered": (
        4,
        f"--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 {ZERO}",
    ),
    "cp2": (2, f"--context-parallel-size 2 {ZERO}"),
    "cp2_ep2": (4, f"--context-parallel-size 2 --expert-model-parallel-size 2 {ALLTOALL} {OVERLAP}"),
    "pp2_ep2": (4, f"--pipeline-model-parallel-size 2 --expert-model-parallel-size 2 {ALLTOALL} {OVERLAP}"),
    "pp2_ep2_recomputed": (
        4,
        f"--pipeline-model-parallel-size 2 --expert-model-parallel-size 2 {ALLTOALL} "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
}


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    """Checkpoints of Megatron-LM by model and name."""
    return lambda model, name: unpacked(tmp_path_factory, f"megatron_moe/{model}/{name}")


def flags_of(model: str) -> list[str]:
    """The model's own command line, without paths and layout."""
    kept, skip = [], False
    for word in shlex.split((GOLDEN / "megatron_moe" / model / "flags.txt").read_text()):
        if word.startswith("--"):
            skip = word in PATHS or word in LAYOUT
        if not skip:
            kept.append(word)
    data = GOLDEN / "megatron_lm/data/pysrc_a_text_document"
    return [*kept, "--data-path", str(data), "--num-threads", "1"]


def train(rank, world_size, model, flags):
    measured = Measurements()
    args = parse_args([*flags_of(model), *shlex.split(flags)], world_size)
    run = pretrain(args, model_provider, datasets_provider, forward_step, writers=[measured])
    return run.state.iteration, measured.losses, measured.grad_norms, measured.experts


def golden(model):
    """Iteration -> what Megatron-LM's log says."""
    rows = {}
    for line in (GOLDEN / "megatron_moe" / model / "loss.txt").read_text().splitlines():
        if line.startswith("iter="):
            row = {name: value.strip("[]") for name, value in (word.split("=") for word in line.split())}
            rows.setdefault(int(row["iter"]), row)
    return rows


def check(model, results, first=1, tolerance=1e-5):
    rows = golden(model)
    iteration, losses, grad_norms, experts = results[0]
    assert iteration == 10 and len(losses) == 11 - first
    for step, (loss, grad_norm, of_layers) in enumerate(zip(losses, grad_norms, experts, strict=True), start=first):
        assert loss == pytest.approx(float(rows[step]["lm_loss"]), abs=tolerance), f"iteration {step}"
        assert grad_norm == pytest.approx(float(rows[step]["grad_norm"]), rel=100 * tolerance), f"iteration {step}"
        for name in of_layers.keys() - {"load"}:
            expected = [float(value) for value in rows[step][name].split(",")]
            assert of_layers[name] == pytest.approx(expected, rel=100 * tolerance), f"iteration {step}: {name}"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_curve_of_megatron_on_every_layout(pool, tmp_path, archives, layout):
    """Losses, gradient norms and the auxiliary losses of every layer."""
    processes, flags = LAYOUTS[layout]
    start = f"--load {archives('mixtral_fp32', 'initial')} --finetune --no-load-optim --no-load-rng"
    results = pool.run(train, processes, "mixtral_fp32", f"{flags} {start} --data-cache-path {tmp_path}")
    check("mixtral_fp32", results)


@pytest.mark.parametrize("model,layout,tolerance", [("qwen2moe_bf16", "single", 2e-3), ("qwen2moe_bf16", "ep2", 2e-3)])
def test_other_models(pool, tmp_path, archives, model, layout, tolerance):
    """Gated shared expert and z-loss in bf16."""
    processes, flags = LAYOUTS[layout]
    start = f"--load {archives(model, 'initial')} --finetune --no-load-optim --no-load-rng"
    check(model, pool.run(train, processes, model, f"{flags} {start} --data-cache-path {tmp_path}"), 1, tolerance)


CHAIN = [
    ("ep2", "tp2_ep2_etp1"),
    ("tp2_ep2_etp2", "single"),
    ("single", "pp2_ep2"),
    ("pp2_ep2", "cp2_ep2"),
    ("cp2_ep2", "ep4"),
]


@pytest.mark.parametrize("saved,loaded", CHAIN)
def test_saved_at_one_layout_it_goes_on_at_another(pool, tmp_path, archives, saved, loaded):
    """Bit for bit in model space, optimizer included; then along the same curve."""
    start = f"--load {archives('mixtral_fp32', 'initial')} --finetune --no-load-optim --no-load-rng"
    cache = f"--data-cache-path {tmp_path / 'cache'}"
    processes, flags = LAYOUTS[saved]
    save = f"--save {tmp_path / 'saved'} --save-interval 5 --exit-interval 5"
    pool.run(train, processes, "mixtral_fp32", f"{flags} {start} {cache} {save}")
    processes, flags = LAYOUTS[loaded]
    convert = f"--ckpt-convert-format torch_dist --ckpt-convert-save {tmp_path}"
    load = f"{flags} --load {tmp_path / 'saved'} {cache}"
    pool.run(train, processes, "mixtral_fp32", f"{load} {convert}")
    copy = open_checkpoint(tmp_path / "torch_dist")
    assert compare(open_checkpoint(tmp_path / "saved"), copy) == len(copy.tensors) == 4 * 17
    check("mixtral_fp32", pool.run(train, processes, "mixtral_fp32", load), first=6)


@pytest.mark.parametrize(
    "form,layout",
    [
        ("ep2_dp_reshardable", "single"),
        ("single_fully_reshardable", "ep2"),
        ("tp2ep2etp2_legacy", "pp2_ep2"),
        ("ep2_nodistopt_legacy", "tp2_ep2_etp2"),
    ],
)
def test_what_megatron_saved_goes_on(pool, tmp_path, archives, form, layout):
    """With its optimizer, at another layout: EP 1 to 2 and back, which Megatron-LM itself cannot do."""
    processes, flags = LAYOUTS[layout]
    load = f"--load {archives('mixtral_fp32', form)} --data-cache-path {tmp_path}"
    check("mixtral_fp32", pool.run(train, processes, "mixtral_fp32", f"{flags} {load}"), first=6)
