"""Create a virtual environment in which torch's CUDA build runs on the fake CUDA runtime.

    python tests/fake_cuda/build.py                      # .fake-cuda/2.11.0/
    python tests/fake_cuda/build.py --torch 2.13.0       # .fake-cuda/2.13.0/

The environment contains torch's CUDA wheel without the CUDA libraries that the wheel depends on.
Their replacements are compiled into torch's own library folder: runtime.cpp, nccl.cpp, and for all
other libraries functions that do nothing and return zero. An existing environment is updated. The
replacements also contain what compiled packages in its folder `extensions` link to, e.g.
Transformer Engine.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
DEFAULT_TORCH = "2.11.0"
# Headers of the runtime, without which runtime.cpp does not compile.
HEADERS = ("nvidia-cuda-runtime==13.0.*", "nvidia-cuda-crt==13.0.*")


@dataclass(frozen=True)
class Library:
    """A library that torch links to, and how to make its replacement."""

    name: str  # up to .so
    prefixes: tuple[str, ...]  # of its functions
    source: str = ""  # C code of functions that must do something
    file: str = ""  # the same as a C++ file next to this one
    symbol_version: str = ""  # default: the name of the library file
    excluded_prefixes: tuple[str, ...] = ()


CUBLAS = """
int cublasCreate_v2(void **handle) { *handle = (void *)1; return 0; }
int cublasGetVersion_v2(void *handle, int *version) { *version = 130000; return 0; }
int cublasGetVersion(void *handle, int *version) { *version = 130000; return 0; }
"""
# One algorithm with state "success" and no workspace: offsets into cublasLtMatmulHeuristicResult_t.
CUBLAS_LT = """
unsigned long cublasLtGetVersion() { return 130000; }
int cublasLtMatmulAlgoGetHeuristic(void *a, void *b, void *c, void *d, void *e, void *f, void *g,
                                   int wanted, unsigned long *result, int *found) {
  result[8] = 0;
  ((int *)result)[18] = 0;
  *found = 1;
  return 0;
}
"""
CUDNN = """
#include <stddef.h>
size_t cudnnGetVersion() { return 91900; }
int cudnnCreate(void **handle) { *handle = (void *)1; return 0; }
const char *cudnnGetErrorString(int error) { return "error of the fake cuDNN"; }
"""
# Libraries that Transformer Engine opens, links to the replacement of cuDNN.
CUDNN_PARTS = (
    "adv",
    "cnn",
    "engines_precompiled",
    "engines_runtime_compiled",
    "graph",
    "heuristic",
    "ops",
)
DRIVER = """
int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "error of the fake driver"; return 0; }
int cuCtxGetCurrent(void **context) { *context = (void *)1; return 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
  if (flags) *flags = 0;
  if (active) *active = 1;
  return 0;
}
// For Triton: its kernels are compiled for compute capability 9.0, loaded, and do nothing.
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  switch (attribute) {
    case 10: *value = 32; break;  // threads of a warp
    case 16: *value = 132; break;  // multiprocessors
    case 75: *value = 9; break;  // compute capability
    case 76: *value = 0; break;
    case 97: *value = 232448; break;  // bytes of shared memory of a block
    default: *value = 65536;
  }
  return 0;
}
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)1; return 0; }
int cuCtxSetCurrent(void *context) { return 0; }
int cuCtxGetLimit(unsigned long *value, int limit) { *value = 1 << 20; return 0; }
int cuCtxSetLimit(int limit, unsigned long value) { return 0; }
int cuModuleLoadData(void **module, const void *image) { *module = (void *)1; return 0; }
int cuModuleGetFunction(void **function, void *module, const char *name) {
  *function = (void *)1;
  return 0;
}
int cuFuncGetAttribute(int *value, int attribute, void *function) {
  *value = attribute == 0 ? 1024 : 0;  // threads of a block
  return 0;
}
int cuFuncSetAttribute(void *function, int attribute, int value) { return 0; }
int cuFuncSetCacheConfig(void *function, int config) { return 0; }
int cuPointerGetAttribute(void *value, int attribute, unsigned long pointer) {
  *(unsigned long *)value = pointer;
  return 0;
}
int cuLaunchKernelEx(void *config, void *function, void **arguments, void **extra) { return 0; }
"""
# For Transformer Engine, which compiles some kernels at run time.
NVRTC = """
int nvrtcVersion(int *major, int *minor) { *major = 13; *minor = 0; return 0; }
int nvrtcGetNumSupportedArchs(int *number) { *number = 1; return 0; }
int nvrtcGetSupportedArchs(int *architectures) { *architectures = 90; return 0; }
int nvrtcGetCUBINSize(void *program, unsigned long *size) { *size = 1; return 0; }
int nvrtcGetPTXSize(void *program, unsigned long *size) { *size = 1; return 0; }
int nvrtcGetProgramLogSize(void *program, unsigned long *size) { *size = 1; return 0; }
int nvrtcGetLoweredName(void *program, const char *expression, const char **name) {
  *name = "kernel";
  return 0;
}
"""

LIBRARIES = (
    Library("libcudart", ("cuda", "__cuda"), file="runtime.cpp"),
    Library("libnccl", ("nccl",), file="nccl.cpp"),
    Library("libcublasLt", ("cublasLt",), CUBLAS_LT),
    Library("libcublas", ("cublas",), CUBLAS, excluded_prefixes=("cublasLt",)),
    Library("libcudnn", ("cudnn",), CUDNN),
    Library("libcuda", tuple(f"cu{letter}" for letter in "ABCDEGHILMOPSTUW"), DRIVER),
    Library("libnvrtc", ("nvrtc",), NVRTC),
    Library("libcusparseLt", ("cusparseLt",)),
    Library("libcusparse", ("cusparse",), excluded_prefixes=("cusparseLt",)),
    Library("libcusolver", ("cusolver",)),
    Library("libcufft", ("cufft",)),
    Library("libcurand", ("curand",)),
    Library("libcufile", ("cuFile",)),
    Library("libcupti", ("cupti",)),
    Library("libnvshmem_host", ("nvshmem",), symbol_version="NVSHMEM"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--torch",
        default=DEFAULT_TORCH,
        metavar="VERSION",
        help=f"version of torch with a CUDA 13 build; default: {DEFAULT_TORCH}",
    )
    args = parser.parse_args()
    version = args.torch
    environment = ROOT / ".fake-cuda" / version
    python = environment / "bin" / "python"
    installed = environment / ".installed"
    if not installed.exists():
        install(environment, python, version)
        installed.touch()
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site_packages = Path(run(python, "-c", code).strip())
    if not (site_packages / "torch" / "lib" / "libtorch_cuda.so").exists():
        sys.exit(f"torch {version} in {environment} was not built for CUDA: remove {environment}")
    build_libraries(site_packages / "torch" / "lib", environment)
    enable_numerics(site_packages)
    print(python)


def install(environment: Path, python: Path, version: str) -> None:
    """Install torch without its CUDA libraries, the project's dependencies, and the headers."""
    print(f"== setting up {environment} (a few minutes the first time)", file=sys.stderr)
    venv.create(environment, with_pip=True)
    pip = (python, "-m", "pip", "install", "--quiet", "--no-deps")
    run(*pip, f"torch==={version}")  # exactly: no build of this version for CPUs
    run(*pip, "--require-hashes", "-r", ROOT / "requirements" / "hashed.txt")
    run(*pip, "--upgrade", "--target", environment / "headers", *HEADERS)
    # Compiles the dataset index builders next to their sources, as `make setup` does.
    run(python, "setup.py", "--quiet", "build_ext", "--inplace")


