"""Compile all Triton kernels for GPUs of several generations, without a GPU. Prints their number."""

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron.core import triton_kernels, triton_norms, triton_rotary

KERNELS = {
    name: kernel
    for module in (triton_kernels, triton_norms, triton_rotary)
    for name, kernel in vars(module).items()
    if name.endswith("_kernel")
}
CAPABILITIES = (80, 90, 100)

# Kernel -> types of its arguments
SIGNATURES = {
    "_swiglu_kernel": "x *HALF, y *HALF, size i32",
    "_swiglu_backward_kernel": "dy *HALF, x *HALF, dx *HALF, size i32",
    "_softmax_kernel": "logits *HALF, columns *i64, largest *fp32, total *fp32, predicted *fp32, stride i32, valid i32",
    "_softmax_gradient_kernel": (
        "logits *HALF, columns *i64, largest *fp32, total *fp32, dloss *fp32, stride i32, width i32, valid i32, "
        "softcap fp32"
    ),
    "_adamw_kernel": (
        "param *fp32, grad *fp32, mean *fp32, square *fp32, weight *HALF, scalars *fp32, size i32, decay fp32, "
        "beta1 fp32, one_minus_beta1 fp32, beta2 fp32, one_minus_beta2 fp32, epsilon fp32"
    ),
    "_rotate_kernel": (
        "x *HALF, y *HALF, cos *HALF, sin *HALF, batch i32, groups i32, heads i32, x_position i64, x_sample i64, "
        "x_group i32, x_head i32, y_position i64, y_sample i64, y_group i32, y_head i32, sign fp32, num_pairs i32, "
        "num_unchanged i32"
    ),
    "_residual_norm_kernel": (
        "x *HALF, branch *HALF, weight *HALF, bias *HALF, total *HALF, y *HALF, means *fp32, scales *fp32, size i32, "
        "epsilon fp32, weight_offset fp32"
    ),
    "_residual_norm_backward_kernel": (
        "dy *HALF, dtotal *HALF, total *HALF, weight *HALF, means *fp32, scales *fp32, dx *HALF, dweights *fp32, "
        "dbiases *fp32, rows i32, size i32, weight_offset fp32"
    ),
}
CONSTANTS = {
    "_swiglu_kernel": {"BLOCK": 1024},
    "_swiglu_backward_kernel": {"BLOCK": 1024},
    "_softmax_kernel": {"BLOCKS": 8, "BLOCK": 4096},
    "_softmax_gradient_kernel": {"HAS_SOFTCAP": True, "BLOCKS": 8, "BLOCK": 4096},
    "_adamw_kernel": {"HAS_WEIGHT": True, "BLOCK": 1024},
    "_rotate_kernel": {
        "IS_INTERLEAVED": False,
        "COPIES": True,
        "PAIRS": 64,
        "UNCHANGED": 32,
        "HEADS": 16,
    },
    "_residual_norm_kernel": {
        "IS_RMS": False,
        "HAS_BRANCH": True,
        "HAS_WEIGHT": True,
        "HAS_BIAS": True,
        "BLOCK": 2048,
    },
    "_residual_norm_backward_kernel": {
        "IS_RMS": False,
        "HAS_DTOTAL": True,
        "HAS_WEIGHT": True,
        "HAS_BIAS": True,
        "STEPS": 32,
        "BLOCK": 2048,
    },
}


# Heads are copied by a rotation of no pairs.
COPY = {**CONSTANTS["_rotate_kernel"], "PAIRS": 1, "UNCHANGED": 128}


def compile_kernels() -> int:
    variants = [*CONSTANTS.items(), ("_rotate_kernel", COPY)]
    count = 0
    for name, constants_by_name in variants:
        kernel = KERNELS[name]
        signature = SIGNATURES[name]
        for half in ("bf16", "fp16", "fp32"):
            types = {}
            for argument in signature.replace("HALF", half).split(", "):
                argument_name, dtype = argument.split()
                types[argument_name] = dtype
            constants = {
                (kernel.arg_names.index(key),): value for key, value in constants_by_name.items()
            }
            types |= dict.fromkeys(constants_by_name, "constexpr")
            source = ASTSource(fn=kernel, signature=types, constexprs=constants)
            capabilities = CAPABILITIES if half == "bf16" else CAPABILITIES[1:2]
            for capability in capabilities:
                triton.compile(source, target=GPUTarget("cuda", capability, 32))
                count += 1
    return count


if __name__ == "__main__":
    assert SIGNATURES.keys() == KERNELS.keys(), "a kernel is missing here"
    print(compile_kernels())
