"""Pages of the documentation: generated ones are current, links lead somewhere."""

import re

import pytest

from benchmarks.run_all import COMMANDS, PAGE, replace_block
from tests import ROOT
from tests.support.options_page import page

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_table_of_options_is_current():
    text = (ROOT / "docs/megatron_lm_options.md").read_text(encoding="utf-8")
    assert text == page(), "run: python -m tests.support.options_page > docs/megatron_lm_options.md"


def anchors(path):
    """The anchors of headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {
        re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
    }


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
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


def test_every_benchmark_has_its_block():
    blocks = re.findall(
        r"<!-- begin (\w+) -->\n.*?<!-- end (\w+) -->", PAGE.read_text(encoding="utf-8"), re.DOTALL
    )
    assert all(begin == end for begin, end in blocks)
    assert [begin for begin, _ in blocks] == list(COMMANDS)
    assert all((ROOT / command.split()[0]).exists() for command in COMMANDS.values())


def test_a_block_is_replaced_and_nothing_else():
    page = "a\n<!-- begin x -->\nold\n<!-- end x -->\nb\n<!-- begin y -->\nother\n<!-- end y -->\n"
    assert replace_block(page, "x", "1\\1\n") == page.replace("old\n", "1\\1\n")
    with pytest.raises(ValueError, match="no block 'z'"):
        replace_block(page, "z", "")
