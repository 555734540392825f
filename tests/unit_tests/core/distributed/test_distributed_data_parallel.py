"""Accumulation into main_grad, readiness of buckets, and the units that wait for gathered
parameters.
"""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.distributed_data_parallel import iterate_forward_units
from megatron.core.models import GPTModel
from megatron.core.module import Constant, MegatronModule, ParamInfo, make_parameter
from megatron.core.parallel_config import ParallelConfig
from megatron.core.parallel_state import Axis, ParallelState
from megatron.core.tensor_parallel.layers import open_main_grad
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.support.tiny_ddp_model import VOCAB, TinyModel, backward_pass, batch, build, microbatches

ONE = ParallelState.for_rank(ParallelConfig())


def plain_model(dtype=torch.float32, tied=True):
    model = TinyModel(dtype, tied=tied)
    model.initialize(seed=7)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("overlap", [False, True])
def test_main_grad_is_the_fp32_sum_over_microbatches(dtype, overlap):
    config = DistributedDataParallelConfig(overlap_grad_reduce=overlap, ddp_bucket_size=600)
    chunk, _ = build(ONE, config, dtype=dtype)
    for step in range(2):  # the second time the buffer has to be zeroed
        backward_pass(chunk, step, count=4)
    model = plain_model(dtype)
    expected = {
        name: torch.zeros_like(p, dtype=torch.float32) for name, p in model.named_parameters()
    }
    for tokens, labels in microbatches(1, Axis(), 4):
        model.zero_grad()
        (model(tokens, labels) / 4).backward()
        for name, param in model.named_parameters():
            expected[name] += param.grad.float()

    for name, param in chunk.module.named_parameters():
        assert param.main_grad.dtype == torch.float32
        assert torch.equal(param.main_grad, expected[name]), name
        assert param.grad is None


@pytest.mark.parametrize("overlap", [False, True])
def test_grad_reduce_in_bf16_returns_fp32_gradients(overlap):
    config = DistributedDataParallelConfig(
        overlap_grad_reduce=overlap,
        ddp_bucket_size=600,
        grad_reduce_in_bf16=True,
    )
    chunk, _ = build(ONE, config, dtype=torch.bfloat16)
    backward_pass(chunk, 0, count=4)
    chunk.finish_grad_sync()
    model = plain_model(torch.bfloat16)
    for tokens, labels in microbatches(0, Axis(), 4):
        (model(tokens, labels) / 4).backward()  # autograd adds up in bf16, too
    expected = dict(model.named_parameters())

    for name, param in chunk.module.named_parameters():
        assert param.main_grad.dtype == torch.bfloat16
        assert torch.equal(param.main_grad, expected[name].grad), name
    for bucket in chunk.buckets:
        assert bucket.grad_shard.dtype == torch.float32
        assert torch.equal(bucket.grad_shard, bucket.grad_data.float())