def build_libraries(folder: Path, environment: Path) -> None:
    """Compile the replacements into `folder`, which torch's libraries search."""
    build = environment / "build"
    build.mkdir(exist_ok=True)
    replaced = {library.name for library in LIBRARIES}
    torch_libraries = [
        path for path in folder.glob("*.so*") if path.name.split(".so")[0] not in replaced
    ]
    extensions = sorted((environment / "extensions").glob("**/*.so"))
    symbols = list_undefined_symbols([*torch_libraries, *extensions])
    (include,) = (environment / "headers").glob("**/include/cuda_runtime_api.h")
    for library in LIBRARIES:
        file_name = find_file_name(library, torch_libraries)
        if file_name is None:  # this version of torch does not link to it
            continue
        target = folder / file_name
        sources = [Path(__file__), *extensions]
        if library.file:
            sources.append(HERE / library.file)
        newest = max(source.stat().st_mtime for source in sources)
        if not target.exists() or target.stat().st_mtime < newest:
            build_library(library, target, symbols, build, include.parent)
    for part in CUDNN_PARTS:
        link = folder / f"libcudnn_{part}.so.9"
        link.unlink(missing_ok=True)
        link.symlink_to("libcudnn.so.9")


def build_library(
    library: Library, target: Path, symbols: set[str], build: Path, include: Path
) -> None:
    """Compile one replacement: its own code, and functions that return zero."""
    own = build / (library.file or f"{library.name}.c")
    if library.file:
        own.write_text((HERE / library.file).read_text())
    else:
        own.write_text(library.source)
    compiler = ["g++", "-std=c++17"] if library.file else ["gcc"]
    flags = ["-fPIC", "-O2", "-w", f"-I{include}"]
    object_file = build / f"{library.name}.o"
    run(*compiler, *flags, "-c", own, "-o", object_file)

    defined = set(
        run("nm", "--defined-only", "--extern-only", "--just-symbols", object_file).split()
    )
    missing = [
        symbol
        for symbol in sorted(symbols - defined)
        if symbol.startswith(library.prefixes)
        and not (library.excluded_prefixes and symbol.startswith(library.excluded_prefixes))
    ]
    stubs = build / f"{library.name}_stubs.c"
    stubs.write_text("".join(f"int {symbol}() {{ return 0; }}\n" for symbol in missing))
    versions = build / f"{library.name}.map"
    versions.write_text(f"{library.symbol_version or target.name} {{ global: *; }};\n")
    stubs_object = build / f"{library.name}_stubs.o"
    run("gcc", *flags, "-c", stubs, "-o", stubs_object)
    links = [f"-Wl,-soname,{target.name}", f"-Wl,--version-script={versions}"]
    if library.name == "libnccl":  # it pushes tasks to the runtime's streams
        links += [str(next(target.parent.glob("libcudart.so.*")))]
    run(*compiler, "-shared", "-o", target, object_file, stubs_object, *links, "-lpthread")


