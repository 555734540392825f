"""Compare the operations of a layer on a device with fp32 on the CPU: values and gradients."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.core.module import Normal
from megatron.core.optimizer.grad_norm import sum_of_squares
from megatron.core.parallel_state import Axis, ExpertAxes
from megatron.core.tensor_parallel import (
    TensorParallelRng,
    VocabParallelEmbedding,
    cross_entropy,
    get_loss_chunk_elements,
    linear_cross_entropy,
)
from megatron.core.tensor_parallel.layers import compute_linear_weight_grad
from megatron.core.transformer.attention import blockwise
from megatron.core.transformer.attention import core as attention_module
from megatron.core.transformer.attention.core import local_attention, supports_grouped_heads
from megatron.core.transformer.attention.kernels import Scoring
from megatron.core.transformer.attention.masks import AttentionMask
from megatron.core.transformer.attention.multi_head import SelfAttention
from megatron.core.transformer.grouped_linear import GroupedLinear
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.norm import Norm
from megatron.core.transformer.placement import Placement
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.support.count_calls import CountCalls
from tests.support.fake_cuda import is_fake_cuda
from tests.support.local_exchange import LocalExchange

TOLERANCES = {
    torch.float32: 2e-5,
    torch.bfloat16: 1.5e-2,
    torch.float16: 4e-3,
}  # of the largest element
CPU = torch.device("cpu")
LLAMA = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "group_query_attention": True,
    "num_query_groups": 2,
    "attention_dropout": 0.0,
}


def config(dtype: torch.dtype, **options) -> TransformerConfig:
    return TransformerConfig(
        1,
        64,
        4,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        **options,
    )


def placed(device) -> Placement:
    return Placement(Axis(), TensorParallelRng(0, 0, device), device=device)


def attention(dtype, device, **options):
    return SelfAttention(config(dtype, **(LLAMA | options)), placed(device))


MODULES = {
    "RMSNorm": lambda dtype, device: Norm(
        config(dtype, **LLAMA),
        64,
        partial_grad=False,
        device=device,
    ),
    "LayerNorm": lambda dtype, device: Norm(config(dtype), 64, partial_grad=False, device=device),
    "SwiGLU": lambda dtype, device: MLP(config(dtype, **LLAMA), placed(device)),
    "GELU": lambda dtype, device: MLP(config(dtype), placed(device)),
    "attention": attention,
    "windows, norms of heads": lambda *place: attention(
        *place,
        window_size=(5, 0),
        qk_layernorm=True,
    ),
}


def results(module, values, dtype, device, *arguments):
    """Return output, input gradient and parameter gradients in fp32 on the CPU."""
    with torch.no_grad():
        for param, value in zip(module.parameters(), values["weights"], strict=True):
            param.copy_(value)
    x = values["x"].to(device, dtype, copy=True).requires_grad_()
    y = module(x, *arguments)
    y.backward(values["dy"].to(device, dtype))
    return [
        t.detach().float().cpu()
        for t in (y, x.grad, *(param.grad for param in module.parameters()))
    ]


def assert_close(found, expected, tolerance):
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() <= tolerance * other.abs().max()


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", MODULES)
def test_layers(name, dtype, device):
    torch.manual_seed(0)
    reference = MODULES[name](torch.float32, CPU)
    values = {"x": torch.randn(16, 2, 64).to(dtype), "dy": torch.randn(16, 2, 64).to(dtype)}
    values["weights"] = [
        (0.2 * torch.randn(param.shape)).to(dtype) for param in reference.parameters()
    ]
    expected = results(reference, values, torch.float32, CPU)
    actual = results(MODULES[name](dtype, torch.device(device)), values, dtype, device)
    assert_close(actual, expected, TOLERANCES[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("options", [{}, {"window_size": (5, 0)}], ids=["causal", "window"])
def test_grouped_queries_never_keep_all_probabilities(dtype, options):
    """Only fused kernels are enabled: torch raises if only the plain products could compute it."""
    module = attention(dtype, torch.device("cuda"), **options)
    x = torch.randn(256, 2, 64, device="cuda", dtype=dtype, requires_grad=True)
    fused = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    if torch.backends.cuda.cudnn_sdp_enabled():  # not on the fake CUDA runtime
        fused.append(SDPBackend.CUDNN_ATTENTION)
    with sdpa_kernel(fused):
        module(x).float().sum().backward()


WINDOW = {"window_size": (5, 0)}
SINKS = {"softmax_type": "learnable"}
SOFTCAP = {"attn_logit_softcapping": 3.0}
MIXED = [[1, 9, 6], [16]]  # lengths of the documents of two samples
SINGLE = [[1] * 16] * 2
RESTRICTIONS = {  # options, and lengths of documents
    "documents": ({}, MIXED),
    "single tokens": ({}, SINGLE),
    "window": (WINDOW, None),
    "window, documents": (WINDOW, MIXED),
    "window, sinks": (WINDOW | SINKS, None),
    "window, sinks, documents": (WINDOW | SINKS, MIXED),
    "alibi, documents": ({"position_embedding_type": "alibi"}, MIXED),
    "softcap, window, documents": (WINDOW | SOFTCAP, MIXED),
    "misaligned heads, documents": ({"kv_channels": 12}, MIXED),
    "misaligned heads, alibi, documents": (
        {"kv_channels": 12, "position_embedding_type": "alibi"},
        MIXED,
    ),
    "misaligned heads, sinks": ({"kv_channels": 12} | SINKS, None),
    "wide heads, documents": ({"kv_channels": 264}, MIXED),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", RESTRICTIONS)
def test_documents_and_windows(name, dtype, device):
    """Attention within documents equals the attention of each document on its own."""
    options, lengths = RESTRICTIONS[name]
    torch.manual_seed(0)
    documents = None
    if lengths is not None:
        rows = [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths]
        documents = torch.stack(rows)

    def run(dtype, device, documents):
        module = attention(dtype, torch.device(device), **options)
        return results(module, values, dtype, device, documents)

    module = attention(torch.float32, CPU, **options)
    values = {"x": torch.randn(16, 2, 64).to(dtype), "dy": torch.randn(16, 2, 64).to(dtype)}
    values["weights"] = [
        (0.2 * torch.randn(param.shape)).to(dtype) for param in module.parameters()
    ]
    assert_close(
        run(dtype, device, documents),
        run(torch.float32, CPU, documents),
        TOLERANCES[dtype],
    )

    if lengths is None:
        return
    # The output of each document without the others; rotary embedding sees distances only.
    actual = module_output(attention(dtype, torch.device(device), **options), values, documents)
    for sample, row in enumerate(lengths):
        start = 0
        for length in row:
            positions = slice(start, start + length)
            alone = {**values, "x": values["x"][positions, sample : sample + 1]}
            module = attention(torch.float32, CPU, **options)
            expected = module_output(module, alone, None)
            assert_close([actual[positions, sample : sample + 1]], [expected], TOLERANCES[dtype])
            start += length


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("positions", "head_dim"),
    [("alibi", 16), ("alibi", 12), ("rope", 264), ("rope", 16)],
    ids=["alibi", "alibi, misaligned heads", "wide heads", "causal"],
)
def test_blocks_of_context_parallel_ranks(positions, head_dim, dtype, device):
    """Blocks of two ranks, one after the other, equal attention to whole sequences in fp32."""
    torch.manual_seed(0)
    mask = AttentionMask(config(dtype, position_embedding_type=positions), (0, 1), None)
    # [s, b, heads, d] in memory, as in a layer: 32 positions of 2 samples
    values = [torch.randn(32, 2, 4, head_dim).to(dtype) for _ in range(4)]
    query, key, value, dout = (x.permute(1, 2, 0, 3) for x in values)

    inputs = [x.to(torch.float32, copy=True).requires_grad_() for x in (query, key, value)]
    out = local_attention(*inputs, mask, None, Scoring())
    out.backward(dout.float())
    expected = [out.detach(), *(x.grad for x in inputs)]

    def select_rank(x, rank):  # [b, heads, s, d] -> [b, heads, s/2, d], the chunks of a rank
        chunks = x.chunk(4, 2)
        memory = torch.cat((chunks[rank], chunks[3 - rank]), 2).permute(2, 0, 1, 3).contiguous()
        return memory.to(device).permute(1, 2, 0, 3)

    def join_ranks(first, second):
        chunks = [*first.chunk(2, 2), *second.chunk(2, 2)]
        return torch.cat([chunks[i] for i in (0, 2, 3, 1)], 2).float().cpu()

    pairs = [torch.stack((select_rank(key, r), select_rank(value, r))) for r in (0, 1)]
    exchange = LocalExchange(pairs)
    outputs = []
    dqueries = []
    for rank in (0, 1):
        own_query = select_rank(query, rank).requires_grad_()
        context = blockwise._BlockwiseAttention.apply(
            own_query,
            pairs[rank].requires_grad_(),
            None,
            mask,
            None,
            Axis(rank, 2, (0, 1)),
            exchange,
            Scoring(),
        )
        context.backward(select_rank(dout, rank))
        outputs.append(context.detach())
        dqueries.append(own_query.grad)

    gradients = [join_ranks(*(g[i] for g in exchange.gradients)) for i in (0, 1)]
    actual = [join_ranks(*outputs), join_ranks(*dqueries), *gradients]
    assert_close(actual, expected, TOLERANCES[dtype])


def module_output(module, values, documents):
    with torch.no_grad():
        for param, value in zip(module.parameters(), values["weights"], strict=True):
            param.copy_(value)
        x = values["x"].to(param.device, param.dtype)
        return module(x, documents).float().cpu()


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, WINDOW], ids=["causal", "window"])
def test_kernels_of_many_documents(options):
    """The number of kernels does not depend on the number of documents."""
    counts = []
    for num_documents in (2, 32):
        numbers = torch.arange(num_documents).repeat_interleave(64 // num_documents)
        module = attention(torch.bfloat16, torch.device("cuda"), **options)
        x = torch.randn(64, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        with CountCalls() as calls:
            module(x, torch.stack((numbers, numbers))).float().sum().backward()
        assert calls.count["_flash_attention_forward"] == 1
        assert calls.count["_flash_attention_backward"] == 1
        counts.append(calls.count)

    # The documents are found on the CPU.
    for name in ("unique_consecutive", "slice"):
        for count in counts:
            count.pop(name, None)
    assert counts[0] == counts[1]


@pytest.mark.gpu
@pytest.mark.parametrize("options", [WINDOW, WINDOW | SINKS], ids=str)
def test_windows_have_no_mask(options):
    """The window needs far less memory than a mask of `[s, s]`.

    Flash attention with a window has workspaces that grow with s, unlike cuDNN's causal attention.
    """
    length = 1024 if is_fake_cuda() else 8192  # where s^2 bytes are far more than these workspaces
    peaks = []
    for layer_options in ({}, options):
        module = attention(torch.bfloat16, torch.device("cuda"), **layer_options)
        x = torch.randn(length, 1, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        module(x).float().sum().backward()  # the first call allocates workspaces
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        module(x).float().sum().backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)

    without_window, with_window = peaks
    assert with_window - without_window < length * length // 2
    assert not module.core_attention.mask._static_masks
    assert not module.core_attention.mask._chunk_masks


@pytest.mark.parametrize(
    "options",
    [{}, {"window_size": (5, 0)}, {"position_embedding_type": "alibi"}],
)
def test_copies_of_keys_and_values_give_the_same(options, device, monkeypatch):
    """Repeated key and value heads, for kernels without grouping, equal torch's own grouping."""
    torch.manual_seed(0)
    values = {"x": torch.randn(16, 2, 64), "dy": torch.randn(16, 2, 64)}

    def module():
        return attention(torch.float32, torch.device(device), **options)

    values["weights"] = [0.2 * torch.randn(param.shape) for param in module().parameters()]
    actual = []
    for grouped in (True, False):
        monkeypatch.setattr(
            attention_module,
            "supports_grouped_heads",
            lambda *place, grouped=grouped: grouped,
        )
        actual.append(results(module(), values, torch.float32, device))

    assert_close(actual[0], actual[1], 1e-5)


