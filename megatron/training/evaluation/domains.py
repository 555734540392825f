"""Validation losses by domain: --valid-domain NAME=PATH."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from megatron.core.datasets import Dataset, GPTDatasetConfig
from megatron.training.data.loaders import Split, build_on_one_rank_per_node_first, make_iterator
from megatron.training.data.tokenizer import Tokenizer
from megatron.training.run import DatasetsProvider, Run
from megatron.training.training import evaluate_split


def parse_domains(values: list[str]) -> dict[str, str]:
    """Return the data path of each domain."""
    domains: dict[str, str] = {}
    for value in values:
        name, _, path = value.partition("=")
        if not name or not path:
            raise ValueError(f"--valid-domain {value}: expected NAME=PATH, e.g. code=data/code")
        if name in domains:
            raise ValueError(
                f"--valid-domain {value}: {name} is already {domains[name]}; give another name"
            )
        domains[name] = path
    return domains


def select_domain(data: GPTDatasetConfig, path: str, verify_index_cache: bool) -> GPTDatasetConfig:
    """Return the options of the data of a domain, all of which is its validation split."""
    return replace(
        data,
        data_path=None,
        data_args_path=None,
        train_data_path=None,
        valid_data_path=[path],
        test_data_path=None,
        per_split_data_args_path=None,
        split=None,
        mock_data=False,
        verify_index_cache=verify_index_cache,
    )


def make_domain_evaluation(
    run: Run, tokenizer: Tokenizer, provider: DatasetsProvider
) -> Callable[[], None]:
    """Build the data of all domains, and return a function that evaluates and reports each.

    Every evaluation reads the same samples of a domain, its first --eval-iters global batches, so
    that its losses can be compared. Collective, as is the function.
    """
    config = run.config
    domains = parse_domains(config.training.valid_domain or [])
    num_samples = config.training.eval_iters * run.eval_batch_size

    def build(verify: bool) -> list[Dataset | None]:
        datasets = []
        for path in domains.values():
            data = select_domain(config.data, path, verify)
            _, valid, _ = provider(replace(config, data=data), (0, num_samples, 0), tokenizer)
            datasets.append(valid)
        return datasets

    needs_data = any(map(run.needs_batch, range(len(run.chunks))))
    datasets = build_on_one_rank_per_node_first(build, needs_data) or [None] * len(domains)

    def evaluate_domains() -> None:
        for name, dataset in zip(domains, datasets, strict=True):
            split = Split(True, make_iterator(run, dataset, 0))
            evaluate_split(run, split, f"validation {name}")
            if split.batches is not None:
                split.batches.close()

    return evaluate_domains