def list_undefined_symbols(libraries: list[Path]) -> set[str]:
    """Return the names, without versions, of all functions that the libraries expect elsewhere."""
    lines = run("nm", "--dynamic", "--undefined-only", "--just-symbols", *libraries).splitlines()
    return {line.split("@")[0] for line in lines}


def find_file_name(library: Library, torch_libraries: list[Path]) -> str | None:
    """Return the file name, e.g. libcudart.so.13, under which torch links to a library."""
    for line in run("readelf", "--dynamic", *torch_libraries).splitlines():
        if "NEEDED" in line and f"[{library.name}.so" in line:
            return line.split("[")[1].rstrip("]")
    return None


def enable_numerics(site_packages: Path) -> None:
    """Let the import of torch enable numerics.py."""
    module = site_packages / "fake_cuda_numerics.py"
    module.unlink(missing_ok=True)
    module.symlink_to(HERE / "numerics.py")
    initialization = site_packages / "torch" / "__init__.py"
    hook = "\nimport fake_cuda_numerics as _fake_cuda_numerics\n_fake_cuda_numerics.enable()\n"
    text = initialization.read_text()
    if hook not in text:
        initialization.write_text(text + hook)


def run(*command: object) -> str:
    """Run a command in the root of the project and return its output."""
    words = [str(word) for word in command]
    result = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if result.returncode != 0:
        sys.exit(f"failed: {' '.join(words[:12])}")
    return result.stdout


if __name__ == "__main__":
    main()