def test_which_kernels_take_groups():
    half = torch.bfloat16
    single = torch.float32
    assert supports_grouped_heads("cpu", half, True)
    assert supports_grouped_heads("cpu", single, False)
    assert supports_grouped_heads("cuda", half, False)
    assert supports_grouped_heads("cuda", torch.float16, False)
    assert not supports_grouped_heads("cuda", half, True)
    assert not supports_grouped_heads("cuda", single, False)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_weight_gradients_are_added_in_fp32(dtype, device):
    """The sum with `main_grad`, which is a view into a larger buffer."""
    torch.manual_seed(0)
    dy = torch.randn(16, 24).to(dtype)
    x = torch.randn(16, 32).to(dtype)
    buffer = torch.randn(2 + 24 * 32)
    expected = buffer[2:].view(24, 32) + dy.float().T @ x.float()
    weight = torch.nn.Parameter(torch.zeros(24, 32, device=device, dtype=dtype))
    main_grad = buffer.to(device)[2:].view(24, 32)
    weight.main_grad = main_grad

    assert compute_linear_weight_grad(weight, dy.to(device), x.to(device)) is None
    assert weight.main_grad is main_grad
    assert main_grad.dtype == torch.float32
    assert_close([main_grad.cpu()], [expected], TOLERANCES[dtype])


