"""Continuations of fixed prompts by the model of a run: --sample-prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from megatron.core.dist_checkpointing.planning.coordination import Coordination
from megatron.training.data.tokenizer import Tokenizer
from megatron.training.evaluation.scoring import predict_next
from megatron.training.reporting.console import report_line
from megatron.training.run import Run


def make_prompt_sampling(run: Run, tokenizer: Tokenizer) -> Callable[[], None]:
    """Read the prompts, and return a function that continues and reports them. Collective."""
    training = run.config.training
    path = training.sample_prompts
    assert path is not None
    prompts = Coordination.of(None).run_on_rank0(lambda: read_prompts(path))
    tokens = [tokenizer.tokenize(prompt) for prompt in prompts]
    max_length = run.config.data.seq_length - training.sample_tokens
    for prompt, ids in zip(prompts, tokens, strict=True):
        if not 0 < len(ids) <= max_length:
            raise ValueError(
                f"--sample-prompts {path}: {prompt[:60]!r} has {len(ids)} tokens; with "
                f"--seq-length {run.config.data.seq_length} and --sample-tokens "
                f"{training.sample_tokens}, a prompt has 1 to {max_length}"
            )

    def sample_prompts() -> None:
        continuations = continue_greedily(run, tokens, training.sample_tokens, tokenizer.eod)
        iteration = run.state.iteration
        texts = [tokenizer.detokenize(continuation) for continuation in continuations]
        for prompt, text in zip(prompts, texts, strict=True):
            report_line(
                f" sample at iteration {iteration} | {prompt!r} -> {text!r} |",
                event="sample",
                iteration=iteration,
                prompt=prompt,
                text=text,
            )

    return sample_prompts


def read_prompts(path: str) -> list[str]:
    """Return the lines of a file that are not empty."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--sample-prompts {path}: cannot be read: {error}") from error
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise ValueError(f"--sample-prompts {path}: the file has no prompt; write one per line")
    return prompts


def continue_greedily(
    run: Run, prompts: Sequence[list[int]], num_tokens: int, end_of_document: int
) -> list[list[int]]:
    """Return the most probable continuation of each prompt, up to the end of the document.

    Each token takes a forward pass over all sequences: there is no cache. Collective.
    """
    sequences = [list(prompt) for prompt in prompts]
    for _ in range(num_tokens):
        unfinished = [tokens for tokens in sequences if tokens[-1] != end_of_document]
        if not unfinished:
            break
        predictions = predict_next(run, unfinished, end_of_document)
        for tokens, prediction in zip(unfinished, predictions, strict=True):
            tokens.append(prediction)
    continuations = []
    for prompt, tokens in zip(prompts, sequences, strict=True):
        continuation = tokens[len(prompt) :]
        if continuation and continuation[-1] == end_of_document:
            continuation.pop()
        continuations.append(continuation)
    return continuations
