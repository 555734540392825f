"""Load an exported directory with transformers and print a few generated lines."""

import argparse

import sentencepiece
import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="Hugging Face directory")
    parser.add_argument("tokenizer", help="SentencePiece model")
    parser.add_argument("--prompt", default="def __init__(self")
    parser.add_argument("--max-new-tokens", type=int, default=60)
    args = parser.parse_args()

    tokenizer = sentencepiece.SentencePieceProcessor(model_file=args.tokenizer)
    model = AutoModelForCausalLM.from_pretrained(args.model).eval()
    prompt = torch.tensor([tokenizer.encode(args.prompt)])
    output = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=args.max_new_tokens, do_sample=False
    )
    print(f"{type(model).__name__}, {sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters, says:\n")
    print(tokenizer.decode(output[0].tolist()))


if __name__ == "__main__":
    main()
