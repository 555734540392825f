"""The evaluations that the flags of a run request, in addition to its validation split."""

from __future__ import annotations

from collections.abc import Callable

from megatron.core.wings import resolve
from megatron.training.data.tokenizer import Tokenizer
from megatron.training.evaluation.domains import make_domain_evaluation
from megatron.training.evaluation.prompts import make_prompt_sampling
from megatron.training.run import DatasetsProvider, Run

_TASKS = "megatron.training.evaluation.tasks:make_task_evaluation"  # needs lm-eval


def make_evaluations(
    run: Run, tokenizer: Tokenizer, provider: DatasetsProvider
) -> Callable[[], None]:
    """Return a function that evaluates the run and reports the results, once per iteration.

    Collective, as is the function.
    """
    evaluations: list[Callable[[], None]] = []
    if run.config.training.valid_domain:
        evaluations.append(make_domain_evaluation(run, tokenizer, provider))
    if run.config.training.eval_tasks:
        evaluations.append(resolve(_TASKS)(run, tokenizer))
    if run.config.training.sample_prompts is not None:
        evaluations.append(make_prompt_sampling(run, tokenizer))
    evaluated: set[int] = set()

    def evaluate() -> None:
        # The last iteration may be due for an evaluation, and a run evaluates at its end, too.
        if run.state.iteration not in evaluated:
            evaluated.add(run.state.iteration)
            for evaluation in evaluations:
                evaluation()

    return evaluate
