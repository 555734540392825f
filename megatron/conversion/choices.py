"""Values that options of a conversion can have. This module does not import torch."""

FORMAT_NAMES = ("torch_dist", "legacy", "hf", "universal")
UNIVERSAL_STYLES = ("pipeline", "bigscience", "no-pipeline")  # of parameter names
QKV_LAYOUTS = ("groups", "tp-blocks")  # of universal checkpoints
NEW_ROWS = ("mean", "init", "zero")  # initial values of new rows of the vocabulary
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}  # on the command line
QUANTIZATIONS = ("fp8-block",)  # of the weights of a Hugging Face model
