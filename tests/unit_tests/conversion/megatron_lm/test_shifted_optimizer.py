"""Repair of fully_reshardable optimizer state that Megatron-core up to 0.19.2 stores shifted.

The files are shifted here as Megatron-core does it, from the flat buffers in its own legacy files.
"""

import math

import pytest
import torch

from megatron.conversion.megatron_lm.torch_dist_writer import write_torch_dist
from megatron.conversion.model_space.layouts import Layout, rank_parameters
from megatron.conversion.model_space.optimizer_states import optimizer_key
from megatron.conversion.opening import open_checkpoint
from megatron.core.dist_checkpointing import CheckpointError
from megatron.core.safe_files import safe_load
from tests import ROOT
from tests.support.boxes import index_box
from tests.support.compare import read_all
from tests.support.memory_source import MemorySource
from tools.checkpoint.inspect_checkpoint import main as inspect

GOLDEN = ROOT / "tests/golden/megatron_lm/mcore_0.16.1"
STATES = ("param", "exp_avg", "exp_avg_sq")


def shift(case, directory, dp_size, unpadded):
    """Write the state of a golden file as Megatron-core would with `dp_size` replicas.

    `unpadded` are the sizes of the buckets of each rank. Return the correct values and, by key,
    which elements the files contain.
    """
    legacy = GOLDEN / case / "legacy"
    source = open_checkpoint(legacy)
    correct = read_all(source)
    shifted = {}
    is_stored = {}
    for key, value in correct.items():
        shifted[key] = value.clone()
        is_stored[key] = torch.zeros(value.shape, dtype=torch.bool)

    layout = Layout.from_args(source.args)
    rows = 288 // layout.parallel.tp_size
    for tp, pp in layout.ranks:
        buffers = read_flat_buffers(legacy, layout, tp, pp)
        (chunk,) = rank_parameters(source.config, layout, tp, pp, rows, None, source.args)
        cuts = list_cuts(chunk, list(unpadded[pp]), math.lcm(dp_size, 128))
        is_written = torch.zeros(buffers["numel_unpadded"] + 4096, dtype=torch.bool)
        for parameter, _, cut in cuts:
            is_written[cut : cut + parameter.numel] = True

        for parameter, start, cut in cuts:
            if parameter.info.shared_embedding and pp > 0:
                continue  # the first stage writes it
            for state in STATES:
                key = optimizer_key(state, parameter.key)
                flat = torch.zeros(parameter.numel)  # zeros where the buffer has ended
                written = buffers[state][cut : cut + parameter.numel]
                flat[: len(written)] = written
                for (offset, shape), first in parameter.locate_boxes():
                    slices = index_box(offset, shape)
                    stop = first + math.prod(shape)
                    shifted[key][slices] = flat[first:stop].view(shape)
                    is_stored[key][slices] = is_written[start + first : start + stop].view(shape)

    args = source.args | {"data_parallel_size": dp_size}
    write_torch_dist(MemorySource(args, shifted, source.training), directory / "iter_0000005")
    (directory / "latest_checkpointed_iteration.txt").write_text("5")
    return correct, is_stored


def read_flat_buffers(legacy, layout, tp, pp):
    """Return the flat buffers of the optimizer of one rank."""
    name = f"mp_rank_{tp:02d}"
    if layout.parallel.pp_size > 1:
        name += f"_{pp:03d}"
    chunks = safe_load(legacy / "iter_0000005" / name / "distrib_optim.pt")
    (buffers,) = chunks[0].values()
    return buffers


def list_cuts(chunk, sizes, alignment):
    """Return each parameter with its position in the buffer without and with padding."""
    compact = padded = used = 0
    cuts = []
    for parameter in reversed(chunk):
        start = -(-used // 64) * 64
        if used and sizes[0] in (used, start):  # the bucket is full
            compact += sizes[0]
            padded += -(-sizes.pop(0) // alignment) * alignment
            start = 0
        cuts.append((parameter, compact + start, padded + start))
        used = start + parameter.numel
    return cuts


CASES = {
    "llama_bf16_dp2_buckets": (2, [[4608, 4032, 4736, 3776, 4928]]),
    "gpt2_fp32_tp2pp2": (3, [[5120, 2304], [2304, 4176]]),
}


def repair(directory, target):
    """Return the exit code of the repair of a checkpoint."""
    return inspect(["repair", str(directory), str(target), "--quiet"])


@pytest.mark.parametrize("case", CASES)
def test_repair_restores_every_stored_element(case, tmp_path, capsys):
    dp_size, unpadded = CASES[case]
    correct, is_stored = shift(case, tmp_path / "run", dp_size, unpadded)
    with pytest.raises(CheckpointError, match=r"inspect_checkpoint.py repair"):
        open_checkpoint(tmp_path / "run")
    assert repair(tmp_path / "run", tmp_path / "repaired") == 0

    repaired = open_checkpoint(tmp_path / "repaired")
    assert repaired.tensors.keys() == correct.keys()

    num_lost = 0
    for key, value in read_all(repaired).items():
        if not key.startswith("optimizer."):
            assert torch.equal(value, correct[key]), key
            continue
        is_kept = is_stored[key]
        is_lost = ~is_kept
        assert torch.equal(value[is_kept], correct[key][is_kept]), key
        if ".param." in key:
            num_lost += int(is_lost.sum())
            weight = correct[key.removeprefix("optimizer.state.param.")]
            assert torch.equal(value[is_lost], weight[is_lost].float()), key
        else:
            assert not value[is_lost].any(), key

    assert num_lost > 0
    assert f"{num_lost} elements" in capsys.readouterr().out
    assert repaired.training.iteration == 5
    assert repaired.training.param_groups


def test_correct_checkpoint_is_not_repaired(tmp_path, capsys):
    path = GOLDEN / "llama_fp32_tp2pp2/torch_dist_fully_reshardable"
    assert repair(path, tmp_path / "out") == 2
    assert "needs no repair" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_other_damage_is_not_repaired(tmp_path, capsys):
    """Main parameters that are not shifted, but those of another model, are rejected."""
    source = open_checkpoint(GOLDEN / "llama_bf16_dp2_buckets/legacy")
    values = read_all(source)
    for key in values:
        if ".param." in key:
            values[key] = values[key] + 1
    other_model = MemorySource(source.args, values, source.training)
    write_torch_dist(other_model, tmp_path / "run")

    assert repair(tmp_path / "run", tmp_path / "out") == 2
    assert "is not the stored weight" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
