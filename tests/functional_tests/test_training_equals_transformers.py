"""Ten training steps equal those of `transformers` and `torch.optim.AdamW` with the same weights and
data.
"""

import shlex

import pytest
import torch
import transformers

from megatron.training.checkpoint.contents import get_model_state
from megatron.training.config.parsing import parse_args
from megatron.training.data.loaders import build_data
from megatron.training.data.tokenizer import build_tokenizer
from megatron.training.initialize import initialize
from megatron.training.run import build_run
from megatron.training.training import train
from pretrain_gpt import datasets_provider, forward_step, model_provider
from tests.support.training_harness import COMMON, LAYOUTS, MODELS, Measurements

STEPS = 10
FLAGS = f"{COMMON} --mock-data --train-iters {STEPS} --lr-decay-style constant --lr-warmup-iters 0 "
SIZES = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
PEERS = {
    "llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            **SIZES,
            num_key_value_heads=2,
            intermediate_size=48,
            rms_norm_eps=1e-5,
            max_position_embeddings=16,
        )
    ),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=61, n_embd=32, n_layer=4, n_head=4, n_positions=16, resid_pdrop=0.0
        )
    ),
}


def llama_weights(hf):
    """Their weights under our keys. Our QKV rows are, per group, its query heads, its key head, its
    value head.
    """
    weights = {
        "embedding.word_embeddings.weight": hf["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": hf["model.norm.weight"],
        "output_layer.weight": hf["lm_head.weight"],
    }
    for layer in range(4):
        theirs = f"model.layers.{layer}."
        ours = f"decoder.layers.{layer}."
        q, k, v = (hf[f"{theirs}self_attn.{x}_proj.weight"].view(2, -1, 8, 32) for x in "qkv")
        up = [hf[f"{theirs}mlp.{x}_proj.weight"] for x in ("gate", "up")]
        weights |= {
            f"{ours}self_attention.linear_qkv.weight": torch.cat([q, k, v], 1).flatten(0, 2),
            f"{ours}self_attention.linear_proj.weight": hf[f"{theirs}self_attn.o_proj.weight"],
            f"{ours}self_attention.linear_qkv.layer_norm_weight": hf[
                f"{theirs}input_layernorm.weight"
            ],
            f"{ours}mlp.linear_fc1.weight": torch.cat(up),
            f"{ours}mlp.linear_fc2.weight": hf[f"{theirs}mlp.down_proj.weight"],
            f"{ours}mlp.linear_fc1.layer_norm_weight": hf[
                f"{theirs}post_attention_layernorm.weight"
            ],
        }
    return weights


def gpt2_weights(hf):
    weights = {
        "embedding.word_embeddings.weight": hf["transformer.wte.weight"],
        "embedding.position_embeddings.weight": hf["transformer.wpe.weight"],
        "decoder.final_layernorm.weight": hf["transformer.ln_f.weight"],
        "decoder.final_layernorm.bias": hf["transformer.ln_f.bias"],
    }
    for layer in range(4):
        theirs = f"transformer.h.{layer}."
        ours = f"decoder.layers.{layer}."
        for part in ("weight", "bias"):
            qkv = (
                hf[f"{theirs}attn.c_attn.{part}"].t()
                if part == "weight"
                else hf[f"{theirs}attn.c_attn.bias"]
            )
            heads = [x.reshape(4, 1, 8, *x.shape[1:]) for x in qkv.split(32)]
            weights |= {
                f"{ours}self_attention.linear_qkv.{part}": torch.cat(heads, 1).flatten(0, 2),
                f"{ours}self_attention.linear_proj.{part}": hf[f"{theirs}attn.c_proj.{part}"].t(),
                f"{ours}self_attention.linear_qkv.layer_norm_{part}": hf[f"{theirs}ln_1.{part}"],
                f"{ours}mlp.linear_fc1.{part}": hf[f"{theirs}mlp.c_fc.{part}"].t(),
                f"{ours}mlp.linear_fc2.{part}": hf[f"{theirs}mlp.c_proj.{part}"].t(),
                f"{ours}mlp.linear_fc1.layer_norm_{part}": hf[f"{theirs}ln_2.{part}"],
            }
    return weights


def train_from(rank, world_size, flags, weights):
    """Losses of our program, started from `weights`, and the tokens and labels of every step."""
    config = parse_args(shlex.split(FLAGS + flags), world_size)
    ps, device = initialize(config.distributed, config.parallel)
    tokenizer = build_tokenizer(config.tokenizer)
    config.set_vocab_size(tokenizer.vocab_size)
    run = build_run(config, ps, device, model_provider, forward_step)
    state = get_model_state(run)
    for key, entry in state.items():
        for box in entry.boxes:
            place = tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))
            box.tensor.copy_(weights[key][place])
    run.optimizer.reload_model_params(state)
    measured = Measurements()
    run.writers = [measured]
    train(run, build_data(run, tokenizer, datasets_provider))
    batches = build_data(
        build_run(config, ps, device, model_provider, forward_step), tokenizer, datasets_provider
    )
    return measured, [
        next(batches.train.batches) for _ in range(4 * STEPS)
    ] if world_size == 1 else []


def plain_loop(model, batches):
    """Losses and gradient norms of the textbook loop: one batch of 8 per step, AdamW, clipping at
    1.
    """
    matrices = [p for name, p in model.named_parameters() if p.dim() > 1]
    vectors = [p for name, p in model.named_parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.999), eps=1e-8)
    losses = []
    norms = []
    for step in range(STEPS):
        tokens, labels = (
            torch.cat([b[key] for b in batches[4 * step : 4 * step + 4]])
            for key in ("tokens", "labels")
        )
        loss = torch.nn.functional.cross_entropy(
            model(tokens).logits.flatten(0, 1), labels.flatten()
        )
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


@pytest.mark.parametrize("family", PEERS)
def test_training_equals_transformers(pool, family):
    torch.manual_seed(0)
    peer = PEERS[family]().train()
    for module in peer.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    convert = llama_weights if family == "llama" else gpt2_weights
    weights = {key: value.detach().clone() for key, value in convert(peer.state_dict()).items()}
    measured, batches = pool.run(train_from, 1, MODELS[family], weights)[0]
    losses, norms = plain_loop(peer, batches)
    assert losses[-1] < losses[0] - 0.2
    torch.testing.assert_close(measured.losses, losses, atol=1e-4, rtol=0)
    torch.testing.assert_close(measured.grad_norms, norms, atol=0, rtol=1e-3)
    parallel, _ = pool.run(train_from, 4, f"{MODELS[family]} {LAYOUTS['tp2_pp2'][1]}", weights)[0]
    torch.testing.assert_close(parallel.losses, losses, atol=1e-4, rtol=0)
