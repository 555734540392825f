"""Edits of a model: other layers and another vocabulary, compared with numpy and transformers."""

import re
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from safetensors.numpy import load_file, save_file
from torch import nn

from megatron.conversion.checkpoint_conversion import WRITERS, convert
from megatron.conversion.editing.edits import apply_edits
from megatron.conversion.huggingface.directory_writer import write_huggingface
from megatron.conversion.megatron_lm.torch_dist_writer import write_torch_dist
from megatron.conversion.model_space.optimizer_states import ADAM, optimizer_key
from megatron.conversion.opening import open_checkpoint
from megatron.conversion.options import EditOptions, WriteOptions, parse_layers
from megatron.core.dist_checkpointing import Reader, ShardedTensor, load_common, save
from megatron.core.run_checkpoint.keys import WORD_EMBEDDINGS
from tests.support.boxes import index_box
from tests.support.compare import read_whole
from tests.support.memory_source import GPT_ARGS, LLAMA_ARGS, MemorySource, random_source
from tests.unit_tests.conversion.convert_tool import run_convert, run_merge

FORMATS = list(WRITERS)
ROWS = 67  # of the sources
OUTPUT = "output_layer.weight"
OLMO2_ARGS = LLAMA_ARGS | {
    "num_query_groups": LLAMA_ARGS["num_attention_heads"],
    "group_query_attention": False,
    "norm_placement": "post",
    "qk_layernorm": True,
    "qk_layernorm_across_heads": True,
}


def edit(source, **fields):
    options = WriteOptions(edits=EditOptions(**fields))
    return apply_edits(source, options)


def convert_run(tmp_path: Path, source: MemorySource, *flags: object, saver: str = "torch_dist"):
    """Write the source, convert it with `flags`, and return the result and the output."""
    write_torch_dist(source, tmp_path / "run")
    arguments = ("--load-dir", tmp_path / "run", "--save-dir", tmp_path / "out", "--saver", saver)
    done = run_convert(*arguments, "--verify-target", *flags)
    assert done.returncode == 0, done.stderr
    return open_checkpoint(tmp_path / "out"), done.stdout


def logits_of(model, tokens=None) -> torch.Tensor:
    if tokens is None:
        tokens = torch.arange(24).view(2, 12)
    with torch.no_grad():
        return model.eval()(tokens).logits


def load_in_transformers(directory: Path):
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


# ---- Layers ----


@pytest.mark.parametrize(
    "text, layers",
    [
        ("0-2", (0, 1, 2)),
        ("0-3,2-5", (0, 1, 2, 3, 2, 3, 4, 5)),
        ("7", (7,)),
        ("3, 1 ,0-1", (3, 1, 0, 1)),
    ],
)
def test_lists_of_layers(text, layers):
    assert parse_layers(text) == layers


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "its value is empty"),
        ("0-", "'0-' is not a layer"),
        ("a", "'a' is not a layer"),
        ("-1", "'-1' is not a layer"),
        ("3-1", "3-1 ends before it begins"),
        ("0-999999", "more than 10000 layers"),
        ("0-3", "has the layers 0 to 1, not 3"),
    ],
)
def test_bad_layers_are_one_error(tmp_path, text, message):
    write_torch_dist(random_source(LLAMA_ARGS), tmp_path / "run")
    arguments = ("--load-dir", tmp_path / "run", "--save-dir", tmp_path / "out", "--saver", "hf")
    done = run_convert(*arguments, f"--layers={text}")
    assert done.returncode
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("saver", FORMATS)
@pytest.mark.parametrize("layers", ["0-3,2-5", "5,0"])
def test_layers_and_their_optimizer_state_are_those_of_the_source(tmp_path, saver, layers):
    source = random_source(LLAMA_ARGS | {"num_layers": 6, "bf16": True})
    result, _ = convert_run(
        *(tmp_path, source, "--layers", layers, "--save-optim-sidecar"),
        saver=saver,
    )
    selected = parse_layers(layers)
    assert result.args["num_layers"] == len(selected)
    assert result.training.param_groups == source.training.param_groups

    num_compared = 0
    for key, value in source.values.items():
        match = re.fullmatch(r"(.*decoder\.layers\.)(\d+)(\..*)", key)
        if match is None:
            assert torch.equal(read_whole(result, key), value)
            num_compared += 1
            continue
        prefix, layer, suffix = match.groups()
        for new_layer, old_layer in enumerate(selected):
            if old_layer == int(layer):
                new_key = f"{prefix}{new_layer}{suffix}"
                assert torch.equal(read_whole(result, new_key), value), new_key
                num_compared += 1

    assert len(result.tensors) == num_compared


