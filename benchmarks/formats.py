"""Speed of the formats that `conversion.py` has no rows of, relative to `cp`.

Conversions: a Llama to encodings of `--quantize` and back, and from a folder of accelerate (FSDP)
with its optimizer. OLMo-core and NeMo Automodel have the same DCP files, and checkpoints of NeMo are
torch_dist in a directory or an archive. They alternate with `cp` and fsync of the output, from the
page cache.

Decoders: a matrix in each encoding of quantized releases, tiled from the files of its library in
tests/golden/quantized, and in each encoding of GGUF. One thread; relative to `cp` of the result.

    python benchmarks/formats.py                          # 5.2 GB: the model of conversion.py
    python benchmarks/formats.py --layers 1 --hidden 256  # small, to try it out
"""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from conversion import SAVERS, convert, copy, count_bytes, measure_start_up, train_one_step, warm_up
from safetensors.torch import load_file, save_file
from scratch import DIRECTORY_HELP, create_scratch_directory

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from megatron.conversion.gguf.blocks import ENCODINGS, BlockEncoding  # noqa: E402
from megatron.conversion.huggingface.safetensors_files import open_safetensors  # noqa: E402
from megatron.conversion.quantization.encodings import dequantize  # noqa: E402
from megatron.core.dist_checkpointing.mapping import LazyTensor  # noqa: E402
from megatron.core.safe_files.reading import read_json  # noqa: E402

QUANTIZED = {
    "hf fp8-channel": ["--saver", "hf", "--quantize", "fp8-channel"],
    "hf nvfp4": ["--saver", "hf", "--quantize", "nvfp4"],
}
PAIRS = (
    ("torch_dist", "hf"),
    ("torch_dist", "hf fp8"),
    ("hf fp8", "hf"),
    ("torch_dist", "hf fp8-channel"),
    ("hf fp8-channel", "hf"),
    ("torch_dist", "hf nvfp4"),
    ("hf nvfp4", "hf"),
    ("torch_dist", "gguf q8_0"),
    ("gguf q8_0", "hf"),
)
GOLDEN = ROOT / "tests/golden/quantized"
SIDE = 4096  # rows and columns, at most
# Stored tensors with one entry per matrix
WHOLE = ("quant_map", "quant_state", "global_scale", "nested_absmax")


# ---- Conversions ----