class UnusedParameter(TinyModel):
    """A parameter of odd size that no micro-batch uses, after a gap."""

    def __init__(self, dtype):
        super().__init__(dtype)
        self.unused = make_parameter((3, 5), dtype, None, ParamInfo(Constant(1.0)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_bf16", [False, True])
def test_stale_gradients_do_not_change_a_bit(dtype, in_bf16):
    if in_bf16 and dtype == torch.float32:
        pytest.skip("gradients of an fp32 model are fp32")
    buffers = []
    for fusion in (True, False):
        model = UnusedParameter(dtype)
        model.initialize(seed=7)
        config = DistributedDataParallelConfig(
            gradient_accumulation_fusion=fusion,
            grad_reduce_in_bf16=in_bf16,
        )
        chunk = DistributedDataParallel(model, config, Axis())
        for step in range(2):
            for param in chunk.parameters():
                param.main_grad.fill_(torch.nan)
            backward_pass(chunk, step, count=3 if step else 1)
            chunk.finish_grad_sync()

        buffers.append(chunk.flat_buffers[0].grad_data)
        assert not model.unused.main_grad.any()

    assert torch.equal(*buffers)


def test_parameters_and_gradients_are_views_of_the_buffers():
    chunk, _ = build(ONE, DistributedDataParallelConfig(ddp_bucket_size=600), tied=False)
    (buffer,) = chunk.flat_buffers
    assert len(chunk.buckets) >= 5

    for param, reference in zip(
        chunk.module.parameters(),
        plain_model(tied=False).parameters(),
        strict=True,
    ):
        assert torch.equal(param, reference)
        for view, base in ((param, buffer.param_data), (param.main_grad, buffer.grad_data)):
            assert base.data_ptr() <= view.data_ptr() < base.data_ptr() + base.nbytes

    assert sum(bucket.param_data.numel() for bucket in chunk.buckets) == buffer.param_data.numel()


class FusedLinear(torch.autograd.Function):
    """Adds the weight's gradient to main_grad, like a fused kernel."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        open_main_grad(ctx.weight).addmm_(grad.t(), x)
        return grad @ ctx.weight, None


class OneMatrix(MegatronModule):
    def __init__(self):
        super().__init__()
        self.weight = make_parameter((3, 4), torch.float32, None, ParamInfo(Constant(0.5)))
        self.initialize(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_are_initialized_in_their_buffers(dtype):
    config = DistributedDataParallelConfig(ddp_bucket_size=600)
    moved = DistributedDataParallel(plain_model(dtype), config, Axis())
    model = TinyModel(dtype, tied=True)
    wrapped = DistributedDataParallel(model, config, Axis(), keep_values=False)
    assert all(not param.any() for param in model.parameters())

    model.initialize(seed=7)
    for one, other in zip(wrapped.flat_buffers, moved.flat_buffers, strict=True):
        assert torch.equal(one.param_data, other.param_data)


def test_kernel_may_add_into_main_grad():
    config = DistributedDataParallelConfig(overlap_grad_reduce=True)
    chunk = DistributedDataParallel(OneMatrix(), config, Axis())
    weight = chunk.module.weight
    x = torch.randn(5, 4)
    chunk.zero_grad_buffer()
    FusedLinear.apply(x.clone().requires_grad_(), weight).sum().backward()

    torch.testing.assert_close(weight.main_grad, x.sum(0).expand(3, 4))
    assert weight.grad is None
    assert not chunk.buckets[0].missing, "it counts as ready all the same"


def test_fused_and_plain_gradients_of_one_weight_are_added():
    """A tied embedding: the output layer adds into main_grad and returns None, the embedding
    returns its gradient.
    """
    chunk = DistributedDataParallel(
        OneMatrix(),
        DistributedDataParallelConfig(overlap_grad_reduce=True),
        Axis(),
    )
    weight = chunk.module.weight
    x = torch.randn(5, 4, requires_grad=True)
    y = torch.randn(6, 4)
    chunk.zero_grad_buffer()
    (FusedLinear.apply(x, weight).sum() + (y @ weight.t()).sum()).backward()
    torch.testing.assert_close(weight.main_grad, (x.sum(0) + y.sum(0)).detach().expand(3, 4))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputed_layers_have_equal_gradients(use_reentrant):
    tokens, labels = batch(0)
    grads = []
    for recompute in (False, True):
        chunk, _ = build(
            ONE,
            DistributedDataParallelConfig(overlap_grad_reduce=True, ddp_bucket_size=600),
        )
        for layer in chunk.module.decoder.layers if recompute else ():
            plain = layer.forward
            layer.forward = lambda x, plain=plain: checkpoint(plain, x, use_reentrant=use_reentrant)
        chunk.zero_grad_buffer()
        chunk(tokens, labels).backward()
        assert not any(bucket.missing for bucket in chunk.buckets)
        grads.append(chunk.flat_buffers[0].grad_data.clone())

    assert torch.equal(*grads)


def test_second_last_microbatch_is_an_error():
    chunk, _ = build(ONE, DistributedDataParallelConfig(overlap_grad_reduce=True))
    tokens, labels = batch(0)
    chunk(tokens, labels).backward()
    with pytest.raises(AssertionError, match="second gradient"):
        chunk(tokens, labels).backward()


def test_frozen_parameters_are_not_in_buffers():
    model = plain_model()
    model.decoder.layers[0].linear.weight.requires_grad_(False)
    before = model.decoder.layers[0].linear.weight.clone()
    chunk = DistributedDataParallel(model, DistributedDataParallelConfig(), Axis())
    assert all(
        p is not model.decoder.layers[0].linear.weight
        for bucket in chunk.buckets
        for p in bucket.params
    )

    backward_pass(chunk, 0)
    assert torch.equal(model.decoder.layers[0].linear.weight, before)


def test_each_dtype_has_its_buffer():
    model = plain_model()
    model.decoder.layers[1].to(torch.bfloat16)
    chunk = DistributedDataParallel(model, DistributedDataParallelConfig(), Axis())

    assert [buffer.param_data.dtype for buffer in chunk.flat_buffers] == [
        torch.float32,
        torch.bfloat16,
    ]
    assert {buffer.grad_data.dtype for buffer in chunk.flat_buffers} == {torch.float32}


def test_units_are_layers_and_modules_without_layers():
    model = plain_model(tied=False)
    units = {id(unit): recurse for unit, recurse in iterate_forward_units(model)}
    whole = [model.word_embeddings, *model.decoder.layers, model.output_layer]
    assert {unit for unit, recurse in units.items() if recurse} == {id(unit) for unit in whole}

    covered = {
        p for unit, recurse in iterate_forward_units(model) for p in unit.parameters(recurse)
    }
    assert covered == set(model.parameters())
    assert list(iterate_forward_units(linear := nn.Linear(2, 2))) == [(linear, True)]


class LateGather:
    """A gather that only `wait` completes: until then the parameters are NaN."""

    def __init__(self, bucket):
        self.data = bucket.param_data.clone()
        self.bucket = bucket
        bucket.param_data.fill_(float("nan"))

    def wait(self):
        self.bucket.param_data.copy_(self.data)


def gpt(**changes):
    config = TransformerConfig(
        num_layers=3,
        hidden_size=16,
        num_attention_heads=2,
        vocab_size=VOCAB,
        max_position_embeddings=8,
        **changes,
    )
    return GPTModel(config, make_vocab_size_divisible_by=4)


MODELS = {
    "tiny": TinyModel,
    "tiny, untied": lambda: TinyModel(tied=False),
    "tiny without layers": lambda: TinyModel(tied=False, layers=0),
    "gpt": lambda: gpt(embedding_layernorm=True),
    "gpt, untied": lambda: gpt(
        untie_embeddings_and_output_weights=True,
        position_embedding_type="rope",
    ),
    "gpt, recomputed": lambda: gpt(
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=2,
        hidden_dropout=0.0,
    ),
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("bucket_size", [1, 10**9])
@pytest.mark.parametrize("training", [True, False])
def test_parameters_are_gathered_before_they_are_read(model, bucket_size, training):
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        overlap_param_gather=True,
        ddp_bucket_size=bucket_size,
    )
    module = MODELS[model]()
    module.initialize(seed=7)
    chunk = DistributedDataParallel(module, config, Axis())
    tokens, labels = batch(0)
    inputs = (
        (tokens, labels)
        if isinstance(module, TinyModel)
        else (tokens, torch.arange(tokens.shape[1])[None])
    )
    keywords = {} if isinstance(module, TinyModel) else {"labels": labels}
    chunk.train(training)
    expected = [p.detach().clone() for p in chunk.parameters()]
    for bucket in chunk.buckets:
        bucket._param_works = [LateGather(bucket)]
    loss = chunk(*inputs, **keywords).sum()
    loss.backward()

    assert torch.isfinite(loss)
    assert all(torch.isfinite(p.main_grad).all() for p in chunk.parameters())
    assert all(map(torch.equal, chunk.parameters(), expected))


def test_layers_wait_only_for_their_buckets():
    chunk, _ = build(
        ONE,
        DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            overlap_param_gather=True,
            ddp_bucket_size=1,
        ),
    )
    for bucket in chunk.buckets:
        bucket._param_works = [LateGather(bucket)]
    still_late = []
    for layer in chunk.module.decoder.layers:
        layer.register_forward_pre_hook(
            lambda *_: still_late.append(sum(not b.params_complete for b in chunk.buckets))
        )

    chunk(*batch(0))
    assert still_late == [8, 4, 0], "four parameters per layer, each its own bucket"


def test_sharded_state_has_the_keys_of_the_module():
    chunk, _ = build(ONE)
    assert list(chunk.sharded_state_dict("model.")) == list(
        plain_model().sharded_state_dict("model.")
    )


def test_memory_is_freed_with_the_last_reference():
    chunk, optimizer = build(ONE, DistributedDataParallelConfig(overlap_grad_reduce=True))
    backward_pass(chunk, 0)
    references = [
        weakref.ref(x) for x in (chunk, chunk.flat_buffers[0].grad_data, next(chunk.parameters()))
    ]
    del chunk, optimizer
    gc.collect()
    assert [reference() for reference in references] == [None] * 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"overlap_param_gather": True}, "--use-distributed-optimizer"),
        ({"ddp_bucket_size": 5, "ddp_num_buckets": 2}, "mutually exclusive"),
        ({"ddp_bucket_size": 0}, "--ddp-bucket-size must be positive, got 0"),
    ],
)
def test_invalid_options_are_rejected(options, message):
    with pytest.raises(ValueError, match=message):
        DistributedDataParallelConfig(**options)


def test_default_bucket_size():
    size = lambda **options: DistributedDataParallelConfig(**options).bucket_size(1000, 64)  # noqa: E731
    assert size() == 64_000_000
    assert size(ddp_bucket_size=7) == 7
    assert size(ddp_num_buckets=4) == 250