@pytest.mark.parametrize("args", [LLAMA_ARGS, GPT_ARGS], ids=["llama", "gpt2"])
def test_transformers_computes_the_selected_layers(tmp_path, args):
    """Depth up-scaling equals the layers of the original model, called in that order."""
    write_huggingface(
        random_source(args | {"num_layers": 4}, optimizer=False),
        tmp_path / "original",
    )
    arguments = (
        "--load-dir",
        tmp_path / "original",
        "--save-dir",
        tmp_path / "deep",
        "--saver",
        "hf",
    )
    assert run_convert(*arguments, "--layers", "0-2,1-3").returncode == 0

    model = load_in_transformers(tmp_path / "original")
    if hasattr(model, "model"):
        base = model.model
        base.layers = select_modules(base.layers, (0, 1, 2, 1, 2, 3))
    else:
        base = model.transformer
        base.h = select_modules(base.h, (0, 1, 2, 1, 2, 3))
    base.config.num_hidden_layers = 6
    tokens = torch.arange(24).view(2, 12)
    with torch.no_grad():
        expected = model.eval()(tokens, use_cache=False).logits
    deep = load_in_transformers(tmp_path / "deep")
    torch.testing.assert_close(logits_of(deep, tokens), expected, rtol=0, atol=0)


def select_modules(modules, indices):
    return nn.ModuleList([modules[index] for index in indices])


def test_patterns_of_experts_and_windows_move_with_the_layers():
    pattern = {"moe_layer_freq": [0, 1, 1, 0], "num_experts": 4}
    windows = {"window_size": (4, 0), "window_attn_skip_freq": 2}
    stages = {"decoder_first_pipeline_num_layers": 1}
    source = random_source(LLAMA_ARGS | {"num_layers": 4} | pattern | windows)
    source.args |= stages
    result = edit(source, layers=(0, 1, 3, 1))

    assert result.args["moe_layer_freq"] == [0, 1, 0, 1]
    assert result.args["window_attn_skip_freq"] == [1, 0, 0, 0]
    assert "decoder_first_pipeline_num_layers" not in result.args
    with pytest.raises(ValueError, match="none of the selected layers has experts"):
        edit(source, layers=(0, 3))


# ---- Vocabulary ----


@pytest.mark.parametrize("saver", FORMATS)
def test_new_rows_are_the_mean_and_old_rows_are_kept(tmp_path, saver):
    source = random_source(LLAMA_ARGS | {"bf16": True})
    result, _ = convert_run(
        *(tmp_path, source, "--target-vocab-size", 80, "--save-optim-sidecar"),
        saver=saver,
    )
    for key in (WORD_EMBEDDINGS, OUTPUT):
        # Main parameters
        original = source.values[optimizer_key("param", key)]
        main = read_whole(result, optimizer_key("param", key))
        old_rows, new_rows = main.split([ROWS, 80 - ROWS])
        assert main.shape == (80, 32)
        assert torch.equal(old_rows, original)
        mean = original.double().numpy().mean(axis=0)
        expected = np.broadcast_to(mean, new_rows.shape)
        np.testing.assert_allclose(new_rows.double().numpy(), expected, rtol=1e-6, atol=1e-8)

        # Weights and moments
        weight = read_whole(result, key)
        assert torch.equal(weight[ROWS:], new_rows.bfloat16())
        for state in ADAM[1:]:
            moment = read_whole(result, optimizer_key(state, key))
            assert torch.equal(moment[:ROWS], source.values[optimizer_key(state, key)])
            assert not moment[ROWS:].any()

    num_unchanged = 0
    for key, value in source.values.items():
        if WORD_EMBEDDINGS not in key and OUTPUT not in key:
            assert torch.equal(read_whole(result, key), value)
            num_unchanged += 1
    assert num_unchanged > 40


