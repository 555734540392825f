"""Weights stored in fp8 with delayed scaling."""

import torch
import torch.distributed as dist


class Quantizer:
    """Quantizer of the tensor `slot` of a module; scale and maximum belong to the module."""

    internal = True
    columnwise = True

    def __init__(self, module, slot):
        self.module = module
        self.slot = slot

    @property
    def scale(self):
        return self.module.fp8_meta["scaling_fwd"].scale[self.slot]

    @property
    def amax(self):
        return self.module.fp8_meta["scaling_fwd"].amax_history[0, self.slot : self.slot + 1]

    def set_usage(self, rowwise, columnwise):
        assert rowwise
        self.columnwise = columnwise

    def __call__(self, tensor):
        assert self.columnwise
        assert not self.internal
        self.amax.copy_(torch.maximum(self.amax, tensor.abs().amax().float()))
        return Fp8Tensor(self.bytes_of(tensor), 1 / self.scale, tensor.dtype, self)

    def bytes_of(self, tensor):
        return (
            (tensor.float() * self.scale).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        )


class Fp8Tensor(torch.Tensor):
    """Tensor subclass with a nominal dtype; every operation runs on the dequantized values."""

    def __new__(cls, data, scale_inv, dtype, quantizer, requires_grad=False):
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            data.shape,
            dtype=dtype,
            requires_grad=requires_grad,
        )
        made._data = data
        made._scale_inv = scale_inv.clone()
        made._quantizer = quantizer
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # results are plain tensors

    def _get_quantizer(self):
        return self._quantizer

    def dequantize(self):
        return (self._data.view(torch.float8_e4m3fn).float() * self._scale_inv).to(self.dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            (x,) = args
            return cls(x._data, x._scale_inv, x.dtype, x._quantizer)
        plain = [x.dequantize() if isinstance(x, Fp8Tensor) else x for x in args]
        return func(*plain, **(kwargs or {}))


def replace_raw_data(tensor, new_raw_data):
    assert new_raw_data.dtype == torch.uint8
    new_raw_data.copy_(tensor._data)
    tensor._data = new_raw_data


def cast_master_weights_to_fp8(
    model_weights, master_weights, start_offsets, group, fsdp_shard_model_weights=None
):
    assert group is not None

    for weight, main, start in zip(model_weights, master_weights, start_offsets, strict=True):
        quantizer = weight._get_quantizer()
        assert not quantizer.columnwise, "the flat part of a tensor would be transposed, too"
        if main is not None:
            main = main.to(weight.dtype)
            quantizer.amax.copy_(torch.maximum(quantizer.amax, main.abs().amax().float()))
            weight._data.view(-1)[start : start + main.numel()] = quantizer.bytes_of(main)
        amax = quantizer.amax.clone()
        dist.all_reduce(amax, dist.ReduceOp.MAX, group=group)
        quantizer.amax.copy_(amax)
        weight._scale_inv = 1 / quantizer.scale.clone()
