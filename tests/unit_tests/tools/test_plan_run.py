"""The command line of tools/plan_run.py: known models, verdicts, errors."""

import importlib.util
import json
import math
import re

import pytest

from megatron.planning.save_intervals import find_best_interval
from megatron.training.reporting.run_record import RunRecord
from tests import ROOT
from tests.support.programs import run_program

spec = importlib.util.spec_from_file_location("plan_run_tool", ROOT / "tools/plan_run.py")
assert spec is not None
assert spec.loader is not None
tool = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tool)


def model(name: str) -> list[str]:
    lines = (ROOT / f"examples/models/{name}.args").read_text().splitlines()
    return [word for line in lines if not line.startswith("#") for word in line.split()]


LLAMA_8B = [
    *model("llama_8b"),
    "--vocab-size",
    "128256",
    "--mock-data",
    "--global-batch-size",
    "64",
]


def test_known_sizes(capsys):
    """Llama-3-8B has 8.03B parameters; bf16 weights and fp32 main parameters and moments are 14
    bytes each.
    """
    assert tool.main(["--world-size", "8", *LLAMA_8B, "--pipeline-model-parallel-size", "8"]) == 0
    text = capsys.readouterr().out
    topics = {line[3:14].strip(): line[15:] for line in text.splitlines() if line.startswith("   ")}

    assert topics["parameters"].startswith("8.03B, ")
    assert topics["layout"].startswith("TP 1 x PP 8 x DP 1")
    assert topics["checkpoint"].startswith("112.42 GB")
    assert topics["bubble"] == "9.9 % of a step"  # 7 / (64 + 7)


def test_runs_that_do_not_fit_list_alternatives(capsys):
    arguments = [
        "--world-size",
        "8",
        "--device-memory-gb",
        "80",
        *LLAMA_8B,
        "--tensor-model-parallel-size",
        "2",
    ]
    assert tool.main(arguments) == 1
    lines = capsys.readouterr().out.splitlines()

    assert any(line.startswith("WILL NOT FIT: ") for line in lines)
    assert any(line.startswith("  with --use-distributed-optimizer: fits: ") for line in lines)
    assert tool.main([*arguments, "--use-distributed-optimizer"]) == 0
    assert "\nfits: " in capsys.readouterr().out


def test_reserve_is_subtracted_from_the_device_memory(capsys):
    arguments = [
        "--device-memory-gb",
        "80",
        *model("llama_1b"),
        "--vocab-size",
        "128256",
        "--mock-data",
    ]
    assert tool.main(arguments) == 0
    assert tool.main([*arguments, "--reserve-gb", "60"]) == 1
    assert "a reserve of 60.00 GB" in capsys.readouterr().out


def test_flags_of_the_run_are_not_abbreviations_of_options():
    options, flags = tool.parse(["--world-size", "2", "--device", "cpu", "--memory", "1"])
    assert options.device_memory_gb is None
    assert flags == ["--device", "cpu", "--memory", "1"]


def test_errors_are_those_of_the_training_program():
    with pytest.raises(ValueError, match="world size 8 is not a multiple of tensor"):
        tool.main(["--world-size", "8", *LLAMA_8B, "--tensor-model-parallel-size", "3"])
    with pytest.raises(ValueError, match="unknown flag --num-layer"):
        tool.main(["--num-layer", "4"])


def test_json_equals_the_table(capsys):
    arguments = ["--world-size", "8", "--device-memory-gb", "80", *LLAMA_8B]
    arguments += ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]
    status = tool.main(arguments)
    rows = {}
    for line in capsys.readouterr().out.splitlines():
        name = line[2:25].strip()
        rows[name] = line[25:].split()
    assert tool.main([*arguments, "--json"]) == status
    answer = json.loads(capsys.readouterr().out)
    assert answer["fits"] == (status == 0)

    # Rows of the table
    stages = answer["stages"]
    memories = [stage["memory"] for stage in stages]
    assert rows["weights"] == [f"{memory['weights'] / 1e9:.2f}" for memory in memories]
    assert rows["logits and loss"] == [f"{memory['loss'] / 1e9:.2f}" for memory in memories]
    assert rows["total memory"] == [f"{memory['total'] / 1e9:.2f}" for memory in memories]

    # The values of each stage
    for memory in memories:
        assert sum(memory.values()) == 2 * memory["total"]
    assert answer["num_parameters"] == 8030261248
    num_parameters_of_tp_rank = sum(stage["num_parameters"] for stage in stages)
    assert num_parameters_of_tp_rank * 2 > answer["num_parameters"]
    assert [memory["loss"] > 0 for memory in memories] == [False, True]
    assert [stage["passes_in_flight"] for stage in stages] == [2, 1]


