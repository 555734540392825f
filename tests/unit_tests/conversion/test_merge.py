"""Merging of checkpoints: sums against numpy in float64, inputs of all formats, refused merges."""

import math
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from megatron import api
from megatron.commands import merging
from megatron.conversion.checkpoint_conversion import WRITERS, convert, write_checkpoint
from megatron.conversion.editing.merged_source import (
    MergedSource,
    compute_schedule_weights,
    find_last_checkpoints,
    parse_input,
)
from megatron.conversion.huggingface.directory_writer import write_huggingface
from megatron.conversion.megatron_lm.torch_dist_writer import write_torch_dist
from megatron.conversion.model_space.optimizer_states import average_key, optimizer_key
from megatron.conversion.opening import open_checkpoint
from megatron.conversion.options import WriteOptions
from megatron.core.dist_checkpointing import write_tracker
from megatron.core.run_checkpoint.formats import NoCheckpointError
from megatron.core.run_checkpoint.keys import is_weight
from tests.support.compare import read_whole
from tests.support.live_tensors import LiveTensors
from tests.support.memory_source import (
    GPT_ARGS,
    LLAMA_ARGS,
    MemorySource,
    random_source,
)
from tests.support.training_harness import LLAMA, train
from tests.unit_tests.conversion.convert_tool import run_merge

