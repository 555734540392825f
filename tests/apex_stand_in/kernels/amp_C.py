"""See ../README.md."""

import torch

LARGEST_SEEN = 0  # elements of a tensor


def note(tensors):
    global LARGEST_SEEN
    LARGEST_SEEN = max(LARGEST_SEEN, *(tensor.numel() for tensor in tensors))


def multi_tensor_adam_capturable(
    chunk_size,
    noop_flag,
    tensor_lists,
    lr,
    beta1,
    beta2,
    epsilon,
    step,
    mode,
    bias_correction,
    weight_decay,
    inv_scale,
):
    assert lr.dtype == inv_scale.dtype == torch.float32
    assert step.dtype == noop_flag.dtype == torch.int32
    assert mode == 1  # decoupled weight decay
    assert bias_correction == 1
    note(tensor_lists[0])
    if noop_flag.item() == 1:
        return
    for grad, param, mean, square in zip(*tensor_lists, strict=True):
        grad.mul_(inv_scale)
        mean.mul_(beta1).add_(grad, alpha=1 - beta1)
        square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        corrected = (square / (1 - beta2 ** step.item())).sqrt().add_(epsilon)
        param.sub_(lr * (mean / (1 - beta1 ** step.item()) / corrected + weight_decay * param))


multi_tensor_adam = multi_tensor_adam_capturable_master = None


def multi_tensor_l2norm(chunk_size, noop_flag, tensor_lists, per_tensor=False):
    (tensors,) = tensor_lists
    note(tensors)
    assert tensors
    assert noop_flag.dtype == torch.int32
    assert all(t.is_contiguous() for t in tensors)
    return torch.cat([t.flatten().float() for t in tensors]).norm().view(1), torch.empty(0)
