"""The wheel has console scripts that run without the source tree."""

import ast
import re
import subprocess
import sys
import sysconfig

import pytest

from tests import ROOT

SETUP = (ROOT / "setup.py").read_text(encoding="utf-8")
SCRIPTS = re.findall(r'"(megatron-\w+) = ([\w.]+):(\w+)"', SETUP)


@pytest.mark.parametrize(("name", "module", "function"), SCRIPTS)
def test_console_script_names_a_function_without_required_arguments(name, module, function):
    path = ROOT / (module.removeprefix("megatron.").replace(".", "/") + ".py")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            functions[node.name] = node
    arguments = functions[function].args
    assert len(arguments.args) == len(arguments.defaults)


def test_every_tool_has_a_console_script():
    tools = {path.stem for path in (ROOT / "tools").rglob("*.py")}
    scripts = {module.split(".")[-1] for _, module, _ in SCRIPTS}
    assert tools - {"__init__"} == scripts - {"pretrain_gpt"}


def test_extra_all_contains_the_optional_features():
    entries = re.findall(r'^ {8}"([\w-]+)": (\[.*\]),$', SETUP, re.MULTILINE)
    extras = {name: ast.literal_eval(packages) for name, packages in entries}
    # Transformer Engine is compiled for a GPU; the site is built by developers.
    optional = extras["tiktoken"] + extras["plots"] + extras["object-storage"]
    assert sorted(extras["all"]) == sorted(optional)


def test_files_of_megatron_core_in_the_package_are_refused(tmp_path):
    """Both are imported as megatron: installing one over the other mixes their files."""
    package = tmp_path / "megatron"
    (package / "core").mkdir(parents=True)
    text = (ROOT / "megatron/__init__.py").read_text(encoding="utf-8")
    (package / "__init__.py").write_text(text, encoding="utf-8")
    program = [sys.executable, "-c", "import megatron"]
    subprocess.run(program, cwd=tmp_path, check=True)
    (package / "core/package_info.py").touch()
    result = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True)

    assert result.returncode == 1
    assert f"{package} contains files of megatron-core" in result.stderr
    assert "pip uninstall megatron-core megatron-compact" in result.stderr


TRAINING = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --mock-data "
    "--micro-batch-size 1 --tokenizer-type NullTokenizer --vocab-size 127 --lr 1e-3 "
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 "
    "--device cpu --global-batch-size 2 --train-iters 2 --lr-decay-iters 4 --eval-iters 0 --save run"
)


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A virtual environment with the wheel, and the dependencies of this one."""
    directory = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    build = ["--no-deps", "--no-build-isolation", "-w", str(directory), str(ROOT)]
    subprocess.run([*pip, "wheel", *build], check=True)
    (wheel,) = directory.glob("*.whl")
    environment = directory / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    (site,) = environment.glob("lib/python*/site-packages")
    # A path in a .pth file does not run the .pth files there, among them that of this source tree.
    (site / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    python = environment / "bin/python"
    # --ignore-installed: the source tree is installed among the dependencies.
    options = ["--python", str(python), "install", "--no-deps", "--ignore-installed"]
    subprocess.run([*pip, *options, str(wheel)], check=True)
    return environment / "bin"


def run_installed(installed, directory, *words):
    result = subprocess.run(
        [str(installed / words[0]), *words[1:]],
        cwd=directory,
        env={"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, f"{words[0]}: {result.stdout[-3000:]}{result.stderr[-3000:]}"
    return result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, _, _ in SCRIPTS])
def test_console_scripts_run_from_an_installed_wheel(name, installed, tmp_path):
    assert "usage" in run_installed(installed, tmp_path, name, "--help").lower()


@pytest.mark.slow
def test_a_run_from_an_installed_wheel(installed, tmp_path):
    """Plan, train alone and with torchrun, verify, convert and report, without the source tree."""
    flags = TRAINING.split()
    plan = run_installed(installed, tmp_path, "megatron-plan", *flags, "--hidden-size", "4096")
    assert "GB per rank" in plan

    run_installed(installed, tmp_path, "megatron-pretrain", *flags)
    launcher = ["python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    more = [*flags, "--load", "run", "--train-iters", "4"]
    output = run_installed(installed, tmp_path, *launcher, "-m", "pretrain_gpt", *more)
    assert "iteration        4/" in output

    run_installed(installed, tmp_path, "megatron-inspect", "verify", "run")
    convert = ["--saver", "hf", "--load-dir", "run", "--save-dir", "hf"]
    run_installed(installed, tmp_path, "megatron-convert", *convert)
    run_installed(installed, tmp_path, "megatron-report", "run")

    assert (tmp_path / "run/report.html").exists()
    assert (tmp_path / "hf/config.json").exists()

    print_path = "print(__import__('megatron').__file__)"
    path = run_installed(installed, tmp_path, "python", "-c", print_path)
    assert path.startswith(str(installed.parent))