FORMATS = list(WRITERS)
WEIGHTS = (0.5, -0.25, 0.45, 0.3)
BF16 = LLAMA_ARGS | {"bf16": True}
QKV = "decoder.layers.1.self_attention.linear_qkv.weight"
# fp32 accumulation of four values.
TOLERANCE = {torch.float32: 4e-7, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def make_run(root: Path, iterations, args=BF16) -> list[MemorySource]:
    """Write a run whose checkpoints differ; return their content."""
    sources = []
    for iteration in iterations:
        source = random_source(args, seed=iteration)
        source.training.iteration = iteration
        write_torch_dist(source, root / f"iter_{iteration:07d}")
        sources.append(source)

    write_tracker(root, iterations[-1])
    return sources


def sum_in_float64(sources, weights, key, state="param") -> np.ndarray:
    total = np.zeros(sources[0].tensors[key].shape, np.float64)
    for source, weight in zip(sources, weights, strict=True):
        summed_key = optimizer_key(state, key) if state else key
        total += weight * source.values[summed_key].double().numpy()
    return total


def assert_merged(result, sources, weights, state="param") -> None:
    """Compare every weight, and main parameter if any, with the sum in float64."""
    for key, info in result.tensors.items():
        if key.startswith("optimizer."):
            continue
        expected = sum_in_float64(sources, weights, key, state)
        actual = read_whole(result, key).double().numpy()
        limit = TOLERANCE[info.dtype] * np.maximum(np.abs(expected), 0.3)
        assert (np.abs(actual - expected) <= limit).all(), key


# ---- Sums ----


@pytest.fixture(scope="module", params=[LLAMA_ARGS, GPT_ARGS], ids=["llama", "gpt2"])
def mixed_inputs(request, tmp_path_factory):
    """Return checkpoints of every format and several dtypes, and the words that name them."""
    directory = tmp_path_factory.mktemp("inputs")
    dtypes = ({"bf16": True}, {"fp16": True}, {}, {"bf16": True})
    sources = [random_source(request.param | dtype, seed=seed) for seed, dtype in enumerate(dtypes)]
    words = []
    for index, form in enumerate(FORMATS):
        write_torch_dist(sources[index], directory / f"run{index}/iter_0000007")
        options = WriteOptions(optim_sidecar=True, tensor_parallel=2, pipeline_parallel=2)
        path = directory / form
        convert(directory / f"run{index}/iter_0000007", path, form, options=options)
        words.append(f"{path}:{WEIGHTS[index]}")
    return sources, words


@pytest.mark.parametrize("saver", FORMATS)
def test_inputs_of_all_formats_and_dtypes_merge_to_every_format(tmp_path, mixed_inputs, saver):
    sources, words = mixed_inputs
    done = run_merge(
        *("--input", *words, "--output", tmp_path / "out", "--saver", saver, "--verify-target")
    )
    assert done.returncode == 0, done.stderr
    assert "verified: " in done.stdout

    result = open_checkpoint(tmp_path / "out")
    has_moments = any(key.startswith("optimizer.") for key in result.tensors)
    assert has_moments == (saver == "universal")  # whose moments are zero
    assert_merged(result, sources, WEIGHTS)


def test_files_of_transformers_merge_like_numpy_arrays(tmp_path):
    for seed in range(3):
        source = random_source(LLAMA_ARGS, optimizer=False, seed=seed)
        write_huggingface(source, tmp_path / f"{seed}")
    words = [f"{tmp_path / '0'}:0.2", f"{tmp_path / '1'}:0.3", f"{tmp_path / '2'}:0.5"]
    done = run_merge("--input", *words, "--output", tmp_path / "out")

    assert done.returncode == 0, done.stderr
    assert "(hf, " in done.stdout, done.stderr

    inputs = [load_file(tmp_path / f"{seed}/model.safetensors") for seed in range(3)]
    merged = load_file(tmp_path / "out/model.safetensors")
    assert merged.keys() == inputs[0].keys()

    for name, value in merged.items():
        first, second, third = [tensors[name].astype(np.float64) for tensors in inputs]
        expected = 0.2 * first + 0.3 * second + 0.5 * third
        np.testing.assert_allclose(value, expected, rtol=1e-6, atol=1e-7)


def test_main_parameters_are_merged_and_rounded_once(tmp_path):
    sources = make_run(tmp_path / "run", [1, 2, 3])
    arguments = ("--input", tmp_path / "run", "--average-last", 3)
    assert run_merge(*arguments, "--output", tmp_path / "bf16").returncode == 0
    assert run_merge(*arguments, "--output", tmp_path / "fp32", "--dtype", "fp32").returncode == 0

    full = open_checkpoint(tmp_path / "fp32")
    rounded = open_checkpoint(tmp_path / "bf16")
    assert full.args["bf16"] is False
    assert rounded.args["bf16"] is True
    assert_merged(full, sources, [1 / 3] * 3)

    sum_of_weights = sum_in_float64(sources, [1 / 3] * 3, QKV, state=None)
    difference = read_whole(full, QKV).double().numpy() - sum_of_weights
    assert np.abs(difference).max() > 1e-4
    for key, info in rounded.tensors.items():
        assert info.dtype == torch.bfloat16
        assert torch.equal(read_whole(rounded, key), read_whole(full, key).bfloat16())


def test_no_optim_merges_the_weights(tmp_path):
    sources = make_run(tmp_path / "run", [1, 2])
    arguments = ("--input", tmp_path / "run", "--average-last", 2, "--dtype", "fp32", "--no-optim")
    assert run_merge(*arguments, "--output", tmp_path / "out").returncode == 0
    assert_merged(open_checkpoint(tmp_path / "out"), sources, [0.5, 0.5], state=None)


def test_weight_of_one_keeps_the_input_bitwise(tmp_path):
    sources = make_run(tmp_path / "run", [1, 2])
    one = f"{tmp_path / 'run/iter_0000001'}:1"
    other = f"{tmp_path / 'run/iter_0000002'}:0"
    assert run_merge("--input", one, other, "--output", tmp_path / "out").returncode == 0
    result = open_checkpoint(tmp_path / "out")
    for key in result.tensors:
        assert torch.equal(read_whole(result, key), sources[0].values[key])


def test_experts_and_router_biases_are_merged(tmp_path):
    experts = {"num_experts": 4, "moe_router_topk": 2, "moe_router_enable_expert_bias": True}
    experts |= {"moe_router_score_function": "sigmoid"}
    sources = [random_source(BF16 | experts, optimizer=False, seed=seed) for seed in range(2)]
    for source in sources:
        for key, value in source.values.items():
            if key.endswith("expert_bias"):
                source.values[key] = value.float()

    merged = MergedSource(sources, [0.75, 0.25], dtype=torch.bfloat16)
    bias = "decoder.layers.0.mlp.router.expert_bias"
    assert merged.tensors[bias].dtype == torch.float32
    assert_merged(merged, sources, [0.75, 0.25], state=None)


def test_normalized_weights(tmp_path):
    sources = make_run(tmp_path / "run", [1, 2])
    words = [f"{tmp_path / 'run/iter_0000001'}:3", f"{tmp_path / 'run/iter_0000002'}:1"]
    done = run_merge("--input", *words, "--normalize", "--output", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "0.75 x " in done.stdout, done.stderr
    assert_merged(open_checkpoint(tmp_path / "out"), sources, [0.75, 0.25])


@pytest.mark.parametrize("choice, index", [("LAST", 2), ("FIRST", 0), ("2", 1)])
def test_optimizer_of_one_input_is_kept(tmp_path, choice, index):
    sources = make_run(tmp_path / "run", [4, 5, 6])
    done = run_merge(
        *("--input", tmp_path / "run", "--average-last", 3, "--optimizer", f"from={choice}"),
        *("--output", tmp_path / "out", "--saver", "legacy", "--verify-target"),
    )
    assert done.returncode == 0, done.stderr

    result = open_checkpoint(tmp_path / "out")
    assert result.training.iteration == 4 + index
    assert result.training.param_groups == sources[index].training.param_groups
    assert_merged(result, sources, [1 / 3] * 3)

    main = sum_in_float64(sources, [1 / 3] * 3, QKV)
    actual = read_whole(result, optimizer_key("param", QKV))
    np.testing.assert_allclose(actual.double().numpy(), main, rtol=4e-7, atol=1e-7)

    for state in ("exp_avg", "exp_avg_sq"):
        key = optimizer_key(state, QKV)
        assert torch.equal(read_whole(result, key), sources[index].values[key])


# ---- Schedules ----


@pytest.mark.parametrize("count", [1, 2, 5, 9])
@pytest.mark.parametrize(
    "schedule, decay",
    [
        ("uniform", lambda x: 1 - x),
        ("linear", lambda x: 1 - x),
        ("one_minus_sqrt", lambda x: 1 - math.sqrt(x)),
    ],
)
def test_schedules_are_learning_rate_decays(schedule, decay, count):
    """Merging checkpoints of a constant learning rate equals decaying the updates between them."""
    updates = np.random.default_rng(0).normal(size=count)
    checkpoints = np.cumsum(updates)  # the first update leads to the first checkpoint
    merged = np.dot(compute_schedule_weights(schedule, count), checkpoints)
    decayed = sum(decay(index / count) * update for index, update in enumerate(updates))
    np.testing.assert_allclose(merged, decayed, rtol=1e-12)


@pytest.mark.parametrize("count", [1, 2, 6])
@pytest.mark.parametrize("decay", [0.0, 0.5, 0.99])
def test_ema_schedule_is_the_recursion(decay, count):
    values = np.random.default_rng(1).normal(size=count)
    average = values[0]
    for value in values[1:]:
        average = decay * average + (1 - decay) * value
    weights = compute_schedule_weights(f"ema:{decay}", count)
    np.testing.assert_allclose(np.dot(weights, values), average, rtol=1e-12)
    assert math.isclose(sum(weights), 1)


def test_schedule_of_listed_inputs(tmp_path):
    sources = make_run(tmp_path / "run", [1, 2, 3])
    paths = [tmp_path / f"run/iter_000000{iteration}" for iteration in (1, 2, 3)]
    done = run_merge("--input", *paths, "--schedule", "ema:0.5", "--output", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert_merged(open_checkpoint(tmp_path / "out"), sources, [0.25, 0.25, 0.5])


# ---- The last checkpoints of a run ----


def names(paths) -> list[str]:
    return [path.name for path in paths]


def test_last_checkpoints_are_complete_and_end_at_the_tracker(tmp_path):
    make_run(tmp_path, [2, 4, 6, 8, 10])
    assert names(find_last_checkpoints(tmp_path, 2)) == ["iter_0000008", "iter_0000010"]
    assert names(find_last_checkpoints(tmp_path, 2, step=6)) == ["iter_0000004", "iter_0000006"]

    (tmp_path / "iter_0000008/metadata.json").unlink()
    assert names(find_last_checkpoints(tmp_path, 2)) == ["iter_0000006", "iter_0000010"]

    write_tracker(tmp_path, 6)
    assert names(find_last_checkpoints(tmp_path, 3)) == [
        *("iter_0000002", "iter_0000004", "iter_0000006")
    ]


def test_copies_under_other_names_are_not_merged(pool, tmp_path):
    """A copied iteration is not one more checkpoint, nor is one of a branch that was left."""
    run = tmp_path / "run"
    flags = f"--mock-data {LLAMA} --save {run} --load {run} --train-iters 12"
    pool.run(train, 1, f"{flags} --save-interval 3")
    pool.run(train, 1, f"{flags} --save-interval 4 --ckpt-step 6 --exit-interval 8")
    for copy in (7, 99):
        shutil.copytree(run / "iter_0000003", run / f"iter_{copy:07d}")
    expected = ["iter_0000003", "iter_0000006", "iter_0000008"]

    assert names(find_last_checkpoints(run, 3)) == expected
    with pytest.raises(NoCheckpointError, match="has 3 complete checkpoints"):
        find_last_checkpoints(run, 4)


@pytest.mark.parametrize(
    ("module", "step", "inputs"),
    [
        (merging, "choose_inputs", ["run", "--average-last", "3"]),
        (api, "MergedSource", ["run", "--average-last", "3"]),
        (api, "MergedSource", ["run/iter_0000001:0.5", "run/iter_0000002:0.5"]),
    ],
)
def test_input_that_its_run_removes_is_named(tmp_path, monkeypatch, module, step, inputs):
    """The run removes the input before the merge opens it, or before the merge reads it."""
    make_run(tmp_path / "run", [1, 2, 3])
    original = getattr(module, step)

    def remove_first(*args):
        result = original(*args)
        shutil.rmtree(tmp_path / "run/iter_0000001")
        return result

    monkeypatch.setattr(module, step, remove_first)
    monkeypatch.chdir(tmp_path)
    result = run_merge("--input", *inputs, "--output", tmp_path / "out")

    assert result.returncode == 1
    assert "iter_0000001 was removed during the merge, perhaps by the run" in result.stderr
    assert not (tmp_path / "out").exists()


def test_averages_of_inputs_are_left_out_with_a_note(tmp_path):
    first, *_ = make_run(tmp_path / "run", [1, 2])
    for key in list(filter(is_weight, first.values)):
        first.values[average_key(key)] = first.values[key].float()
    write_torch_dist(first, tmp_path / "averaged")
    arguments = ["--input", f"{tmp_path / 'averaged'}:0.5", f"{tmp_path / 'run'}:0.5"]
    result = run_merge(*arguments, "--output", tmp_path / "out")

    assert result.returncode == 0, result.stderr
    assert "averages of the weights (ema.*) of the inputs: left out" in result.stdout


def test_averages_are_merged_in_fp32_and_rounded_once(tmp_path):
    paths = []
    sources = []
    for seed in (1, 2):
        source = random_source(BF16, seed=seed)
        averages = random_source(LLAMA_ARGS, optimizer=False, seed=seed + 10)
        for key, value in averages.values.items():
            source.values[average_key(key)] = value.float()
        write_torch_dist(source, tmp_path / f"input-{seed}")
        paths.append(tmp_path / f"input-{seed}")
        sources.append(averages)

    arguments = ["--input", f"{paths[0]}:0.25", f"{paths[1]}:0.75", "--weights", "ema"]
    done = run_merge(*arguments, "--output", tmp_path / "out", "--saver", "hf", "--verify-target")
    assert done.returncode == 0, done.stderr

    result = open_checkpoint(tmp_path / "out")
    assert {info.dtype for info in result.tensors.values()} == {torch.bfloat16}
    assert_merged(result, sources, [0.25, 0.75], state=None)

    run_merge(*arguments, "--output", tmp_path / "fp32", "--dtype", "fp32")
    result = open_checkpoint(tmp_path / "fp32")
    assert not any(key.startswith("optimizer.") for key in result.tensors)
    assert_merged(result, sources, [0.25, 0.75], state=None)


def test_foreign_tensors_are_merged_and_codes_must_be_equal(tmp_path):
    foreign = {"foreign.a": torch.randn(3, 2), "foreign.codes": torch.arange(4, dtype=torch.int8)}
    inputs = []
    for index in range(3):
        source = random_source(LLAMA_ARGS, optimizer=False)
        source.values |= foreign | {"foreign.a": foreign["foreign.a"] * (index + 1)}
        if index == 2:
            source.values["foreign.codes"] = foreign["foreign.codes"] + 1
        write_torch_dist(source, tmp_path / f"{index}")
        inputs.append(f"{tmp_path / str(index)}:0.5")

    flags = ["--saver", "hf", "--keep-foreign"]
    done = run_merge("--input", *inputs[:2], "--output", tmp_path / "out", *flags)
    assert done.returncode == 0, done.stderr
    assert "foreign, merged: codes" in done.stdout

    merged = torch.from_numpy(load_file(tmp_path / "out" / "model.safetensors")["a"])
    torch.testing.assert_close(merged, 1.5 * foreign["foreign.a"])

    # Other codes, and a missing tensor.
    done = run_merge("--input", *inputs[1:], "--output", tmp_path / "other", *flags)
    assert "codes (torch.int8) differs from that of" in done.stderr

    write_torch_dist(random_source(LLAMA_ARGS, optimizer=False), tmp_path / "without")
    arguments = [
        "--input",
        inputs[0],
        f"{tmp_path / 'without'}:0.5",
        "--output",
        tmp_path / "other",
    ]
    assert "a has shape None in" in run_merge(*arguments, *flags).stderr

    note = "unused tensors are merged with --keep-foreign"
    assert note in run_merge(*arguments, "--saver", "hf").stdout


@pytest.mark.parametrize("form", ["legacy", "universal"])
def test_last_checkpoints_of_other_formats(tmp_path, form):
    sources = make_run(tmp_path / "run", [8, 9])
    for iteration in (8, 9):
        converted = tmp_path / f"converted{iteration}"
        convert(tmp_path / f"run/iter_{iteration:07d}", converted, form)
        (tmp_path / "other").mkdir(exist_ok=True)
        for path in converted.iterdir():
            path.rename(tmp_path / "other" / path.name)

    done = run_merge(
        *("--input", tmp_path / "other", "--average-last", 2, "--output", tmp_path / "out")
    )
    assert done.returncode == 0, done.stderr
    assert f"({form}, " in done.stdout, done.stderr
    assert_merged(open_checkpoint(tmp_path / "out"), sources, [0.5, 0.5])


# ---- Refused merges ----


@pytest.fixture(scope="module")
def named_inputs(tmp_path_factory):
    """Return the paths of a run, of its checkpoints a and b, and of other models, by name."""
    root = tmp_path_factory.mktemp("named_inputs")
    paths = {name: root / name for name in ("run", "other", "hf")}
    paths["a"] = root / "run/iter_0000001"
    paths["b"] = root / "run/iter_0000002"
    make_run(paths["run"], [1, 2])
    write_torch_dist(random_source(GPT_ARGS), paths["other"])
    write_huggingface(random_source(LLAMA_ARGS, optimizer=False), paths["hf"])
    return paths


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["{a}:0.5", "{b}:0.6"], "the weights 0.5, 0.6 sum to 1.1, not 1"),
        (["{a}:1", "{b}:-1", "--normalize"], "the weights sum to 0 and cannot be scaled"),
        (["{a}", "{b}:1"], "has no weight: append one"),
        (["{a}:nan", "{b}:1"], "the weight must be a finite number"),
        (["{a}:1", "{b}", "--schedule", "uniform"], "are mutually exclusive"),
        (["{a}", "--schedule", "cosine"], "--schedule cosine is not one of uniform, linear"),
        (["{a}", "--schedule", "ema"], "DECAY must be at least 0 and less than 1"),
        (["{a}", "--schedule", "ema:1"], "DECAY must be at least 0 and less than 1"),
        (["{run}", "--average-last", "4"], "has 2 complete checkpoints (iter_0000002"),
        (["{run}", "--average-last", "0"], "--average-last must be at least 1, got 0"),
        (["{run}", "--average-last", "1", "--ckpt-step", "9"], "--ckpt-step 9: "),
        (["{run}", "--average-last", "1", "--ckpt-step", "1", "--schedule", "x"], "is not one of"),
        (["{a}", "--average-last", "2"], "is one checkpoint, not the directory of a run"),
        (["{run}:1", "--average-last", "2"], "takes one --input"),
        (["{run}", "{a}", "--average-last", "2"], "takes one --input"),
        (["{a}:1", "--ckpt-step", "1"], "--ckpt-step 1 requires --average-last"),
        (["{a}:1", "--optimizer", "from=2"], "from=N with N from 1 to 1"),
        (["{a}:1", "--optimizer", "last"], "give from=LAST, from=FIRST"),
        (["{a}:1", "--optimizer", "from=LAST", "--no-optim"], "are mutually exclusive"),
        (["{hf}:1", "--optimizer", "from=LAST"], "has no optimizer state"),
        (["{a}:1", "--weights", "ema"], "has no average of"),
        (["{a}:1", "--weights", "ema", "--optimizer", "from=1"], "are mutually exclusive"),
        (["{a}:1", "--foreign-split", "a=0"], "--foreign-split requires --keep-foreign"),
        (["{a}:1", "{other}:0"], "is another model than"),
        (["{a}:1", "/nowhere:0"], "/nowhere: no such directory"),
        (["{a}:1", "--lr", "3"], "--lr"),
    ],
)
def test_bad_command_lines_are_one_error(named_inputs, tmp_path, arguments, message):
    arguments = [argument.format(**named_inputs) for argument in arguments]
    done = run_merge("--input", *arguments, "--output", tmp_path / "out")

    assert done.returncode, done.stderr
    assert message in done.stderr, done.stderr
    assert "error: " in done.stderr
    assert not (tmp_path / "out").exists()


