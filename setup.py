"""Package `megatron` and its C++ extensions: dataset index builders, and copies of saves."""

import re
from pathlib import Path

from pybind11.setup_helpers import Pybind11Extension, build_ext
from setuptools import find_packages, setup

ROOT = Path(__file__).parent
# The scripts in tools/ are installed below the package, where the console entry points find them.
TOOLS = {"megatron.tools": "tools", "megatron.tools.checkpoint": "tools/checkpoint"}
VERSION = re.search(
    r'__version__ = "(.+)"', (ROOT / "megatron" / "__init__.py").read_text(encoding="utf-8")
)
assert VERSION is not None, "megatron/__init__.py must define __version__"

setup(
    # The import name is megatron, as launch scripts need it; on PyPI that name is taken.
    name="megatron-compact",
    version=VERSION[1],
    description="A compact Megatron-style GPT training stack whose checkpoints resume at any TP x "
    "PP x DP",
    license="Apache-2.0",
    py_modules=["pretrain_gpt"],
    packages=find_packages(include=["megatron", "megatron.*"]) + list(TOOLS),
    package_dir=TOOLS,
    package_data={
        "megatron.training.config": ["*.tsv"],
        "megatron.training.reporting": ["report_page/*"],
    },
    entry_points={
        "console_scripts": [
            "megatron-pretrain = pretrain_gpt:main",
            "megatron-convert = megatron.tools.checkpoint.convert:main",
            "megatron-inspect = megatron.tools.checkpoint.inspect_checkpoint:cli",
            "megatron-merge = megatron.tools.checkpoint.merge:main",
            "megatron-plan = megatron.tools.plan_run:cli",
            "megatron-preprocess = megatron.tools.preprocess_data:main",
            "megatron-report = megatron.tools.report:cli",
        ]
    },
    python_requires=">=3.10",
    install_requires=[
        "torch>=2.6",
        "numpy>=1.26,<3",
        "sentencepiece>=0.2,<0.3",
        "tensorboard>=2.16,<3",
        "safetensors>=0.4.5,<1",
        "pyyaml>=6,<7",
        "transformers>=5,<6",
        "xxhash>=4,<5",
        "tqdm>=4.60,<5",
    ],
    extras_require={
        "tiktoken": ["tiktoken>=0.7,<1"],
        # Its kernels are compiled against the torch that is there: pip install
        # --no-build-isolation.
        "te": ["transformer_engine[core_cu13,pytorch]>=2.8,<2.21"],
        "wandb": ["wandb>=0.16,<1"],
        "mlflow": ["mlflow-skinny>=2.16,<4"],
        "trackio": ["trackio>=0.43,<1"],
        "data": ["pyarrow>=15,<27", "zstandard>=0.21,<1"],
        "eval": ["lm-eval>=0.4.13,<0.5"],
        "plots": ["matplotlib>=3.8,<4"],
        "object-storage": ["obstore>=0.8,<0.13"],
        "all": ["tiktoken>=0.7,<1", "matplotlib>=3.8,<4", "obstore>=0.8,<0.13"],
        "docs": ["mkdocs-material>=9.5,<10"],
        "dev": [
            "pytest>=8",
            "pytest-xdist>=3.6,<4",
            "pytest-timeout>=2.3,<3",
            "ruff>=0.9",
            "mypy>=1.13",
            "pre-commit>=3.8",
        ]
        + [
            "pybind11>=2.13",
            "setuptools>=70",
            "tiktoken>=0.7,<1",
            "obstore>=0.8,<0.13",
            "moto[server]>=5,<6",
            "jsonschema>=4.18,<5",
            "accelerate>=1.1,<2",
            "lightning>=2.5,<3",
            "spmd-types>=0.3.1,<0.4",
        ],
    },
    ext_modules=[
        Pybind11Extension(
            "megatron.core.datasets.helpers_cpp",
            ["megatron/core/datasets/helpers.cpp"],
            cxx_std=17,
            # No contraction to fused multiply-add: a blend must have the same order on every
            # processor.
            extra_compile_args=["-O3", "-Wall", "-Wextra", "-ffp-contract=off"],
        ),
        Pybind11Extension(
            "megatron.core.dist_checkpointing.format.hashed_copy_cpp",
            ["megatron/core/dist_checkpointing/format/hashed_copy.cpp"],
            cxx_std=17,
            extra_compile_args=["-O3", "-Wall", "-Wextra"],
        ),
    ],
    cmdclass={"build_ext": build_ext},
)