@pytest.mark.parametrize("new_rows", ["mean", "init", "zero"])
@pytest.mark.parametrize("args", [LLAMA_ARGS, GPT_ARGS], ids=["untied", "tied"])
def test_logits_of_old_tokens_are_equal(tmp_path, args, new_rows):
    write_huggingface(random_source(args, optimizer=False), tmp_path / "original")
    arguments = (
        "--load-dir",
        tmp_path / "original",
        "--save-dir",
        tmp_path / "grown",
        "--saver",
        "hf",
    )
    flags = ("--target-vocab-size", 96, "--new-rows", new_rows)
    assert run_convert(*arguments, *flags).returncode == 0

    expected = logits_of(load_in_transformers(tmp_path / "original"))
    actual = logits_of(load_in_transformers(tmp_path / "grown"))
    assert actual.shape[-1] == 96
    torch.testing.assert_close(actual[..., :ROWS], expected, rtol=0, atol=1e-5)


def test_mean_rows_equal_numpy_on_the_same_files(tmp_path):
    write_huggingface(random_source(LLAMA_ARGS, optimizer=False), tmp_path / "original")
    options = WriteOptions(edits=EditOptions(target_vocab_size=70))
    convert(tmp_path / "original", tmp_path / "grown", "hf", options=options)
    old = load_file(tmp_path / "original/model.safetensors")
    new = load_file(tmp_path / "grown/model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        mean = old[name].astype(np.float64).mean(axis=0)
        np.testing.assert_array_equal(new[name][:ROWS], old[name])
        np.testing.assert_allclose(new[name][ROWS:], np.tile(mean, (3, 1)), rtol=1e-6, atol=1e-8)


def test_initial_rows_depend_on_the_seed_only():
    def rows(seed, vocab_size=90, key=WORD_EMBEDDINGS):
        source = random_source(LLAMA_ARGS | {"seed": seed, "init_method_std": 0.5})
        result = edit(source, target_vocab_size=vocab_size, new_rows="init")
        return read_whole(result, optimizer_key("param", key))[ROWS:]

    assert torch.equal(rows(1), rows(1))
    assert torch.equal(rows(1)[:3], rows(1, vocab_size=70))
    assert not torch.equal(rows(1), rows(2))
    assert not torch.equal(rows(1), rows(1, key=OUTPUT))
    assert 0.4 < rows(1, vocab_size=2000).std() < 0.6


def test_boxes_of_a_grown_vocabulary_fit_together():
    result = edit(random_source(LLAMA_ARGS), target_vocab_size=75)
    whole = read_whole(result, WORD_EMBEDDINGS)
    for start, stop in ((0, 10), (60, 70), (66, 67), (67, 75), (70, 72)):
        box = result.tensors[WORD_EMBEDDINGS].read((start, 5), (stop - start, 9))
        assert torch.equal(box, whole[start:stop, 5:14])


def test_sizes_in_the_arguments_follow(tmp_path):
    source = random_source(LLAMA_ARGS)
    sizes = {"vocab_size": 67, "model_vocab_size": 67, "padded_vocab_size": 72}
    source.args |= {**sizes, "make_vocab_size_divisible_by": 8, "tensor_model_parallel_size": 1}
    result = edit(source, target_vocab_size=75)
    assert [result.args[name] for name in sizes] == [75, 75, 80]


def write_tokenizer(directory: Path, count: int) -> None:
    vocabulary = {f"t{token}": token for token in range(count)}
    model = tokenizers.models.WordLevel(vocabulary, unk_token="t0")
    tokenizers.Tokenizer(model).save(str(directory / "tokenizer.json"))


def test_rows_beyond_the_tokenizer_are_removed(tmp_path):
    source = random_source(LLAMA_ARGS, optimizer=False)
    write_huggingface(source, tmp_path / "hf")
    write_tokenizer(tmp_path / "hf", 60)
    arguments = ("--load-dir", tmp_path / "hf", "--save-dir", tmp_path / "out", "--saver", "hf")
    done = run_convert(*arguments, "--target-vocab-size", 59)

    assert done.returncode
    assert "removes rows in use: the tokenizer has 60 tokens" in done.stderr
    assert run_convert(*arguments, "--target-vocab-size", 60).returncode == 0

    result = open_checkpoint(tmp_path / "out")
    for key in (WORD_EMBEDDINGS, OUTPUT):
        assert torch.equal(read_whole(result, key), source.values[key][:60])


def test_without_a_tokenizer_only_zero_rows_are_removed(tmp_path):
    source = random_source(LLAMA_ARGS)
    for key in (WORD_EMBEDDINGS, OUTPUT):
        source.values[key][63:] = 0
    with pytest.raises(ValueError, match=f"row 62 of {WORD_EMBEDDINGS} is not zero.*--tokenizer"):
        edit(source, target_vocab_size=62)

    result = edit(source, target_vocab_size=63)
    for key in (OUTPUT, optimizer_key("exp_avg", OUTPUT)):
        assert torch.equal(read_whole(result, key), source.values[key][:63])

    (tmp_path / "tokenizer").mkdir()
    write_tokenizer(tmp_path / "tokenizer", 50)
    options = WriteOptions(
        edits=EditOptions(target_vocab_size=50),
        tokenizer=tmp_path / "tokenizer",
    )
    assert apply_edits(source, options).tensors[OUTPUT].shape == (50, 32)


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("tokenizer.json", "{", "is not valid JSON"),
        ("tokenizer.json", '{"model": {"vocab": {"a": "b"}}}', "vocab: a is 'b'"),
        ("tokenizer.model", "damaged", "is not a SentencePiece model"),
    ],
)
def test_damaged_tokenizers_are_one_error(tmp_path, name, content, message):
    write_huggingface(random_source(LLAMA_ARGS, optimizer=False), tmp_path / "hf")
    (tmp_path / "hf" / name).write_text(content)
    arguments = ("--load-dir", tmp_path / "hf", "--save-dir", tmp_path / "out", "--saver", "hf")
    done = run_convert(*arguments, "--target-vocab-size", 60)

    assert done.returncode, done.stderr
    assert message in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_merges_can_be_edited(tmp_path):
    sources = [random_source(LLAMA_ARGS, seed=seed) for seed in range(2)]
    for seed, source in enumerate(sources):
        write_torch_dist(source, tmp_path / f"{seed}")
    words = [f"{tmp_path / '0'}:0.5", f"{tmp_path / '1'}:0.5"]
    flags = ("--layers", "1,0,1", "--target-vocab-size", 70)
    done = run_merge("--input", *words, "--output", tmp_path / "out", *flags, "--verify-target")
    assert done.returncode == 0, done.stderr

    result = open_checkpoint(tmp_path / "out")
    name = "mlp.linear_fc2.weight"
    main_key = optimizer_key("param", f"decoder.layers.0.{name}")
    first, second = [source.values[main_key].double() for source in sources]
    actual = read_whole(result, f"decoder.layers.1.{name}").double()
    torch.testing.assert_close(actual, (first + second) / 2, rtol=1e-6, atol=1e-8)
    assert result.tensors[OUTPUT].shape == (70, 32)
    assert result.args["num_layers"] == 3


