"""Runs with --use-mup: the same at every layout, after a resume, and as a model of Granite."""

import pytest
import torch
import transformers

from megatron.conversion.checkpoint_conversion import convert
from tests.functional_tests.test_hugging_face_round_trip import generate
from tests.support.training_harness import DISTRIBUTED_OPTIMIZER, LLAMA, train, whole

MUP = (
    "--use-mup --mup-base-hidden-size 8 --mup-embedding-mult 3 --mup-base-head-dim 4 "
    "--mup-attn-scale-power 0.75 "
)
RUN = f"--mock-data --train-iters 6 {LLAMA} {MUP} "


def test_resume_takes_the_parametrization_from_the_checkpoint(pool, tmp_path):
    """--use-checkpoint-args restores all flags of muP, so that the learning rates go on."""
    saved = f"{RUN} --save {tmp_path}"
    pool.run(train, 2, f"{saved} --exit-interval 3 {DISTRIBUTED_OPTIMIZER} --clip-grad 0")
    at_once = whole(pool.run(train, 1, f"{RUN} --clip-grad 0"))
    without = RUN.replace(MUP, "")
    flags = f"{without} --clip-grad 0 --load {tmp_path} --use-checkpoint-args"
    resumed = whole(pool.run(train, 1, flags))

    for key, tensor in at_once.items():
        torch.testing.assert_close(resumed[key], tensor, rtol=1e-4, atol=1e-6)

    # The flags matter.
    plain = whole(pool.run(train, 1, f"{without} --clip-grad 0"))
    key = "decoder.layers.0.mlp.linear_fc1.weight"
    difference = plain[key] - at_once[key]
    assert difference.abs().max() > 1e-3


def test_checkpoint_is_the_same_granite_model_in_transformers(pool, tmp_path):
    run = tmp_path / "run"
    outcomes = pool.run(train, 1, f"{RUN} --save {run}")
    convert(run, tmp_path / "hf", "hf")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    config = model.config

    assert config.model_type == "granite"
    assert config.embedding_multiplier == 3.0
    assert config.logits_scaling == 4.0
    assert config.attention_multiplier == pytest.approx(2 / 8**0.75)

    # Back again, with the factors as flags: the same weights.
    convert(tmp_path / "hf", tmp_path / "back", "torch_dist")
    factors = (
        f"--embedding-multiplier 3 --logits-scaling 4 --softmax-scale {config.attention_multiplier}"
    )
    flags = f"{RUN.replace(MUP, factors)} --load {tmp_path / 'back'} --finetune --skip-train"
    weights = whole(pool.run(train, 1, flags))

    for key, tensor in whole(outcomes).items():
        if not key.startswith("optimizer."):
            assert torch.equal(weights[key], tensor), key

    # Our model and theirs compute the same logits.
    (generated,) = pool.run(generate, 1, f"{RUN} --load {run} --skip-train")
    for text, logits in generated:
        prompt = torch.tensor([text[:-1]])
        with torch.no_grad():
            expected = model(prompt).logits[0, -1]
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


def test_families_without_the_factors_are_refused(pool, tmp_path):
    pool.run(train, 1, f"{RUN} --qk-layernorm --save {tmp_path / 'run'}")
    with pytest.raises(ValueError, match="The closest, granite, has qk_layernorm = False instead"):
        convert(tmp_path / "run", tmp_path / "hf", "hf")
