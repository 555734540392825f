"""Continue a prompt with vLLM and with transformers. Runs without this project.

    python vllm_generate.py MODEL

writes MODEL/vllm.json.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from vllm import LLM, SamplingParams

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 35, 8, 60]
NUM_TOKENS = 8


def main() -> None:
    directory = Path(sys.argv[1])

    # transformers
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokens = list(PROMPT)
    with torch.no_grad():
        for _ in range(NUM_TOKENS):
            logits = model(torch.tensor([tokens])).logits[0]
            tokens.append(int(logits[-1].argmax()))
    log_probs = logits.log_softmax(-1)

    # vLLM
    engine = LLM(
        model=str(directory),
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=64,
    )
    sampling = SamplingParams(
        temperature=0, max_tokens=NUM_TOKENS, prompt_logprobs=0, ignore_eos=True, detokenize=False
    )
    (output,) = engine.generate([{"prompt_token_ids": PROMPT}], sampling)
    errors = []
    for position, token in enumerate(PROMPT[1:], start=1):
        log_prob = output.prompt_logprobs[position][token].logprob
        errors.append(abs(log_prob - log_probs[position - 1, token].item()))
    result = {
        "tokens": list(output.outputs[0].token_ids),
        "expected_tokens": tokens[len(PROMPT) :],
        "error": max(errors),
    }
    (directory / "vllm.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