# ---- Experts ----


@pytest.mark.parametrize("args", [LLAMA_ARGS, GPT_ARGS], ids=["llama", "gpt2"])
@pytest.mark.parametrize("saver", ["torch_dist", "legacy"])
def test_experts_are_copies_of_the_dense_mlp(tmp_path, saver, args):
    source = random_source(args | {"bf16": True})
    result, output = convert_run(
        *(tmp_path, source, "--upcycle-experts", 4, "--topk", 3, "--dtype", "fp32"),
        saver=saver,
    )
    assert "optimizer state: dropped" in output
    assert not result.training.param_groups
    assert result.args["num_experts"] == 4
    assert result.args["moe_router_topk"] == 3

    num_copied = 0
    routers = []
    for key in result.tensors:
        value = read_whole(result, key)
        if ".mlp.router." in key:
            routers.append(value)
            continue
        dense_key = key.replace(".experts.experts.", ".")
        dense_key = dense_key.replace(".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_")
        main = source.values[optimizer_key("param", dense_key)]
        assert torch.equal(value, main.expand(value.shape)), key
        num_copied += 1

    assert num_copied == sum(not key.startswith("optimizer.") for key in source.values)
    for router in routers:
        assert torch.isfinite(router).all()
        assert router.std() > 0
    assert not torch.equal(routers[0], routers[-1])


