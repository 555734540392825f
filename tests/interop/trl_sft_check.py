"""Compare trl's SFTTrainer and DPOTrainer with the golden losses that `make test` compares with ours.

    python -m tests.interop.trl_sft_check PYTHON WORK [--write]

PYTHON is an interpreter with trl, and WORK an empty directory. With --write the golden file is
replaced.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from megatron.training.config.checkpoint_args import read_checkpoint_args
from megatron.training.config.parsing import parse_args
from megatron.training.data.tokenizer import build_tokenizer
from megatron.training.sft.dataset import SFTDataset, build_sft_datasets, shuffle_rows
from tests.support import sft_runs
from tests.support.sft_runs import CASES, GLOBAL_BATCH, GOLDEN, STEPS


def list_batches(flags: str) -> list[list[int]]:
    """Return the records of each global batch of a run of ours."""
    argv = shlex.split(flags)
    config = parse_args(argv, 1, read_checkpoint_args(argv, 1))
    tokenizer = build_tokenizer(config.tokenizer)
    dataset, _, _ = build_sft_datasets(config, (STEPS * GLOBAL_BATCH, 0, 0), tokenizer)
    assert isinstance(dataset, SFTDataset)

    per_record = dataset.corpus.examples_per_record
    batches = []
    for step in range(STEPS):
        records = []
        for sample in range(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH):
            epoch, position = divmod(sample, dataset.num_rows)
            row = shuffle_rows(config.data.seed, epoch, dataset.num_rows)[position]
            examples = dataset.get_examples(int(row))
            records += [example // per_record for example in examples[::per_record]]
        batches.append(records)
    return batches


def main() -> None:
    python, work = sys.argv[1], Path(sys.argv[2])
    tokenizer = sft_runs.write_tokenizer(work / "tokenizer")
    shutil.copytree(sft_runs.MODEL, work / "model")
    cases = {}
    for name, (data, packing) in CASES.items():
        batches = list_batches(sft_runs.make_flags(tokenizer, work, data, packing))
        cases[name] = {
            "data": str(GOLDEN / data),
            "batches": batches,
            # A row contains one sequence, or two.
            "max_length": sft_runs.SEQ_LENGTH // (2 if "--dpo" in packing else 1) + 1,
        }

    (work / "cases.json").write_text(json.dumps(cases))
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    script = str(Path(__file__).with_name("trl_sft_train.py"))
    subprocess.run([python, script, str(work)], check=True, env=environment)
    results = json.loads((work / "trl.json").read_text())
    golden_file = GOLDEN / "trl.json"
    if "--write" in sys.argv:
        text = json.dumps(results).replace('}, {"', '},\n{"').replace('"losses"', '\n"losses"')
        golden_file.write_text(text + "\n")
    golden = json.loads(golden_file.read_text())
    assert results.keys() == golden.keys()

    for name, result in results.items():
        assert result["examples"] == golden[name]["examples"], name
        assert result["batches"] == golden[name]["batches"], name
        pairs = zip(result["losses"], golden[name]["losses"], strict=True)
        error = max(abs(loss - expected) for loss, expected in pairs)
        assert error <= 1e-5, f"{name}: losses differ by {error}"
        print(f"trl: {name}: {len(result['losses'])} losses within {error:.1e}", flush=True)


if __name__ == "__main__":
    main()
