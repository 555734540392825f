"""Load an exported directory with transformers and print a few generated lines."""

import argparse

import sentencepiece
import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="Hugging Face directory")
    parser.add_argument("tokenizer", help="SentencePiece model")
    parser.add_argument(
        "--prompt", nargs="+", default=["Return the", "This function", "If the value is"]
    )
    parser.add_argument("--max-new-tokens", type=int, default=40)
    parser.add_argument("--temperature", type=float, default=0.5)
    args = parser.parse_args()

    torch.manual_seed(0)
    tokenizer = sentencepiece.SentencePieceProcessor(model_file=args.tokenizer)
    model = AutoModelForCausalLM.from_pretrained(args.model, trust_remote_code=False).eval()
    print(
        f"{type(model).__name__}, {sum(p.numel() for p in model.parameters()) / 1e6:.1f}M "
        "parameters, says:"
    )
    for text in args.prompt:
        prompt = torch.tensor([tokenizer.encode(text)])
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=args.max_new_tokens,
            do_sample=True,
            top_k=40,
            temperature=args.temperature,
        )
        lines = tokenizer.decode(output[0].tolist()).splitlines()
        print("\n".join(line for line in lines if line.strip()), end="\n\n")


if __name__ == "__main__":
    main()