@pytest.mark.parametrize(
    ("args", "model_type", "topk"),
    [
        (LLAMA_ARGS, "mixtral", 2),
        (LLAMA_ARGS, "mixtral", 3),
        (LLAMA_ARGS, "mixtral", 4),
        (OLMO2_ARGS, "flex_olmo", 2),
    ],
)
def test_equal_experts_compute_the_function_of_the_dense_model(tmp_path, args, model_type, topk):
    write_huggingface(random_source(args, optimizer=False), tmp_path / "dense")
    arguments = (
        "--load-dir",
        tmp_path / "dense",
        "--save-dir",
        tmp_path / "experts",
        "--saver",
        "hf",
    )
    done = run_convert(*arguments, "--upcycle-experts", 4, "--topk", topk)
    assert done.returncode == 0, done.stderr

    experts = load_in_transformers(tmp_path / "experts")
    assert experts.config.model_type == model_type
    assert experts.config.num_experts_per_tok == topk

    expected = logits_of(load_in_transformers(tmp_path / "dense"))
    torch.testing.assert_close(logits_of(experts), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "args, factors",
    [(LLAMA_ARGS, 3), (GPT_ARGS, 2), (GPT_ARGS | {"squared_relu": True}, 3)],
)
def test_experts_are_scaled_without_normalization(args, factors):
    """As in Megatron-LM: 8 experts per token / 2 raises the output to that of the dense model."""
    source = random_source(args | {"moe_router_pre_softmax": True})
    result = edit(source, experts=8, topk=2)
    for name in ("linear_fc1.weight", "linear_fc2.weight"):
        dense = source.values[f"decoder.layers.1.mlp.{name}"].double().numpy()
        actual = read_whole(result, f"decoder.layers.1.mlp.experts.experts.{name}").double().numpy()
        expected = np.broadcast_to(dense * 4 ** (1 / factors), actual.shape)
        np.testing.assert_allclose(actual, expected, rtol=1e-6)

    bias = "decoder.layers.1.mlp.linear_fc2.bias"
    if bias in source.values:
        actual = read_whole(result, bias.replace(".mlp.", ".mlp.experts.experts."))
        assert torch.equal(actual, source.values[bias].expand(8, -1))


def test_boxes_of_experts_fit_together():
    result = edit(random_source(LLAMA_ARGS), experts=4)
    for name in ("experts.experts.linear_fc1.weight", "router.weight"):
        key = f"decoder.layers.0.mlp.{name}"
        whole = read_whole(result, key)
        # Leave out one row, two columns, ... at each end.
        offset = tuple(range(1, 1 + whole.dim()))
        shape = tuple(size - 2 * start for size, start in zip(whole.shape, offset, strict=True))
        box = result.tensors[key].read(offset, shape)
        assert torch.equal(box, whole[index_box(offset, shape)])


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--upcycle-experts", "1"], "has at least 2"),
        (["--upcycle-experts", "4", "--topk", "5"], "--moe-router-topk 5 must be between 1 and"),
        (["--upcycle-experts", "4", "--topk", "1"], "requires --moe-router-pre-softmax"),
        (["--topk", "2"], "--topk 2 requires --upcycle-experts"),
        (
            ["--upcycle-experts", "4", "--moe-shared-expert-intermediate-size", "8"],
            "can be copied from: leave out the flags that add it",
        ),
    ],
)
def test_bad_experts_are_one_error(tmp_path, flags, message):
    write_torch_dist(random_source(LLAMA_ARGS), tmp_path / "run")
    arguments = ("--load-dir", tmp_path / "run", "--save-dir", tmp_path / "out", "--saver", "hf")
    done = run_convert(*arguments, *flags)
    assert done.returncode, done.stderr
    assert message in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_model_with_experts_is_not_upcycled():
    source = random_source(LLAMA_ARGS | {"num_experts": 4})
    with pytest.raises(ValueError, match="already has 4 experts per layer"):
        edit(source, experts=8)