def test_other_models_are_refused_with_every_difference():
    one = random_source(LLAMA_ARGS)
    other = random_source(LLAMA_ARGS | {"num_query_groups": 4, "rotary_base": 500}, vocab_size=71)
    other.description = "b"

    with pytest.raises(ValueError) as caught:
        MergedSource([one, other], [0.5, 0.5])

    message = str(caught.value)
    assert message.startswith("b is another model than checkpoint in memory: ")

    for difference in (
        "--vocab-size is 71, not 67",
        "--num-query-groups is 4, not 2",
        "--rotary-base is 500, not 10000",
    ):
        assert difference in message

    assert message.count(";") == 2


def test_arguments_without_effect_do_not_matter():
    one = random_source(LLAMA_ARGS)
    other = random_source(LLAMA_ARGS | {"bf16": True, "hidden_dropout": 0.3, "rope_type": "rope"})
    MergedSource([one, other], [0.5, 0.5])


def test_output_that_contains_an_input_is_refused(tmp_path):
    make_run(tmp_path / "run", [1, 2])
    for target in (tmp_path / "run", tmp_path / "run/iter_0000001"):
        arguments = ("--input", tmp_path / "run", "--average-last", 2)
        done = run_merge(*arguments, "--output", target, "--overwrite")
        assert done.returncode
        assert "which would be lost" in done.stderr
    assert names(find_last_checkpoints(tmp_path / "run", 2)) == ["iter_0000001", "iter_0000002"]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_values_that_are_not_finite_are_refused_with_their_input(tmp_path, bad):
    sources = [random_source(LLAMA_ARGS, seed=seed) for seed in range(2)]
    sources[1].values[optimizer_key("param", QKV)][3, 4] = bad
    sources[1].description = "b"
    merged = MergedSource(sources, [0.5, 0.5])
    with pytest.raises(ValueError, match=f"^b: {QKV} contains values that are not finite"):
        write_checkpoint(merged, [], tmp_path / "out", "hf")
    assert os.listdir(tmp_path) == []


