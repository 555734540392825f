"""Documentation: links resolve, every page is in the site, generated parts can be generated."""

import ast
import re

import pytest

from benchmarks.plot_headlines import ROWS, read_speedups
from benchmarks.run_all import COMMANDS, PAGE, replace_block
from docs.make_options_page import build_page
from megatron.conversion.huggingface.families import FAMILIES
from tests import ROOT

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]


def test_options_page_lists_every_option_once():
    rows = re.findall(r"^\| `(--[^`]+)` \|", build_page(), re.MULTILINE)
    assert len(rows) == len(set(rows)) > 900
    assert "--tensor-model-parallel-size" in rows


def anchors(path):
    """Return the anchors of a page's headings, as GitHub and the site generate them."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {
        re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
    }


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_resolve(path):
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        assert target.exists(), f"{path.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{path.name}: {link}"


def test_every_page_is_in_the_site():
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    missing = [path.name for path in (ROOT / "docs").glob("*.md") if path.name not in site]
    assert not missing


@pytest.mark.parametrize("name", ["README.md", "docs/index.md"])
def test_stated_number_of_model_types(name):
    (stated,) = re.findall(r"(\d+) model types", (ROOT / name).read_text(encoding="utf-8"))
    assert int(stated) == sum(1 + len(family.aliases) for family in FAMILIES)


def list_messages(path):
    """Return every string of a program, with a NUL for each value of an f-string."""
    messages = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            parts = [
                value.value if isinstance(value, ast.Constant) else "\0" for value in node.values
            ]
            messages.append("".join(parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            messages.append(node.value)
    return messages


def test_every_message_of_the_troubleshooting_page_is_in_the_code():
    page = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    assert len(page.split()) <= 1200

    rows = re.findall(r"^\| (`.*?`) \| ", page, re.MULTILINE)
    quoted = [message for row in rows for message in re.findall(r"`([^`]+)`", row)]
    assert len(quoted) > 25

    programs = [*ROOT.glob("megatron/**/*.py"), *ROOT.glob("tools/**/*.py")]
    messages = [message for path in programs for message in list_messages(path)]
    for message in quoted:
        fragments = [fragment.strip() for fragment in message.split("...")]
        pattern = re.compile(".*".join(re.escape(fragment) for fragment in fragments), re.DOTALL)
        assert any(pattern.search(actual) for actual in messages), message


def test_every_benchmark_has_a_block():
    blocks = re.findall(
        r"<!-- begin (\w+) -->\n.*?<!-- end (\w+) -->",
        PAGE.read_text(encoding="utf-8"),
        re.DOTALL,
    )
    assert all(begin == end for begin, end in blocks)
    assert [begin for begin, _ in blocks] == list(COMMANDS)
    assert all((ROOT / command.split()[0]).exists() for command in COMMANDS.values())


def test_replace_block_changes_only_that_block():
    page = "a\n<!-- begin x -->\nold\n<!-- end x -->\nb\n<!-- begin y -->\nother\n<!-- end y -->\n"
    assert replace_block(page, "x", "1\\1\n") == page.replace("old\n", "1\\1\n")
    with pytest.raises(ValueError, match="no block 'z'"):
        replace_block(page, "z", "")


def test_every_headline_ratio_is_in_the_tables():
    page = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    speedups = read_speedups(page)
    assert len(speedups) == len(ROWS)
    assert min(speedups.values()) > 0
