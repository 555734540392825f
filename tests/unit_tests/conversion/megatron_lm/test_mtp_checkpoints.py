"""Layers for multi-token prediction in Megatron-LM's files."""

import dataclasses

import pytest
import torch

from megatron.conversion.editing.edits import SelectedLayers
from megatron.conversion.megatron_lm.legacy_writer import write_legacy
from megatron.conversion.megatron_lm.torch_dist_writer import write_torch_dist
from megatron.conversion.model_space.layouts import Layout
from megatron.conversion.model_space.model import model_tensors
from megatron.conversion.opening import open_checkpoint
from megatron.core.run_checkpoint.keys import build_extra_states
from megatron.core.safe_files import safe_load
from megatron.core.transformer.transformer_config import TransformerConfig
from tests import ROOT
from tests.support.compare import assert_same, read_all
from tests.support.memory_source import LLAMA_ARGS, random_source
from tests.unit_tests.conversion.convert_tool import run_convert
from tests.unit_tests.core.transformer.test_multi_token_prediction import CONFIG

KEYS = ROOT / "tests/golden/megatron_mtp/keys.txt"
ARGS = LLAMA_ARGS | {
    "mtp_num_layers": 2,
    "num_layers": 4,
    "use_distributed_optimizer": True,
    "bf16": True,
}
TIED = ARGS | {"untie_embeddings_and_output_weights": False}
EXPERTS = ARGS | {
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 16,
    "moe_layer_freq": [0, 1, 1, 1],
}


def test_keys_are_those_of_megatron_core():
    tensors = {}
    objects = set()
    for line in KEYS.read_text().splitlines():
        key, _, shape = line.partition(" ")
        if shape:
            tensors[key] = tuple(map(int, shape.split("x")))
        else:
            objects.add(key)
    assert model_tensors(TransformerConfig(**CONFIG)) == tensors
    # Modules of Transformer Engine have more extra states.
    assert objects <= build_extra_states(tensors).keys()
    assert any(key.startswith("mtp.layers.1.eh_proj.") for key in objects)


CASES = [
    (ARGS, Layout.of(4, 2, 2, 2)),
    (TIED, Layout.of(4, 2, 2)),
    (TIED | {"transformer_impl": "local", "use_distributed_optimizer": False}, Layout.of(4, 1, 2)),
    (ARGS, Layout.of(4, 1, 2, 1, {"pipeline_model_parallel_layout": "Et*3|tmmL"})),
    (EXPERTS, Layout.of(4, 2, 2, 1, None, (2, 2))),
]


@pytest.mark.parametrize(("args", "layout"), CASES)
def test_every_form_has_the_same_state(tmp_path, args, layout):
    """torch_dist to legacy files of a layout, and back, with the optimizer."""
    source = random_source(args)
    expected = read_all(source)
    write_torch_dist(source, tmp_path / "sharded")
    sharded = open_checkpoint(tmp_path / "sharded")
    assert_same(read_all(sharded), expected)

    write_legacy(sharded, tmp_path / "legacy", layout)
    legacy = open_checkpoint(tmp_path / "legacy")
    assert legacy.unused == []
    assert legacy.args["mtp_num_layers"] == 2
    assert legacy.tensors.keys() == source.tensors.keys()

    write_torch_dist(legacy, tmp_path / "again")
    again = open_checkpoint(tmp_path / "again")
    assert_same(read_all(again), expected)


def test_legacy_files_of_later_versions_have_another_name(tmp_path):
    """Since 0.17, the module of the layer is `mtp_model_layer`."""
    source = random_source(ARGS)
    write_legacy(source, tmp_path / "legacy", Layout.of(4, 1, 2))
    path = tmp_path / "legacy/mp_rank_00_001/model_optim_rng.pt"
    content = torch.load(path, weights_only=False)
    model = content["model"]
    for name in list(model):
        new_name = name.replace(".transformer_layer.", ".mtp_model_layer.")
        model[new_name] = model.pop(name)
    assert any("mtp.layers.1.mtp_model_layer.mlp" in name for name in model)
    torch.save(content, path)
    renamed = open_checkpoint(tmp_path / "legacy")
    assert_same(read_all(renamed), read_all(source))


def test_legacy_files_of_the_last_stage_have_a_copy_of_the_embedding(tmp_path):
    for args in (ARGS, TIED):
        source = random_source(args)
        directory = tmp_path / f"legacy_{args is TIED}"
        write_legacy(source, directory, Layout.of(4, 1, 2))
        model = safe_load(directory / "mp_rank_00_001" / "model_optim_rng.pt")["model"]
        assert next(iter(model)) == "embedding.word_embeddings.weight"
        assert ("output_layer.weight" in model) == (args is ARGS)
        assert "mtp.layers.1.eh_proj._extra_state" in model


def test_selected_layers_end_with_the_last_one():
    source = random_source(ARGS)
    selected = SelectedLayers(source, (0, 3))
    assert selected.args["num_layers"] == 2
    assert "mtp.layers.1.eh_proj.weight" in selected.tensors
    with pytest.raises(ValueError, match="multi-token prediction are like layer 3"):
        SelectedLayers(source, (0, 1))


def test_implausible_number_of_layers_is_refused(tmp_path):
    source = random_source(ARGS | {"mtp_num_layers": 1})
    source = dataclasses.replace(source, args=ARGS | {"mtp_num_layers": 10**6})
    with pytest.raises(ValueError, match="at most 100 .*MEGATRON_MAX_MTP_LAYERS raises the limit"):
        write_torch_dist(source, tmp_path / "sharded")


def test_other_forms_are_refused(tmp_path):
    source = random_source(ARGS)
    source = dataclasses.replace(source, args=ARGS | {"mtp_use_repeated_layer": True})
    write_torch_dist(source, tmp_path / "sharded")
    with pytest.raises(ValueError, match="mtp_use_repeated_layer"):
        open_checkpoint(tmp_path / "sharded")


def test_layers_can_be_left_out(tmp_path):
    write_torch_dist(random_source(ARGS), tmp_path / "run")
    target = tmp_path / "hf"
    arguments = ("--load-dir", tmp_path / "run", "--save-dir", target, "--saver", "hf")
    refused = run_convert(*arguments)
    assert refused.returncode == 1
    assert "mtp_num_layers = None instead of 2" in refused.stderr

    written = run_convert(*arguments, "--mtp-num-layers", "0", "--save-optim-sidecar")
    assert written.returncode == 0
    assert "multi-token prediction: left out" in written.stdout
    keys = list(open_checkpoint(target).tensors)
    assert len(keys) > 100
    assert not any("mtp." in key for key in keys)
