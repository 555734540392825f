"""All options of Megatron-LM since 2023 (and some of its forks'): how many words each takes, and what ours are not.

An option that is no flag of ours is one of three things: without effect here, an option of a feature that the command
line does not turn on, or an error that names the feature.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import resources

from megatron.training.config.accepted_flags import ACCEPTED_WITHOUT_EFFECT, Accepted


@dataclass(frozen=True)
class MegatronOption:
    """A row of the table: one spelling in Megatron-LM."""

    words: str  # that it takes: "0", "1", "2", "3", "+" (one or more), "*" (any number)
    defaults: tuple[str, ...]  # of the newest release first
    group: str  # of options in Megatron-LM; "fork: NAME" for those that it never had


@dataclass(frozen=True)
class Feature:
    """Something that Megatron-LM has and we do not, with the options that belong to it."""

    what: str
    options: str  # regular expression of their names, without dashes in front
    switches: str | None = None  # of those that turn it on; the others mean nothing without. None: all do


def _read_table() -> dict[str, MegatronOption]:
    text = resources.files(__package__).joinpath("megatron_lm_options.tsv").read_text(encoding="utf-8")
    rows = [line.split("\t") for line in text.splitlines() if not line.startswith("#")]
    return {name: MegatronOption(words, tuple(defaults.split(" | ")), group) for name, words, defaults, group in rows}


MEGATRON_OPTIONS = _read_table()

_FORK = "fork: "  # how the group of an option begins that Megatron-LM itself never had
NEVER = "(?!)"  # a switch that no command line of a pretraining gives

FEATURES = (
    Feature(
        "mixture of experts",
        "num-experts|moe-.*|expert-.*|overlap-moe-.*|overlap-dispatch-.*|ep-overlap-.*|high-priority-a2a-.*|"
        "use-grouped-gemm-for-shared-expert",
        "num-experts|expert-model-parallel-size|expert-parallel",
    ),
    Feature(
        "multi-latent attention",
        "multi-latent-attention|(q|kv)-lora-rank|qk-head-dim|qk-pos-emb-head-dim|v-head-dim|rotary-scaling-factor|"
        "mscale.*|cache-mla-latents|mla-.*",
        "multi-latent-attention",
    ),
    Feature("multi-token prediction", "mtp-.*", "mtp-num-layers"),
    Feature(
        "fp8 and fp4 arithmetic",
        "fp[48]-.*|(no|disable)-fp8-wgrad|first-last-layers-bf16|num-layers-at-(start|end)-in-bf16|keep-fp8-.*|"
        "reuse-grad-buf-for-mxfp8-.*|te-precision-config-file",
        "fp[48]-format|fp8-e4m3|fp8-hybrid|te-precision-config-file",
    ),
    Feature(
        "hierarchical or hybrid context parallelism",
        "hierarchical-context-parallel-sizes|hybrid-context-parallel|max-seqlen-per-.*",
        "hierarchical-context-parallel-sizes|hybrid-context-parallel",
    ),
    Feature(
        "fully sharded data parallelism (FSDP)",
        "use-(torch-fsdp2|megatron-fsdp|custom-fsdp)|.*fsdp.*|data-parallel-sharding-strategy|outer-dp-.*|"
        "enable-full-sharding-in-hsdp|suggested-communication-unit-size|no-gradient-reduce-div-fusion",
        "use-(torch-fsdp2|megatron-fsdp|custom-fsdp)",
    ),
    Feature(
        "Mamba and hybrid models",
        "mamba-.*|disable-mamba-.*|is-hybrid-model|hybrid-.*|gdp-.*",
        "is-hybrid-model|hybrid-(override|layer)-pattern",
    ),
    Feature(
        "experimental attention (linear, gated, sparse)",
        "experimental-attention-variant|.*dsa-.*|linear-.*|attention-output-gate",
        "experimental-attention-variant|linear-attention-freq|attention-output-gate",
    ),
    Feature(
        "reinforcement learning", "(rl|grpo|langrl|no-rl|no-langrl)-.*|perform-rl-step|refit-method", "perform-rl-step"
    ),
    Feature(
        "inference",
        "(no-)?inference-.*|mamba-inference-.*|max-tokens-to-oom|flash-decode|decode-only-cuda-graphs|"
        "(en|dis)able-chunked-prefill|use-legacy-static-engine|num-speculative-tokens|mlp-chunks-for-prefill|"
        "nccl-all-reduce-for-prefill|use-same-sampling-seed-.*|use-kitchen-attention|kitchen-.*",
        "use-kitchen-attention",
    ),
    Feature("retrieval (RETRO)", "retro-.*", "retro-(add-retriever|project-dir|workdir)"),
    Feature(
        "injection of faults", "fault-injector-.*|error-injection-.*", "fault-injector-fault-types|error-injection-rate"
    ),
    Feature("restart within the process", "inprocess-.*", "inprocess-restart"),
    Feature("distillation", "logits-.*", "logits-(save|load)-dir"),
    Feature("checkpoints that are not kept", "non-persistent-.*|replication.*", "non-persistent-save-interval"),
    Feature(
        "offloading to host memory",
        "fine-grained-.*|(delay|min|delta)-offload.*|offload-modules|activation-offload-.*|cpu-offloading-.*|"
        "optimizer-cpu-offload|optimizer-offload-.*|use-torch-optimizer-for-cpu-offload|overlap-cpu-optimizer-.*|"
        "no-pin-cpu-.*",
        "fine-grained-activation-offloading|cpu-offloading-num-layers|optimizer-cpu-offload",
    ),
    Feature("muP", "use-mup|mup-.*", "use-mup"),
    Feature("multiplied residual streams (mHC)", "enable-mhc-connections|mhc-.*", "enable-mhc-connections"),
    Feature("YaRN", "yarn-.*|no-yarn-.*", NEVER),
    Feature("logging of memory history", "record-memory-history|memory-snapshot-path", "record-memory-history"),
    Feature("the fault-tolerance package", ".*ft-package|calc-ft-timeouts|ft-.*", "enable-ft-package"),
    Feature("fine-tuning on instructions", "sft|sft-.*", "sft"),
)

# What Megatron-LM itself has renamed and refuses today.
RENAMED = {
    "--batch-size": "--micro-batch-size",
    "--warmup": "--lr-warmup-fraction",
    "--model-parallel-size": "--tensor-model-parallel-size",
}


def base_name(name: str) -> str:
    """What the spellings of a switch have in common: --x, --no-x and --disable-x."""
    return re.sub("^--(no-|disable-)?", "", name)


def arity_of(name: str) -> str:
    """How many words follow an option of Megatron-LM; "*" where it is not known."""
    if name in MEGATRON_OPTIONS:
        return MEGATRON_OPTIONS[name].words
    return "0" if base_name(name) in _bases(MEGATRON_OPTIONS) else "*"


def feature_of(name: str) -> Feature | None:
    """The feature that an option belongs to."""
    return next((feature for feature in FEATURES if re.fullmatch(feature.options, name[2:])), None)


def accepted(name: str) -> Accepted | None:
    """The row of an option that has no effect here, whichever of its spellings was given."""
    if name in ACCEPTED_WITHOUT_EFFECT:
        return ACCEPTED_WITHOUT_EFFECT[name]
    row = _bases(ACCEPTED_WITHOUT_EFFECT).get(base_name(name))
    return ACCEPTED_WITHOUT_EFFECT[row] if row is not None and arity_of(row) == "0" else None


@dataclass
class Verdict:
    """What becomes of the options that are no flags of ours."""

    ignored: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # one line each
    unknown: list[str] = field(default_factory=list)


def judge(options: Iterable[tuple[str, list[str]]]) -> Verdict:
    """Options and their words: without effect, not implemented (one line for each feature), or unknown."""
    verdict = Verdict()
    by_feature: dict[Feature, list[tuple[str, list[str]]]] = {}
    by_fork: dict[str, list[str]] = {}
    for name, words in options:
        option, row, feature = MEGATRON_OPTIONS.get(name), accepted(name), feature_of(name)
        if row is not None and (not row.only or words[0] in row.only):
            verdict.ignored.append(name)
        elif option is not None and option.group.startswith(_FORK):
            by_fork.setdefault(option.group.removeprefix(_FORK), []).append(name)
        elif option is None and arity_of(name) == "*":
            verdict.unknown.append(name)
        elif _is_default(name, words):
            verdict.ignored.append(name)
        elif feature is not None:
            by_feature.setdefault(feature, []).append((name, words))
        else:
            verdict.problems.append(_not_implemented(name, words, row))
    for feature, given in by_feature.items():
        switches = [" ".join([name, *words]) for name, words in given if _turns_on(feature, name)]
        if not switches:
            verdict.ignored += [name for name, _ in given]
            continue
        more = f" (and {len(given) - len(switches)} more flags of it)" if len(given) > len(switches) else ""
        verdict.problems.append(f"{', '.join(switches)}{more}: Megatron-LM's {feature.what} is not implemented here")
    for fork, names in by_fork.items():
        listed = ", ".join(dict.fromkeys(names))
        verdict.problems.append(f"{listed}: no flag of Megatron-LM, but of a fork of it ({fork})")
    return verdict


def _not_implemented(name: str, words: list[str], row: Accepted | None) -> str:
    said = " ".join([name, *words])
    if row is not None:
        return f"{said}: not supported, only {' or '.join(row.only)} ({row.reason})"
    if name in RENAMED:
        return f"{said}: no longer a flag of Megatron-LM; it is called {RENAMED[name]} today"
    return f"{said}: this option of Megatron-LM is not implemented here"


def _turns_on(feature: Feature, name: str) -> bool:
    return feature.switches is None or re.fullmatch(feature.switches, name[2:]) is not None


def _is_default(name: str, words: list[str]) -> bool:
    """Whether an option says what Megatron-LM, and so we, do without it."""
    option = MEGATRON_OPTIONS.get(name)
    if option is None or option.words == "0":  # a switch; given as --no-x where Megatron-LM has --x alone, it is off
        return option is None
    return len(words) == 1 and any(_same(words[0], default) for default in option.defaults)


def _same(word: str, default: str) -> bool:
    try:
        return float(word) == float(default)
    except ValueError:
        return word == default and word != "None"


@functools.cache
def _bases_of(names: tuple[str, ...]) -> dict[str, str]:
    return {base_name(name): name for name in names}


def _bases(table: dict[str, MegatronOption] | dict[str, Accepted]) -> dict[str, str]:
    """Base name -> spelling in the table, of its switches."""
    return _bases_of(
        tuple(name for name in table if name not in MEGATRON_OPTIONS or MEGATRON_OPTIONS[name].words == "0")
    )
