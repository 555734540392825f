"""A model of transformers in an encoding of a published one."""

from pathlib import Path

import pytest

from tests.support.quantized_models import write_gpt_oss


@pytest.fixture(scope="package")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with experts in mxfp4, and other weights in bf16, as gpt-oss is published."""
    directory = tmp_path_factory.mktemp("gpt_oss")
    write_gpt_oss(directory)
    return directory
