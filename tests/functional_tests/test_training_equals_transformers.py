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
from tests.support.boxes import index_box
from tests.support.training_harness import COMMON, LAYOUTS, MODELS, Measurements

STEPS = 10
FLAGS = f"{COMMON} --mock-data --train-iters {STEPS} --lr-decay-style constant --lr-warmup-iters 0 "
NUM_LAYERS = 4
HIDDEN_SIZE = 32
HEAD_DIM = 8


def build_llama():
    config = transformers.LlamaConfig(
        vocab_size=61,
        hidden_size=HIDDEN_SIZE,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        rms_norm_eps=1e-5,
        max_position_embeddings=16,
    )
    return transformers.LlamaForCausalLM(config)


def build_gpt2():
    config = transformers.GPT2Config(
        vocab_size=61,
        n_embd=HIDDEN_SIZE,
        n_layer=NUM_LAYERS,
        n_head=4,
        n_positions=16,
        resid_pdrop=0.0,
    )
    return transformers.GPT2LMHeadModel(config)


PEERS = {"llama": build_llama, "gpt2": build_gpt2}

LLAMA_NAMES = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}


def convert_llama(hf):
    """Return weights of transformers under our keys.

    The rows of our QKV are, per group, its query heads, its key head, its value head.
    """
    weights = {
        "embedding.word_embeddings.weight": hf["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": hf["model.norm.weight"],
        "output_layer.weight": hf["lm_head.weight"],
    }
    for layer in range(NUM_LAYERS):
        theirs = f"model.layers.{layer}."
        ours = f"decoder.layers.{layer}."
        for name, hf_name in LLAMA_NAMES.items():
            weights[ours + name] = hf[theirs + hf_name]

        groups = []
        for letter in "qkv":
            projection = hf[f"{theirs}self_attn.{letter}_proj.weight"]
            # [heads * head_dim, h] -> [groups, heads / groups, head_dim, h]
            groups.append(projection.view(2, -1, HEAD_DIM, HIDDEN_SIZE))

        weights[f"{ours}self_attention.linear_qkv.weight"] = torch.cat(groups, 1).flatten(0, 2)

        gate = hf[f"{theirs}mlp.gate_proj.weight"]
        up = hf[f"{theirs}mlp.up_proj.weight"]
        weights[f"{ours}mlp.linear_fc1.weight"] = torch.cat([gate, up])
    return weights


GPT2_NAMES = {
    "self_attention.linear_qkv.layer_norm_weight": "ln_1.weight",
    "self_attention.linear_qkv.layer_norm_bias": "ln_1.bias",
    "self_attention.linear_proj.bias": "attn.c_proj.bias",
    "mlp.linear_fc1.layer_norm_weight": "ln_2.weight",
    "mlp.linear_fc1.layer_norm_bias": "ln_2.bias",
    "mlp.linear_fc1.bias": "mlp.c_fc.bias",
    "mlp.linear_fc2.bias": "mlp.c_proj.bias",
}
GPT2_TRANSPOSED_NAMES = {
    "self_attention.linear_proj.weight": "attn.c_proj.weight",
    "mlp.linear_fc1.weight": "mlp.c_fc.weight",
    "mlp.linear_fc2.weight": "mlp.c_proj.weight",
}


def convert_gpt2(hf):
    """Return weights of transformers, whose matrices are transposed, under our keys."""
    weights = {
        "embedding.word_embeddings.weight": hf["transformer.wte.weight"],
        "embedding.position_embeddings.weight": hf["transformer.wpe.weight"],
        "decoder.final_layernorm.weight": hf["transformer.ln_f.weight"],
        "decoder.final_layernorm.bias": hf["transformer.ln_f.bias"],
    }
    for layer in range(NUM_LAYERS):
        theirs = f"transformer.h.{layer}."
        ours = f"decoder.layers.{layer}."
        for name, hf_name in GPT2_NAMES.items():
            weights[ours + name] = hf[theirs + hf_name]
        for name, hf_name in GPT2_TRANSPOSED_NAMES.items():
            weights[ours + name] = hf[theirs + hf_name].t()
        qkv = hf[f"{theirs}attn.c_attn.weight"].t()
        weights[f"{ours}self_attention.linear_qkv.weight"] = interleave_heads(qkv)
        qkv_bias = hf[f"{theirs}attn.c_attn.bias"]
        weights[f"{ours}self_attention.linear_qkv.bias"] = interleave_heads(qkv_bias)
    return weights


def interleave_heads(qkv):
    """Return the rows of all queries, keys and values as query, key and value of each head."""
    heads = [x.reshape(-1, 1, HEAD_DIM, *x.shape[1:]) for x in qkv.split(HIDDEN_SIZE)]
    return torch.cat(heads, 1).flatten(0, 2)


def train_from(rank, world_size, flags, weights):
    """Return the losses of our program, started from `weights`, and, on one rank, the tokens and
    labels of every step.
    """
    config = parse_args(shlex.split(FLAGS + flags), world_size)
    ps, device = initialize(config.distributed, config.parallel)
    tokenizer = build_tokenizer(config.tokenizer)
    config.set_vocab_size(tokenizer.vocab_size)
    run = build_run(config, ps, device, model_provider, forward_step)
    state = get_model_state(run)
    for key, entry in state.items():
        for box in entry.boxes:
            slices = index_box(box.offset, box.shape)
            box.tensor.copy_(weights[key][slices])

    run.optimizer.reload_model_params(state)
    measured = Measurements()
    run.writers = [measured]
    train(run, build_data(run, tokenizer, datasets_provider))
    if world_size > 1:
        return measured, []

    # The same data from the start
    another_run = build_run(config, ps, device, model_provider, forward_step)
    batches = build_data(another_run, tokenizer, datasets_provider).train.batches
    return measured, [next(batches) for _ in range(4 * STEPS)]


def train_peer(model, batches):
    """Return losses and gradient norms of the textbook loop: one batch of 8 per step, AdamW,
    clipping at 1.
    """
    matrices = [p for name, p in model.named_parameters() if p.dim() > 1]
    vectors = [p for name, p in model.named_parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.999), eps=1e-8)
    losses = []
    norms = []
    for step in range(STEPS):
        micro_batches = batches[4 * step : 4 * step + 4]
        tokens = torch.cat([batch["tokens"] for batch in micro_batches])
        labels = torch.cat([batch["labels"] for batch in micro_batches])
        logits = model(tokens).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        norms.append(norm.item())
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
    convert = convert_llama if family == "llama" else convert_gpt2
    weights = {}
    for key, value in convert(peer.state_dict()).items():
        weights[key] = value.detach().clone()  # the peer trains its own in place

    measured, batches = pool.run(train_from, 1, MODELS[family], weights)[0]
    losses, norms = train_peer(peer, batches)
    assert losses[-1] < losses[0] - 0.2
    torch.testing.assert_close(measured.losses, losses, atol=1e-4, rtol=0)
    torch.testing.assert_close(measured.grad_norms, norms, atol=0, rtol=1e-3)

    world_size, layout = LAYOUTS["tp2_pp2"]
    parallel, _ = pool.run(train_from, world_size, f"{MODELS[family]} {layout}", weights)[0]
    torch.testing.assert_close(parallel.losses, losses, atol=1e-4, rtol=0)