def test_experts_without_tokens_have_no_gradient(device):
    """The grouped kernel of some GPUs does not write their products."""
    torch.manual_seed(0)
    torch_device = torch.device(device)
    linear = GroupedLinear(
        config(torch.bfloat16, num_experts=4, **LLAMA),
        16,
        32,
        init=Normal(0.1),
        split_dim=1,
        axes=ExpertAxes(),
        device=torch_device,
    )
    linear.initialize(1)
    linear.weight.main_grad = torch.zeros(linear.weight.shape, device=torch_device)
    counts = torch.tensor([24, 0, 40, 0], device=torch_device)
    x = torch.randn(64, 16, device=torch_device, dtype=torch.bfloat16)
    dy = torch.randn(64, 32, device=torch_device, dtype=torch.bfloat16)
    # The allocator gives memory of the same size to the products: make its content visible.
    poison = torch.full(linear.weight.shape, torch.nan, device=torch_device, dtype=torch.bfloat16)
    del poison
    linear(x, counts).backward(dy)
    expected = torch.zeros(linear.weight.shape)
    expected[0] = dy[:24].float().cpu().T @ x[:24].float().cpu()
    expected[2] = dy[24:].float().cpu().T @ x[24:].float().cpu()
    assert_close([linear.weight.main_grad.cpu()], [expected], TOLERANCES[torch.bfloat16])


