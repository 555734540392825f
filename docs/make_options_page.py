"""Generate the table of Megatron-LM's options and their support here (`make docs`).

    python docs/make_options_page.py > docs/megatron_lm_options.md

The sources are the parser of `pretrain_gpt.py` and the option list that its error messages use.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron.training.config.megatron_lm_options import MEGATRON_OPTIONS, base_name
from megatron.training.config.megatron_options import OTHER_NAMES
from megatron.training.config.parsing import make_flag_parser

HEAD = """# Megatron-LM's options

Every option that Megatron-LM has had since 2023, and how `pretrain_gpt.py` treats it. Generated
from the parser by `docs/make_options_page.py`.

- **yes**: supported with the same meaning.
- **no effect**: accepted; results and files are the same with and without it, for the given reason.
- **only as default**: accepted if it requests the default or belongs to a disabled feature;
otherwise
  an error that names the feature.
"""


def iterate_rows() -> Iterator[tuple[str, str, str, str]]:
    """Yield (group, option, support, reason) for every option of Megatron-LM, in group order."""
    known = make_flag_parser().spellings
    bases = {base_name(name) for name, spelling in known.items() if spelling.words == "0"}
    for name, option in MEGATRON_OPTIONS.items():
        if option.group.startswith("fork: "):
            continue
        if name in OTHER_NAMES:
            values = ", ".join(
                f"{field} = {value}" for field, value in OTHER_NAMES[name].values.items()
            )
            yield (
                option.group,
                name,
                "yes",
                f"another way to set {values or OTHER_NAMES[name].takes}",
            )
        elif name in known or (option.words == "0" and base_name(name) in bases):
            yield option.group, name, "yes", ""
        elif option.here == "no effect":
            only = f"; only {' or '.join(option.harmless)}" if option.harmless else ""
            yield option.group, name, "no effect", option.why + only
        elif option.here == "saves memory":
            yield option.group, name, "no effect", f"{option.why}: memory is not saved"
        elif option.here in ("turns on", "part of"):
            yield option.group, name, "only as default", f"not implemented: {option.why}"
        elif option.here == "called":
            yield option.group, name, "only as default", f"renamed to {option.why}"
        else:
            yield option.group, name, "only as default", "not implemented"


def build_page() -> str:
    """Return the page as Markdown."""
    table = sorted(iterate_rows(), key=lambda row: (row[0].lower(), row[1]))
    counts = {
        kind: sum(row[2] == kind for row in table)
        for kind in ("yes", "no effect", "only as default")
    }
    lines = [
        HEAD,
        f"{len(table)} spellings: " + ", ".join(f"{n} {kind}" for kind, n in counts.items()) + ".",
    ]
    group = None
    for row in table:
        if row[0] != group:
            group = row[0]
            lines += ["", f"## {group or 'Others'}", "", "| option | here | |", "|---|---|---|"]
        lines.append(f"| `{row[1]}` | {row[2]} | {row[3].replace('|', chr(92) + '|')} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(build_page(), end="")
