"""The fake CUDA runtime and NCCL detect races, misuse and mismatched collectives."""

import signal

import pytest
import torch

from tests.fake_cuda.launch import launch, run_code

COLLECTIVES = "tests.fake_cuda.collectives"


def test_the_host_cannot_access_device_memory():
    code = (
        "import ctypes, torch; x = torch.ones(4, device='cuda'); "
        "print(ctypes.c_float.from_address(x.data_ptr()).value)"
    )
    assert run_code(code).returncode == -signal.SIGSEGV


def test_copies_run_behind_the_host():
    """A host that reads without waiting for the copy finds the old values."""
    code = """
import torch
source = torch.ones(4, device="cuda")
target = torch.zeros(4).pin_memory()
target.copy_(source, non_blocking=True)
event = torch.cuda.Event()
event.record()
print(event.query(), target.sum().item())
event.synchronize()
print(event.query(), target.sum().item())
"""
    result = run_code(code, FAKE_CUDA_COPY_US="200000")
    assert result.stdout.split() == ["False", "0.0", "True", "4.0"], result.stderr


def test_streams_do_not_wait_for_each_other():
    """Another stream finds the old values unless it waits for the event of the copy."""
    code = """
import torch
source = torch.ones(4).pin_memory()
for waits in (False, True):
    target = torch.zeros(4, device="cuda")
    torch.cuda.synchronize()
    first = torch.cuda.Stream()
    second = torch.cuda.Stream()
    with torch.cuda.stream(first):
        target.copy_(source, non_blocking=True)
    if waits:
        second.wait_stream(first)
    with torch.cuda.stream(second):
        print((target * 2).sum().item())
    torch.cuda.synchronize()
"""
    result = run_code(code, FAKE_CUDA_COPY_US="200000")
    assert result.stdout.split() == ["0.0", "8.0"], result.stderr


def test_kernels_run_behind_the_host():
    """The host goes on, and another stream that does not wait finds the old values."""
    code = """
import torch
target = torch.zeros(4, device="cuda")
found = torch.zeros(4).pin_memory()
side = torch.cuda.Stream()
for waits in (False, True):
    target.add_(1)
    print(torch.cuda.current_stream().query())
    if waits:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        found.copy_(target, non_blocking=True)
    side.synchronize()
    print(found.tolist()[0])
    torch.cuda.synchronize()
"""
    result = run_code(code, FAKE_CUDA_KERNEL_US="200000")
    assert result.stdout.split() == ["False", "0.0", "False", "2.0"], result.stderr


def test_an_event_can_be_recorded_again_in_another_stream():
    """A stream waits for the last record before its wait, whichever is reached first."""
    code = """
import torch
source = torch.ones(4).pin_memory()
target = torch.zeros(4, device="cuda")
torch.cuda.synchronize()
slow, fast, first, second = (torch.cuda.Stream() for _ in range(4))
event = torch.cuda.Event()
with torch.cuda.stream(slow):
    target.copy_(source, non_blocking=True)
event.record(slow)
first.wait_event(event)
event.record(fast)
second.wait_event(event)
for stream in (second, first):
    with torch.cuda.stream(stream):
        print((target * 2).sum().item())
slow.synchronize()
print(event.query())
"""
    result = run_code(code, FAKE_CUDA_COPY_US="200000")
    assert result.stdout.split() == ["0.0", "8.0", "True"], result.stderr


def test_random_numbers_depend_on_the_state_of_the_device():
    """Random numbers depend on the seed and on earlier draws, as on a GPU."""
    x = torch.ones(1000, device="cuda")
    torch.cuda.manual_seed(1)
    first = torch.dropout(x, 0.5, True)
    state = torch.cuda.get_rng_state()
    second = torch.dropout(x, 0.5, True)
    torch.cuda.set_rng_state(state)
    torch.manual_seed(2)  # of the device, too
    other = torch.dropout(x, 0.5, True)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.dropout(x, 0.5, True), second)
    assert 400 < int((first == 0).sum()) < 600
    assert not torch.equal(first, second)
    assert not torch.equal(other, second)


