"""Loading from a checkpoint of any format."""

import pytest
import torch

from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.run_checkpoint.native_reader import load_from_source
from tests.support.memory_source import GPT_ARGS, random_source

PRESENT = "decoder.final_layernorm.weight"
ABSENT = "decoder.final_layernorm.wait"
REST = "in the checkpoint but not requested by any rank"


def state(*keys):
    tensors = {}
    for key in keys:
        tensors[key] = ShardedTensor.replicated(key, torch.zeros(32))
    return tensors


def weights_only(key):
    return key.startswith("optimizer.")


def test_every_strictness(caplog):
    source = random_source(GPT_ARGS)
    others = [key for key in source.tensors if not weights_only(key) and key != PRESENT]
    for strictness in ("raise_unexpected", "assume_ok_unexpected", "raise_all"):
        expected = state(PRESENT, ABSENT)
        message = rf"(?s)in memory: keys requested but not.*{ABSENT} \(there is {PRESENT}"
        with pytest.raises(ValueError, match=message) as error:
            load_from_source(expected, source, strictness=strictness, skip=weights_only)
        names_rest = REST in str(error.value)
        assert names_rest == (strictness == "raise_all")
        assert not expected[PRESENT].local.any(), "nothing is changed before"
    for strictness in (
        "log_unexpected",
        "log_all",
        "return_unexpected",
        "return_all",
        "ignore_all",
    ):
        caplog.clear()
        expected = state(PRESENT, ABSENT)
        report = load_from_source(expected, source, strictness=strictness, skip=weights_only)
        assert torch.equal(expected[PRESENT].local, source.values[PRESENT])
        assert not expected[ABSENT].local.any()
        unexpected = [ABSENT] if strictness.startswith("return") else []
        assert report.unexpected == unexpected
        missing = sorted(others) if strictness == "return_all" else []
        assert report.missing == missing
        names_absent = ABSENT in caplog.text
        assert names_absent == strictness.startswith("log")
        names_rest = REST in caplog.text
        assert names_rest == (strictness == "log_all")


def test_other_shape_is_an_error_for_every_strictness():
    tensor = torch.zeros(31)
    expected = {PRESENT: ShardedTensor.replicated(PRESENT, tensor)}
    with pytest.raises(ValueError, match=rf"{PRESENT}: \(32,\) in the checkpoint, \(31,\) here"):
        load_from_source(expected, random_source(GPT_ARGS), strictness="ignore_all")


def test_shared_memory_requires_one_key():
    """Two keys for one tensor of an fp32 run would be read in arbitrary order."""
    tensor = torch.zeros(32)
    other = "optimizer.state.param." + PRESENT
    expected = {key: ShardedTensor.replicated(key, tensor) for key in (PRESENT, other)}
    with pytest.raises(AssertionError, match="are the same memory"):
        load_from_source(expected, random_source(GPT_ARGS), strictness="ignore_all")
