"""Tasks of lm-eval on the model of a run: --eval-tasks."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

from megatron.training.data.loaders import build_on_one_rank_per_node_first
from megatron.training.data.tokenizer import TOKENIZERS, Tokenizer
from megatron.training.data.tokenizer_libraries import load_huggingface
from megatron.training.evaluation.scoring import ScoredSequence, score_sequences
from megatron.training.reporting.console import report_line
from megatron.training.run import Run

try:
    import lm_eval
    from lm_eval import utils
    from lm_eval.api.model import TemplateLM
    from lm_eval.tasks import TaskManager
except ImportError:
    raise ValueError(
        '--eval-tasks needs the package lm-eval: pip install "megatron-compact[eval]"'
    ) from None

FEWSHOT_SEED = 1234  # lm-eval's default


class RunModel(TemplateLM):  # type: ignore[misc]
    """The model of a run, for lm-eval. All ranks make the same requests.

    Texts have the tokens that lm-eval gives them for the export of the run: a tokenizer of
    `transformers` adds its special tokens, and a text without context follows BOS, if there is one.
    """

    def __init__(self, run: Run, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._training_run = run
        self._text_tokenizer = tokenizer
        self._huggingface: Any = None
        # Llama2Tokenizer begins every text with BOS.
        self._prefix = [*tokenizer.tokenize(""), tokenizer.eod][0]
        if TOKENIZERS[tokenizer.config.kind].endswith(":build_huggingface"):
            self._huggingface = load_huggingface(tokenizer.config)
            if self._huggingface.bos_token_id is not None:
                self._prefix = self._huggingface.bos_token_id

    @property
    def eot_token_id(self) -> int:
        return self._text_tokenizer.eod

    @property
    def max_length(self) -> int:
        return self._training_run.config.data.seq_length

    @property
    def prefix_token_id(self) -> int:
        return self._prefix

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        if self._huggingface is None:
            return self._text_tokenizer.tokenize(string)
        if add_special_tokens is None:
            prefix = self._huggingface.decode(self._prefix)
            add_special_tokens = not string.startswith(prefix)
        tokens: list[int] = self._huggingface.encode(string, add_special_tokens=add_special_tokens)
        return tokens

    def _loglikelihood_tokens(
        self, requests: list[Any], *args: Any, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Score requests of (texts, context, continuation); contexts are cut at their beginning."""
        sequences = []
        for _, context, continuation in requests:
            tokens = (context + continuation)[-(self.max_length + 1) :]
            sequences.append(ScoredSequence(tokens, min(len(continuation), len(tokens) - 1)))
        scores = score_sequences(self._training_run, sequences, self._text_tokenizer.eod)
        return [(score.log_likelihood, score.is_greedy) for score in scores]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each whole text, in windows of --seq-length tokens."""
        windows: list[Any] = []
        owners: list[int] = []
        for index, request in enumerate(requests):
            for window in utils.get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            ):
                windows.append((None, *utils.make_disjoint_window(window)))
                owners.append(index)
        totals = [0.0] * len(requests)
        for index, (log_likelihood, _) in zip(
            owners, self._loglikelihood_tokens(windows), strict=True
        ):
            totals[index] += log_likelihood
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        raise AssertionError("load_tasks refuses tasks that generate text")


def make_task_evaluation(run: Run, tokenizer: Tokenizer) -> Callable[[], None]:
    """Load the tasks, and return a function that evaluates and reports them. Collective."""
    names, folders = parse_tasks(run.config.training.eval_tasks or [])

    def load(is_first: bool) -> TaskManager:
        return load_tasks(names, folders)

    with quiet_except_on_first_rank(run):
        manager = build_on_one_rank_per_node_first(load, needs_data=True)
        model = RunModel(run, tokenizer)

    def evaluate_tasks() -> None:
        with quiet_except_on_first_rank(run):
            results = lm_eval.simple_evaluate(
                model,
                tasks=names,
                limit=run.config.training.eval_tasks_limit,
                task_manager=manager,
                bootstrap_iters=0,
                log_samples=False,
                # The random states of training stay as they are.
                random_seed=None,
                numpy_random_seed=None,
                torch_random_seed=None,
                fewshot_random_seed=FEWSHOT_SEED,
            )
        # Ranks with another LOCAL_RANK than 0 have no results.
        if run.ps.rank == 0:
            report_scores(run, list_scores(results["results"]))

    return evaluate_tasks


@contextmanager
def quiet_except_on_first_rank(run: Run) -> Iterator[None]:
    """Discard the progress bars and warnings of lm-eval inside the block, except on rank 0."""
    if run.ps.rank == 0:
        yield
        return
    with open(os.devnull, "w") as null, redirect_stderr(null):
        yield


def parse_tasks(values: list[str]) -> tuple[list[str], list[str]]:
    """Return the names of all tasks, and the folder of each .yaml file."""
    names: list[str] = []
    folders: list[str] = []
    for value in values:
        for name in value.split(","):
            if name.endswith((".yaml", ".yml")):
                folders.append(str(Path(name).absolute().parent))
                name = read_task_name(name)
            names.append(name)
    return names, folders


def load_tasks(names: list[str], folders: list[str]) -> TaskManager:
    """Load tasks with their data, which is downloaded, and return their manager.

    Raises ValueError for an unknown task, and for one that generates text.
    """
    # Reading the definitions of all of lm-eval's tasks takes many seconds.
    manager = TaskManager(
        include_path=list(dict.fromkeys(folders)) or None,
        include_defaults=len(folders) < len(names),
    )
    missing = [name for name in names if not manager.match_tasks([name])]
    if missing:
        raise ValueError(
            f"--eval-tasks {' '.join(missing)}: lm-eval has no such task; `lm_eval ls tasks` "
            "lists them, and the path of a .yaml file adds one"
        )
    for name, task in manager.load(names)["tasks"].items():
        if task.OUTPUT_TYPE == "generate_until":
            raise ValueError(
                f"--eval-tasks {name}: it generates text, which a run does not: evaluate it on an "
                "export (--save-hf), or choose tasks with log-likelihoods"
            )
    return manager


def read_task_name(path: str) -> str:
    """Return the name of the task that a .yaml file defines."""
    if not Path(path).is_file():
        raise ValueError(f"--eval-tasks {path}: no such file")
    match = re.search(r"^task:\s*(\S+)", Path(path).read_text(encoding="utf-8"), re.MULTILINE)
    if match is None:
        raise ValueError(f"--eval-tasks {path}: it has no line 'task: NAME'")
    return match[1]


def list_scores(results: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Return the metrics of lm-eval's results by task and name, e.g. "hellaswag acc_norm"."""
    scores = {}
    for task, metrics in results.items():
        for name, value in metrics.items():
            metric, _, filtering = name.partition(",")
            if not filtering or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            label = metric if filtering == "none" else f"{metric} {filtering}"
            scores[f"{task} {label}"] = float(value)
    return scores


def report_scores(run: Run, scores: dict[str, float]) -> None:
    """Write scores to the log and the writers of the run."""
    iteration = run.state.iteration
    values = ", ".join(f"{name}: {score:.4f}" for name, score in scores.items())
    report_line(
        f" tasks at iteration {iteration} | {values} |",
        event="tasks",
        iteration=iteration,
        scores=scores,
    )
    points = {f"eval {name}": score for name, score in scores.items()}
    for writer in run.writers:
        writer.scalars(points, iteration, run.state.consumed_train_samples)