def test_memory_of_the_device_is_limited():
    with pytest.raises(torch.cuda.OutOfMemoryError):
        torch.empty(1 << 40, dtype=torch.uint8, device="cuda")


def test_operators_give_the_results_of_the_cpu():
    torch.manual_seed(0)
    x = torch.randn(3, 5)
    on_device = x.cuda()
    assert torch.equal((on_device @ on_device.T).cpu(), x @ x.T)
    on_device[1:, ::2].mul_(2)  # in place, through a view with strides
    x[1:, ::2].mul_(2)
    assert torch.equal(on_device.cpu(), x)
    assert torch.equal(on_device.bfloat16().cpu(), x.bfloat16())
    assert on_device.sum().item() == x.sum().item()


@pytest.mark.parametrize("num_devices", [2, 3])
def test_collectives_give_the_results_of_gloo(num_devices):
    result = launch(["-m", COLLECTIVES, "same_as_gloo"], num_devices)
    assert result.returncode == 0, result.stderr


def test_batched_messages_do_not_hang():
    result = launch(["-m", COLLECTIVES, "batched_messages"], 2)
    assert result.returncode == 0, result.stderr


def test_operations_of_a_communicator_run_one_after_another():
    """NCCL makes the later stream wait, also if the streams differ."""
    result = launch(["-m", COLLECTIVES, "two_streams"], 2, FAKE_CUDA_COPY_US="300000")
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("scenario", "message"),
    [
        ("other_order", "MISMATCH in all_reduce of 4 elements"),
        ("send_before_receive", "HANGS in send of 4 elements"),
        ("one_device", "invalid usage"),
    ],
)
def test_errors_are_detected(scenario, message):
    result = launch(["-m", COLLECTIVES, scenario], 2, FAKE_NCCL_TIMEOUT="10")
    assert result.returncode != 0, result.stderr
    assert message in result.stderr, result.stderr


@pytest.mark.parametrize(
    "changed", ["out", "grad_out_", "lse", "flash lse", "query"], ids=lambda name: name
)
def test_layouts_that_a_kernel_would_misread(changed):
    """Kernels of a GPU assume layouts that torch does not check: the fake runtime refuses others."""
    aten = torch.ops.aten
    half = {"device": "cuda", "dtype": torch.bfloat16}
    query = torch.randn(16, 2, 4, 16, **half).permute(1, 2, 0, 3)
    inputs = (query, query, query)
    state = torch.zeros(2, dtype=torch.uint64, device="cuda")

    def run_efficient(out, lse, dout=query):
        gradients = [True, True, True, False]
        aten._scaled_dot_product_efficient_attention_backward(
            dout, *inputs, None, out, lse, state[0], state[1], 0.0, gradients, True
        )

    def run_flash(lse, query):
        packed = query.transpose(1, 2)
        tensors = (packed,) * 5
        aten._flash_attention_backward(*tensors, lse, None, None, 16, 16, 0.0, True, state, state)

    out, lse, _, _ = aten._scaled_dot_product_efficient_attention(*inputs, None, True, 0.0, True)
    rows = lse[:, :, :16].contiguous()
    run_efficient(out, lse)
    run_flash(rows, query)
    calls = {
        "out": lambda: run_efficient(torch.empty_like(query), lse),
        "grad_out_": lambda: run_efficient(out, lse, query.float()),
        "lse": lambda: run_efficient(out, lse.mT.contiguous().mT),
        "flash lse": lambda: run_flash(lse[:, :, :16], query),
        "query": lambda: run_flash(rows, torch.randn(2, 4, 16, 18, **half)[..., 1:17]),
    }
    with pytest.raises(RuntimeError, match="would misread an argument"):
        calls[changed]()