def write_accelerate(model: Path, directory: Path) -> None:
    """Write the weights of a Hugging Face model, and moments, as accelerate's FSDP plugin does."""
    from torch.distributed.checkpoint import save

    weights = load_file(model / "model.safetensors")
    states = {}
    for name, weight in weights.items():
        states[name] = {
            "step": torch.tensor(1.0),
            "exp_avg": torch.zeros(weight.shape),
            "exp_avg_sq": torch.zeros(weight.shape),
        }
    group = {"params": list(weights), "lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8}
    group |= {"weight_decay": 0.1}
    optimizer = {"state": states, "param_groups": [group]}
    directory.mkdir()
    shutil.copy(model / "config.json", directory)
    save({"model": weights}, checkpoint_id=directory / "pytorch_model_fsdp_0", no_dist=True)
    save({"optimizer": optimizer}, checkpoint_id=directory / "optimizer_0", no_dist=True)


def measure_conversions(root: Path, args: argparse.Namespace) -> None:
    """Print a line per pair of formats."""
    SAVERS.update(QUANTIZED)
    train_one_step(root / "torch_dist", args)
    start_up = measure_start_up()
    warm_up(root, args)
    for source, result in PAIRS:
        convert(root, source, result, args, start_up)
    write_accelerate(root / "hf", root / "accelerate")
    convert(root, "accelerate", "torch_dist", args, start_up)


# ---- Decoders ----


class Decoder(NamedTuple):
    """A decoder with its input."""

    name: str
    stored_bytes: int
    decode: Callable[[], torch.Tensor]  # to bf16


def tile_case(case: Path, directory: Path) -> Decoder | None:
    """Return the decoder of a case whose matrix is repeated along both axes.

    Returns None if its tensors cannot be repeated.
    """
    expected = load_file(case / "expected.safetensors")
    name = max(expected, key=lambda key: expected[key].numel())
    rows, columns = expected[name].shape[-2:]
    count = min(SIDE // rows, SIDE // columns)
    tiled = {}
    for key, tensor in load_file(case / "model.safetensors").items():
        if key.startswith(name.removesuffix(".weight")):
            tiled[key] = tile(key, tensor, count).contiguous()
    directory.mkdir()
    save_file(tiled, directory / "model.safetensors")
    settings = read_json(case / "quantization_config.json")
    stored = open_safetensors(directory / "model.safetensors")
    try:
        matrix: LazyTensor = dequantize(stored, settings, torch.bfloat16, directory)[name]
    except ValueError:
        return None
    stored_bytes = sum(tensor.nbytes for tensor in tiled.values())
    return Decoder(case.name, stored_bytes, matrix.read_all)


def tile(name: str, tensor: torch.Tensor, count: int) -> torch.Tensor:
    """Return a stored tensor of a matrix that is repeated `count` times along both axes."""
    if name.endswith("weight_shape"):
        return tensor * count
    if "quant_state" in name:
        fields = json.loads(bytes(tensor.tolist()))
        fields["shape"] = [size * count for size in fields["shape"]]
        return torch.tensor(list(json.dumps(fields).encode()), dtype=torch.uint8)
    if tensor.numel() == 1 or any(word in name for word in WHOLE):
        return tensor
    if "absmax" in name:
        return tensor.repeat(count * count)
    if tensor.dim() == 2 and tensor.shape[1] == 1:
        is_flat = tensor.dtype == torch.uint8  # 4-bit values of bitsandbytes
        return tensor.repeat(count * count if is_flat else count, 1)
    if tensor.dim() == 1:
        return tensor.repeat(count)
    lead = [1] * (tensor.dim() - 2)
    return tensor.repeat(*lead, count, count)


def make_gguf_decoder(encoding: BlockEncoding) -> Decoder:
    """Return the decoder of random blocks."""
    assert encoding.decode is not None
    decode = encoding.decode
    num_blocks = SIDE * SIDE // 2 // encoding.block_size
    generator = torch.Generator().manual_seed(1)
    shape = (num_blocks, encoding.block_bytes)
    blocks = torch.randint(0, 60, shape, dtype=torch.uint8, generator=generator)
    blocks_per_run = (1 << 20) // encoding.block_size

    def decode_all() -> torch.Tensor:
        rows = [decode(run).bfloat16().flatten() for run in blocks.split(blocks_per_run)]
        return torch.cat(rows)

    return Decoder(f"gguf {encoding.name}", blocks.nbytes, decode_all)


def measure_decoders(root: Path, turns: int) -> None:
    """Print a line per encoding."""
    torch.set_num_threads(1)
    decoders: list[Decoder] = []
    for case in sorted(path for path in GOLDEN.iterdir() if path.is_dir()):
        decoder = tile_case(case, root / case.name)
        if decoder is None:
            print(f"{case.name:28} is not repeatable: covered by the others of its library")
        else:
            decoders.append(decoder)
    for encoding in ENCODINGS.values():
        if encoding.decode is not None:
            decoders.append(make_gguf_decoder(encoding))

    for decoder in decoders:
        content = decoder.decode()  # warm-up
        result = root / "result"
        result.mkdir(exist_ok=True)
        save_file({"tensor": content}, result / "tensor.safetensors")
        seconds = []
        copy_seconds = []
        for _ in range(turns):
            began = time.perf_counter()
            decoder.decode()
            seconds.append(time.perf_counter() - began)
            copy_seconds.append(copy(result, root / "copy", durable=False))
            shutil.rmtree(root / "copy")
        speed = content.nbytes / min(seconds) / 1e9
        copy_speed = count_bytes(result) / min(copy_seconds) / 1e9
        print(
            f"{decoder.name:28}{content.nbytes / 1e6:5.0f} MB of {decoder.stored_bytes / 1e6:3.0f} "
            f"MB {speed:6.2f} GB/s   cp {copy_speed:5.2f} GB/s   {speed / copy_speed:5.2f}x cp",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--directory", type=Path, help=DIRECTORY_HELP)
    args = parser.parse_args()
    args.cold = False
    with create_scratch_directory("formats", args.directory) as root:
        measure_decoders(root, args.turns)
        measure_conversions(root, args)


if __name__ == "__main__":
    main()