def test_json_lists_alternatives(capsys):
    arguments = ["--json", "--world-size", "8", "--device-memory-gb", "80", *LLAMA_8B]
    assert tool.main([*arguments, "--tensor-model-parallel-size", "2"]) == 1
    answer = json.loads(capsys.readouterr().out)
    worst = max(stage["memory"]["total"] for stage in answer["stages"])
    ways = {way["flags"]: way for way in answer["alternatives"]}

    assert all(
        way["memory"] < worst and way["fits"] == (way["memory"] + 4e9 <= 80e9)
        for way in ways.values()
    )
    assert ways["--use-distributed-optimizer"]["fits"]


def test_notes_are_printed(capsys):
    arguments = ["--world-size", "8", *LLAMA_8B, "--sequence-parallel"]
    assert tool.main(arguments) == 0
    assert "note: --sequence-parallel is off" in capsys.readouterr().out


@pytest.mark.parametrize(("cost", "mtbf"), [(0.01, 3600.0), (5.0, 10800.0), (60.0, 3600.0)])
def test_save_interval_minimizes_lost_time(cost, mtbf):
    """Against the expected time per second of training of an exponential failure law, searched by
    hand.
    """
    waste = lambda seconds: math.expm1((seconds + cost) / mtbf) * mtbf / seconds  # noqa: E731
    best = min(
        (find_best_interval(cost, mtbf) * 1.01**step for step in range(-300, 300)), key=waste
    )
    assert find_best_interval(cost, mtbf) == pytest.approx(best, rel=0.02)


def test_save_intervals_from_a_recorded_run(tmp_path, capsys):
    """A local save that blocks 0.05 s and a failure every 2 h; a persistent one takes longer than
    its best interval.
    """
    record = RunRecord(tmp_path, clock=lambda: 10.0)
    record.write("start", iteration=0, began=0.0, loading=2.0)
    record.write("interval", iteration=10, iterations=10, seconds=5.0)
    for prefix, blocked, total in (("local-", 0.05, 1.0), ("", 0.1, 700.0)):
        times = {f"{prefix}save-blocking-time": blocked, f"{prefix}save-total-time": total}
        record.write("point", iteration=10, values=times)
    assert tool.main([*LLAMA_8B, "--mtbf-hours", "2", "--measured", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    seconds = find_best_interval(0.05, 7200)

    assert (
        f"--non-persistent-save-interval {round(seconds / 0.5)}: every {seconds:.0f} s, for a "
        "failure every 2 h" in text
    )
    assert "--save-interval 1400: every 700 s, for a failure every 20 h" in text
    assert "a restart 10 s" in text
    with pytest.raises(ValueError, match="--measured"):
        tool.main([*LLAMA_8B, "--mtbf-hours", "2"])


def test_goodput_of_both_tiers(capsys):
    """A short local interval loses less than the persistent tier alone."""
    arguments = ["--world-size", "8", *LLAMA_8B, "--use-distributed-optimizer"]
    arguments += ["--goodput", "--step-seconds", "10", "--mtbf-hours", "2", "--save", "/s"]
    arguments += ["--storage-gbps", "1"]
    shares = []
    local = ["--non-persistent-ckpt-type", "local", "--non-persistent-local-ckpt-dir", "/local"]
    local += ["--non-persistent-save-interval", "100", "--replication"]

    for flags in ([], local):
        assert tool.main([*arguments, "--save-interval", "500", *flags]) == 0
        lines = capsys.readouterr().out.splitlines()[-2:]
        given, best = (float(re.search(r"([\d.]+) % progress", line)[1]) for line in lines)
        assert given < best
        shares.append(best)
        assert ("--non-persistent-save-interval" in lines[1]) == bool(flags)

    assert shares[0] < shares[1]
    with pytest.raises(ValueError, match="--goodput requires --step-seconds"):
        tool.main([*LLAMA_8B, "--goodput"])


LLAMA_70B = [*model("llama_70b"), "--vocab-size", "128256", "--mock-data"]
MIXTRAL = [
    *model("llama_8b"),
    *("--vocab-size", "32000", "--mock-data", "--global-batch-size", "256"),
    *("--num-experts", "8", "--moe-router-topk", "2"),
]


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (8, LLAMA_8B),
        pytest.param(64, [*LLAMA_70B, "--global-batch-size", "128"], marks=pytest.mark.slow),
        pytest.param(16, [*MIXTRAL, "--expert-model-parallel-size", "2"], marks=pytest.mark.slow),
    ],
    ids=["8B", "70B", "8 experts"],
)
def test_every_layout_of_a_search_fits_as_flags(ranks, flags, capsys):
    arguments = ["--json", "--world-size", str(ranks), "--device-memory-gb", "80", *flags]
    assert tool.main([*arguments, "--search", "4"]) == 0
    layouts = json.loads(capsys.readouterr().out)["layouts"]

    assert len(layouts) == 4
    assert [layout["seconds"] for layout in layouts] == sorted(
        layout["seconds"] for layout in layouts
    )

    for layout in layouts:
        assert tool.main([*arguments, *layout["flags"].split()]) == 0
        plan = json.loads(capsys.readouterr().out)
        memory = max(stage["memory"]["total"] for stage in plan["stages"])
        assert memory == layout["memory"] <= 76e9
        assert plan["bubble"] == layout["bubble"]
        wire = [sum(axis["wire"] for axis in stage["traffic"].values()) for stage in plan["stages"]]
        assert max(wire) == layout["traffic"]


