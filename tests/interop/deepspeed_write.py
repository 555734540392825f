"""Write universal checkpoints of four models for `deepspeed_load.py`:
DIRECTORY/{llama,llama-untied-bf16,gpt,bloom}.
"""

import sys
from pathlib import Path

from megatron.conversion.deepspeed.universal_writer import write_universal
from tests.support.memory_source import BLOOM_ARGS, GPT_ARGS, LLAMA_ARGS, random_source

MODELS = {
    "llama": LLAMA_ARGS | {"untie_embeddings_and_output_weights": False},
    "llama-untied-bf16": LLAMA_ARGS | {"bf16": True},
    "gpt": GPT_ARGS,
    "bloom": BLOOM_ARGS,
}

if __name__ == "__main__":
    for name, args in MODELS.items():
        write_universal(random_source(args), Path(sys.argv[1]) / name)
