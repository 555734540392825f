"""The table of Megatron-LM's options: what each is here.

    python -m tests.support.options_page > docs/megatron_lm_options.md

It is made from the parser of `pretrain_gpt.py` and from the list of options by which it explains
what it refuses.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron.training.config.arguments import MEGATRON_OPTIONS, OTHER_NAMES, base_name
from megatron.training.config.run_config import flag_parser

HEAD = """# Megatron-LM's options

What becomes of every option that Megatron-LM has had since 2023 when it stands on the command line of
`pretrain_gpt.py`. This page is made by `tests/support/options_page.py` from the parser itself.

- **yes**: a flag of this project, with the same meaning.
- **no effect**: accepted; the mathematics and the files are the same with and without it, for the reason given.
- **only as default**: accepted where it asks for the default or belongs to a feature that is off; else an error
  that names the feature.
"""


def rows() -> Iterator[tuple[str, str, str, str]]:
    """(group, option, what it is here, why) of every option of Megatron-LM itself, in the order of its groups."""
    known = flag_parser().spellings
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
        elif option.here in ("turns on", "part of"):
            yield option.group, name, "only as default", f"not implemented: {option.why}"
        elif option.here == "called":
            yield option.group, name, "only as default", f"renamed to {option.why}"
        else:
            yield option.group, name, "only as default", "not implemented"


def page() -> str:
    table = sorted(rows(), key=lambda row: (row[0].lower(), row[1]))
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
    print(page(), end="")