# ---- Names ----


def rename_stored_weights(directory: Path, rename) -> None:
    """Rename the tensors of a model of transformers in its file."""
    path = directory / "model.safetensors"
    weights = {rename(name): value for name, value in load_file(path).items()}
    save_file(weights, path, metadata={"format": "pt"})


def test_foreign_names_of_transformers_are_read_under_new_names(tmp_path):
    source = random_source(LLAMA_ARGS, optimizer=False)
    write_huggingface(source, tmp_path / "hf")
    names = {"lm_head.weight": "head"}
    rename_stored_weights(tmp_path / "hf", lambda name: names.get(name, f"text.{name}"))
    arguments = (
        "--load-dir",
        tmp_path / "hf",
        "--save-dir",
        tmp_path / "out",
        "--saver",
        "torch_dist",
    )
    assert run_convert(*arguments).returncode

    done = run_convert(*arguments, "--rename", "text.*=*", "head=lm_head.weight")
    assert done.returncode == 0, done.stderr

    result = open_checkpoint(tmp_path / "out")
    assert result.tensors.keys() == source.tensors.keys()
    for key, value in source.values.items():
        assert torch.equal(read_whole(result, key), value)


def test_foreign_names_of_torch_dist_are_read_under_new_names(tmp_path):
    source = random_source(LLAMA_ARGS)
    write_torch_dist(source, tmp_path / "run")
    reader = Reader(tmp_path / "run")
    state = {}
    for key, info in reader.metadata.tensors.items():
        value = reader.read(key, (0,) * len(info.shape), info.shape)
        state[key] = ShardedTensor.replicated(key.replace("linear_proj", "dense"), value)
    save(state, tmp_path / "foreign", common=load_common(tmp_path / "run"))
    arguments = ("--load-dir", tmp_path / "foreign", "--save-dir", tmp_path / "out", "--saver")
    assert "linear_proj" in run_convert(*arguments, "torch_dist").stderr

    done = run_convert(*arguments, "torch_dist", "--rename", "*.dense.weight=*.linear_proj.weight")
    assert done.returncode == 0, done.stderr

    result = open_checkpoint(tmp_path / "out")
    assert result.tensors.keys() == source.tensors.keys()
    for key, value in source.values.items():
        assert torch.equal(read_whole(result, key), value)


@pytest.mark.parametrize(
    "renames, message",
    [
        (["a"], "'a' is not OLD=NEW"),
        (["a="], "is not OLD=NEW"),
        (["a*=b"], "need one * each, or none"),
        (["a**=b**"], "need one * each, or none"),
        (["nothing=x"], "--rename nothing=x: Hugging Face directory"),
        (["lm_head.weight=model.norm.weight"], "both become model.norm.weight"),
    ],
)
def test_bad_renames_are_one_error(tmp_path, renames, message):
    write_huggingface(random_source(LLAMA_ARGS, optimizer=False), tmp_path / "hf")
    arguments = ("--load-dir", tmp_path / "hf", "--save-dir", tmp_path / "out", "--saver", "legacy")
    done = run_convert(*arguments, "--rename", *renames)
    assert done.returncode, done.stderr
    assert message in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_names_of_legacy_files_are_fixed(tmp_path):
    write_torch_dist(random_source(LLAMA_ARGS), tmp_path / "run")
    convert(tmp_path / "run", tmp_path / "old", "legacy")
    arguments = ("--load-dir", tmp_path / "old", "--save-dir", tmp_path / "out", "--saver", "hf")
    done = run_convert(*arguments, "--rename", "a=b")
    assert done.returncode
    assert "is a legacy checkpoint; tensors of torch_dist" in done.stderr