def test_values_out_of_range_are_refused():
    sources = [random_source(LLAMA_ARGS, seed=seed) for seed in range(2)]
    for source in sources:
        source.values[optimizer_key("param", QKV)][0, 0] = 60000.0
    merged = MergedSource(sources, [0.6, 0.6], dtype=torch.float16)
    with pytest.raises(ValueError, match=r"exceeds the range of torch.float16 .*72000"):
        read_whole(merged, QKV)


def test_paths_with_colons():
    assert parse_input("s3://bucket/run") == ("s3://bucket/run", None)
    assert parse_input("s3://bucket/run:0.5") == ("s3://bucket/run", 0.5)
    assert parse_input("a:b") == ("a:b", None)
    assert parse_input("a:-1e-1") == ("a", -0.1)


# ---- Memory ----


@pytest.fixture(scope="module")
def large_inputs(tmp_path_factory):
    """Write four checkpoints that are larger than blocks; return them and the bytes of one."""
    args = {**LLAMA_ARGS, "hidden_size": 64, "num_layers": 1, "bf16": True}
    directories = []
    for seed in range(4):
        source = random_source(args, vocab_size=150_000, optimizer=False, seed=seed)
        directories.append(tmp_path_factory.mktemp("large"))
        write_torch_dist(source, directories[-1])
    return directories, sum(info.nbytes for info in source.tensors.values())


# Saves as torch_dist compute in threads, whose tensors LiveTensors does not count;
# benchmarks/merge.py measures their memory.
@pytest.mark.parametrize("saver", [each for each in FORMATS if each != "torch_dist"])
def test_memory_is_a_few_blocks(large_inputs, tmp_path, saver):
    """Tensors in memory at once are small compared to the inputs."""
    directories, nbytes = large_inputs
    words = [f"{directory}:0.25" for directory in directories]
    with LiveTensors() as tensors:
        done = run_merge(
            *("--input", *words, "--output", tmp_path / "out", "--saver", saver, "--workers", 1)
        )

    assert done.returncode == 0, done.stderr
    assert 0 < tensors.peak < 4 * nbytes, (tensors.peak, nbytes)