def test_search_follows_when_no_single_change_fits(capsys):
    arguments = ["--world-size", "8", "--device-memory-gb", "24", *LLAMA_8B[:-2]]
    assert tool.main([*arguments, "--global-batch-size", "64"]) == 1
    text = capsys.readouterr().out

    assert ": fits: " not in text
    assert "layouts that fit" in text
    # Without a batch size, layouts cannot be compared.
    assert tool.main(arguments) == 1
    assert "layouts that fit" not in capsys.readouterr().out


def test_search_without_a_layout_that_fits(capsys):
    arguments = ["--search", "--world-size", "2", "--device-memory-gb", "16", *LLAMA_8B]
    assert tool.main(arguments) == 1
    assert "no layout of 2 ranks fits" in capsys.readouterr().out
    with pytest.raises(ValueError, match="leave out --num-layers-per-virtual-pipeline-stage"):
        tool.main([*arguments, "--num-layers-per-virtual-pipeline-stage", "2"])
    with pytest.raises(ValueError, match="requires --device-memory-gb"):
        tool.main(["--search", "3", *LLAMA_8B])


def test_units_fit_the_size(capsys):
    flags = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --mock-data "
    flags += "--micro-batch-size 1 --tokenizer-type NullTokenizer --vocab-size 127"
    assert tool.main(["--device-memory-gb", "80", *flags.split()]) == 0
    text = capsys.readouterr().out
    assert "kB per rank of stage" in text

    weights = next(line for line in text.splitlines() if line.startswith("  weights "))
    assert float(weights.split()[1]) > 1
    assert re.search(r"fits: [0-9.]+ kB and", text)


def test_arguments_of_a_checkpoint(tmp_path, capsys):
    """--use-checkpoint-args plans the stored model."""
    tiny = "--num-layers 3 --hidden-size 48 --num-attention-heads 4 --seq-length 32 --mock-data "
    tiny += "--micro-batch-size 1 --tokenizer-type NullTokenizer --vocab-size 127 --lr 1e-3 "
    tiny += f"--train-iters 1 --save {tmp_path}/run --log-interval 1 --eval-iters 0"
    trained = run_program(ROOT / "pretrain_gpt.py", *tiny.split(), "--num-workers", 0)
    assert trained.returncode == 0, trained.stderr

    flags = ["--use-checkpoint-args", "--load", f"{tmp_path}/run", "--micro-batch-size", "1"]
    assert tool.main(["--json", *flags, "--mock-data"]) == 0
    planned = json.loads(capsys.readouterr().out)

    assert tool.main(["--json", *tiny.split()]) == 0
    assert planned["num_parameters"] == json.loads(capsys.readouterr().out)["num_parameters"]
