"""The empty extra states that Megatron-core requires."""

import re

import torch.distributed.checkpoint as dcp

from megatron.conversion.megatron_lm.torch_dist import TorchDistSource
from megatron.conversion.megatron_lm.torch_dist_writer import write_torch_dist
from megatron.core.dist_checkpointing import Reader, load_common, read_metadata, save
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.run_checkpoint.keys import build_extra_states, is_extra_state
from tests import ROOT

GOLDEN = ROOT / "tests/golden" / "megatron_lm"
CASE = GOLDEN / "mcore_0.16.1/llama_fp32_tp2pp2/torch_dist_fully_reshardable/iter_0000005"
TRANSFORMER_ENGINE = r".*\.core_attention|decoder\.final_layernorm"


def test_extra_states_contain_those_of_megatron_lm():
    stacked = r"decoder\.layers\.(.*)\._extra_state/shard_(\d+)_\d+"
    theirs = {
        f"decoder.layers.{match[2]}.{match[1]}._extra_state/shard_0_1"
        for key in read_metadata(CASE).objects
        if (match := re.fullmatch(stacked, key))
    }
    ours = set(build_extra_states(TorchDistSource(CASE).tensors))
    more = {
        key
        for key in ours
        if re.match(TRANSFORMER_ENGINE, key.removesuffix("._extra_state/shard_0_1"))
    }

    assert theirs
    assert ours - more == theirs
    assert len(more) == 4 + 1, "attention in each of four layers, and the last norm"
    assert all(is_extra_state(key) for key in ours)


def test_qk_norms_have_extra_states_and_optimizer_tensors_do_not():
    keys = [
        "decoder.layers.7.self_attention.q_layernorm.weight",
        "decoder.layers.7.mlp.linear_fc1.layer_norm_weight",
    ]
    keys += ["optimizer.state.param.decoder.layers.7.mlp.linear_fc1.weight", "output_layer.weight"]
    (entry,) = build_extra_states(keys).values()

    assert entry.key == "decoder.layers.7.self_attention.q_layernorm._extra_state/shard_0_1"
    assert entry.value.numel() == 0


def test_arguments_announce_optimizer_and_generators(tmp_path):
    source = TorchDistSource(CASE)
    write_torch_dist(source, tmp_path / "whole")
    assert (
        build_extra_states(source.tensors).keys()
        <= read_metadata(tmp_path / "whole").objects.keys()
    )

    args = load_common(tmp_path / "whole")["args"]
    assert (args.no_save_optim, args.no_save_rng) == (False, False)

    source.training = None
    write_torch_dist(source, tmp_path / "weights")
    args = load_common(tmp_path / "weights")["args"]
    assert (args.no_save_optim, args.no_save_rng) == (True, True)


def test_shared_object_is_stored_once(tmp_path):
    keys = [f"decoder.layers.{n}.mlp.linear_fc{k}.weight" for n in range(50) for k in (1, 2)]
    state = dict(build_extra_states(keys)) | {"rng": ShardedObject("rng", {"seed": 1})}
    save(state, tmp_path / "c", common={})
    objects = read_metadata(tmp_path / "c").objects

    assert objects.keys() == state.keys()
    assert len(state) == 101
    assert len({objects[key] for key in state}) == 2

    reader = Reader(tmp_path / "c")
    assert reader.read_object("rng") == {"seed": 1}
    assert all(reader.read_object(key) is None for key in state if key != "rng")

    plain = dict.fromkeys([keys[0].replace("weight", "_extra_state/shard_0_1"), "rng"], 0)
    dcp.load(plain, checkpoint_id=tmp_path / "c")
    assert list(plain.values()) == [[None], [{"seed": 1}]]