def test_gradient_norm(device):
    """Compare sums over tensors in a buffer, with and without whole blocks, with fp64."""
    torch.manual_seed(0)
    sizes = (64, 3 * 65536 + 192, 1 << 20)
    host = torch.randn(sum(sizes)) * torch.logspace(-4, 0, sum(sizes))
    expected = host.double().square().sum()
    grads = host.to(device).split(sizes)
    with CountCalls() as calls:
        actual = sum_of_squares(grads, torch.device(device))

    assert actual.dtype == torch.float64
    assert_close([actual.cpu()], [expected], 2e-6)
    if device == "cuda":
        assert calls.count["_foreach_norm"] == 1
        assert calls.count.total() < 6

    bad = host.clone()
    bad[-1] = torch.nan
    assert sum_of_squares(bad.to(device).split(sizes), torch.device(device)).isnan()
    assert sum_of_squares([], torch.device(device)) == 0


def loss(dtype, device, hidden, weight, labels):
    hidden, weight = (t.to(device, dtype, copy=True).requires_grad_() for t in (hidden, weight))
    losses = linear_cross_entropy(hidden, weight, labels.to(device), vocab_size=90, tp=Axis())
    losses.mean().backward()
    return [t.detach().float().cpu() for t in (losses, hidden.grad, weight.grad)]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_loss(dtype, device):
    torch.manual_seed(0)
    hidden = torch.randn(16, 2, 64).to(dtype)
    weight = (0.2 * torch.randn(96, 64)).to(dtype)
    labels = torch.randint(0, 90, (16, 2))
    logits = (hidden.double() @ weight.double().t())[..., :90]
    plain = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1),
        labels.flatten(),
        reduction="none",
    ).view(
        16,
        2,
    )
    actual = loss(dtype, device, hidden, weight, labels)

    assert_close(actual[:1], [plain.float()], TOLERANCES[dtype])
    assert_close(actual, loss(torch.float32, CPU, hidden, weight, labels), TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_loss_does_not_depend_on_the_size_of_a_chunk(dtype, device, monkeypatch):
    """A GPU uses chunks 32 times as large as a CPU.

    It sums in an order that depends on the number of rows.
    """
    assert get_loss_chunk_elements("cuda") == 32 * get_loss_chunk_elements("cpu")

    torch.manual_seed(0)
    hidden = torch.randn(16, 2, 64).to(dtype)
    weight = (0.2 * torch.randn(96, 64)).to(dtype)
    labels = torch.randint(0, 90, (16, 2))
    results = []
    for elements in (1 << 20, 5 * 96, 1):
        monkeypatch.setitem(cross_entropy._CHUNK_ELEMENTS, device, elements)
        results.append(loss(dtype, device, hidden, weight, labels))

    for other in results[1:]:
        if device == "cpu":
            assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
        else:
            assert_close(other[:1], results[0][:1], 1e-6)  # losses
            assert_close(other[1:], results[0][1:], TOLERANCES[dtype])


def test_embedding_gradient_is_the_same_every_time(device):
    torch.manual_seed(0)
    tokens = torch.randint(0, 8, (64, 4), device=device)
    dy = torch.randn(64, 4, 32, device=device)
    grads = []
    for _ in range(3):
        module = VocabParallelEmbedding(
            8,
            32,
            num_rows=8,
            init=Normal(0.1),
            tp=Axis(),
            device=torch.device(device),
        )
        module.initialize(1)
        module.weight.main_grad = torch.zeros(8, 32, device=device)
        module(tokens).backward(dy)
        grads.append(module.weight.main_grad)

    assert torch.equal(grads[0], grads[1])
    assert torch.equal(grads[0], grads[2])

    summed = torch.zeros(8, 32).index_add(0, tokens.cpu().flatten(), dy.cpu().flatten(0, 1))
    assert_close([grads[0].cpu()], [summed], 1e-5)
