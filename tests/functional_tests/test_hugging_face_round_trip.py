"""Trained models exported to transformers and back: same next tokens, same loss of a fine-tune."""

import json
import shlex
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megatron.conversion.checkpoint_conversion import convert
from megatron.conversion.options import WriteOptions
from megatron.training.config.parsing import parse_args
from megatron.training.training import pretrain
from pretrain_gpt import datasets_provider, forward_step, model_provider
from tests.support.training_harness import COMMON, LAYOUTS, MODELS, get_losses, train

PROMPTS = ((3, 1, 4), (15, 9), (26,), (53, 5, 8, 9), (7, 9, 3, 2, 3))
NEW_TOKENS = 16
# Weights that spread the logits: every choice of the next token is clear, and texts differ.
RUN = (
    "--mock-data --seq-length 32 --max-position-embeddings 32 --init-method-std 0.2 "
    "--train-iters 8 --global-batch-size 4 "
)
SAVED_BY = {"llama": "tp2_pp2", "gpt2": "dp2_distributed_optimizer"}


@pytest.fixture(scope="module", params=MODELS)
def trained(request, pool, tmp_path_factory):
    """Return the name of the model, the directory of the run, and that of its export."""
    root = tmp_path_factory.mktemp(request.param)
    world_size, layout = LAYOUTS[SAVED_BY[request.param]]
    pool.run(train, world_size, f"{RUN} {MODELS[request.param]} {layout} --save {root / 'run'}")
    convert(root / "run", root / "hf", "hf")
    return request.param, root / "run", root / "hf"


def generate(rank, world_size, flags):
    """Return greedy continuations of the prompts by our model, and the logits of the last
    tokens.
    """
    config = parse_args(shlex.split(COMMON + flags), world_size)
    run = pretrain(config, model_provider, datasets_provider, forward_step)
    (model,) = run.chunks
    model.eval()
    with torch.no_grad():
        return [continue_greedily(model, prompt) for prompt in PROMPTS]


def continue_greedily(model, prompt):
    text = torch.tensor([prompt])
    for _ in range(NEW_TOKENS):
        logits = model(text, torch.arange(text.shape[1])[None])[0, -1]
        text = torch.cat([text, logits.argmax().view(1, 1)], 1)
    return text[0].tolist(), logits


@pytest.mark.parametrize("tp", [1, 2])
def test_transformers_generates_the_same_tokens(pool, trained, tp):
    model, run, hf = trained
    layout = f"--tensor-model-parallel-size {tp} --skip-train --load {run}"
    generated = pool.run(generate, tp, f"{RUN} {MODELS[model]} {layout}")[0]
    peer = transformers.AutoModelForCausalLM.from_pretrained(hf).eval()
    new_tokens = set()
    for prompt, (text, logits) in zip(PROMPTS, generated, strict=True):
        expected_text = peer.generate(
            torch.tensor([prompt]),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            eos_token_id=None,
            pad_token_id=0,
        )[0]
        assert text == expected_text.tolist()
        with torch.no_grad():
            expected_logits = peer(expected_text[None, :-1]).logits[0, -1]
        torch.testing.assert_close(logits, expected_logits, atol=1e-4, rtol=0)
        new_tokens |= set(text[-NEW_TOKENS:])

    assert len(new_tokens) > 5, "the models must not repeat a few tokens"


@pytest.mark.parametrize("layout", ["single", "tp2"])
def test_fine_tuning_an_export_starts_at_the_same_loss(pool, trained, layout):
    model, run, hf = trained
    world_size, flags = LAYOUTS.get(layout, (1, ""))
    flags = f"{RUN} {MODELS[model]} {flags} --train-iters 2 --lr-warmup-iters 0 --seed 4321 "
    from_run = get_losses(pool.run(train, world_size, f"{flags} --finetune --load {run}"))
    from_hf = get_losses(pool.run(train, world_size, f"{flags} --load {hf}"))
    from_scratch = get_losses(pool.run(train, world_size, flags))

    assert from_hf == from_run
    assert len(from_hf) == 2
    assert from_hf[0] != from_scratch[0]


def truncate_config(directory):
    path = directory / "config.json"
    path.write_text(path.read_text()[:50])
    return r"config\.json is not valid JSON"


def add_unknown_field(directory):
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["logit_scale"] = 2.0
    path.write_text(json.dumps(config))
    return "may change the results of the model: logit_scale = 2.0"


def truncate_weights(directory):
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    return r"model\.safetensors .* truncated or damaged"


@pytest.mark.parametrize("trained", ["llama"], indirect=True)
@pytest.mark.parametrize("damage", [truncate_config, add_unknown_field, truncate_weights])
def test_damaged_model_is_rejected(pool, trained, tmp_path, damage):
    """It is not taken for an empty --save directory, which would start a new run."""
    model, _, hf = trained
    damaged = tmp_path / "hf"
    shutil.copytree(hf, damaged)
    reason = damage(damaged)
    flags = f"{RUN} {MODELS[model]} --load {damaged} --save {damaged}"

    with pytest.raises(ValueError, match=reason):
        pool.run(train, 1, flags)


def test_fine_tuning_ignores_the_sidecar(pool, trained, tmp_path):
    """The weights may have changed since the export: the sidecar serves runs that continue."""
    model, run, hf = trained
    convert(run, tmp_path / "hf", "hf", options=WriteOptions(optim_sidecar=True))
    path = tmp_path / "hf/model.safetensors"
    changed_weights = {name: 1.01 * value for name, value in load_file(path).items()}
    save_file(changed_weights, path, metadata={"format": "pt"})
    flags = f"{RUN} {MODELS[model]} --load {tmp_path / 'hf'} --exit-interval 1"
    from_changed = pool.run(train, 1, f"{flags} --finetune")[0]

    assert from_changed.iteration == 1
    with pytest.raises(ValueError, match=r"was changed after the export"):
        pool.run(train, 1, f"{flags} --train-iters 9")
