"""The pages of the site that are not files of docs/: the front page, the changelog, the reference.

A hook of MkDocs. The reference has one page for each module that `nav` in mkdocs.yml lists; these are the
public modules. The page of the options has one section for each group of a `Context`. Links of the root
pages into docs/ are turned into links that work on the site.
"""

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from waystation._options import AtomicityMode, CheckpointingImpl, CheckpointLayout, OptionGroup, Options

ROOT = Path(__file__).resolve().parent.parent
ROOT_PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
OPTIONS_MODULE = "waystation.options"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages."""
    for source, target in ROOT_PAGES.items():
        if (ROOT / source).exists():
            text = for_the_site((ROOT / source).read_text())
            files.append(File.generated(config, target, content=text))
    for module in public_modules(config["nav"]):
        text = options_page() if module == OPTIONS_MODULE else f"::: {module}\n"
        files.append(File.generated(config, f"reference/{module}.md", content=text))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Takes out why a block is not run as a test: that is for the test."""
    return re.sub(r"^(\s*```\w+) not-run: .*$", r"\1", markdown, flags=re.MULTILINE)


def for_the_site(text: str) -> str:
    """Rewrites the links of a page in the root directory."""
    for source, target in ROOT_PAGES.items():
        text = re.sub(rf"\]\({re.escape(source)}(#[^)]*)?\)", rf"]({target}\1)", text)
    text = re.sub(r"\]\(docs/", "](", text)
    text = re.sub(r'(src|href)="docs/', r'\1="', text)
    # Other files of the repository are not on the site: their names stay, the links go.
    return re.sub(r"(?<!!)\[([^\]]+)\]\((?![a-z]+:|#)([^)#]+)(#[^)]*)?\)", keep_link_to_page, text)


def keep_link_to_page(link: re.Match[str]) -> str:
    """Keeps a link whose target is on the site, else only its text."""
    target = link[2]
    on_site = target in ROOT_PAGES.values() or (ROOT / "docs" / target).exists()
    return link[0] if on_site else link[1]


def public_modules(nav: Any) -> Iterator[str]:
    """Names of the modules that the navigation lists, in its order."""
    for entry in nav if isinstance(nav, list) else nav.values():
        if not isinstance(entry, str):
            yield from public_modules(entry)
        elif page := re.fullmatch(r"reference/(.+)\.md", entry):
            yield page[1]


def options_page() -> str:
    """The reference of all options, with a section for each group, named as on a context."""
    introduction = f"""# Options of a context

Options are set on a [`Context`][waystation.Context] and apply inside its `with` block. This page lists them
by group: `context.array.loading.mmap` is the option `mmap` of the group `array.loading`. The option
`context.checkpoint_layout` belongs to no group and takes a [CheckpointLayout](#checkpointlayout).
`{OPTIONS_MODULE}` has the classes of the groups and the enumerations.
"""
    groups = [
        _section(path, type(group), "members: false") + _defaults(group)
        for path, group in option_groups(Options())
    ]
    enumerations = [
        _section(kind.__name__, kind, "show_if_no_docstring: true, filters: ['^[A-Z]']")
        for kind in (CheckpointLayout, AtomicityMode, CheckpointingImpl)
    ]
    return "\n".join([introduction, *groups, *enumerations])


def _section(title: str, kind: type, options: str) -> str:
    common = "show_root_heading: false, show_bases: false, heading_level: 3"
    place = f"{kind.__module__}.{kind.__qualname__}"
    return f"## {title}\n\n::: {place}\n    options: {{ {common}, {options} }}\n"


def _defaults(group: OptionGroup) -> str:
    values = ((name, getattr(group, name)) for name in option_names(group))
    shown = (f"`{name} = {getattr(value, '__name__', value)}`" for name, value in values)
    return f"\nDefaults: {', '.join(shown)}.\n"


def option_groups(group: OptionGroup, path: str = "") -> Iterator[tuple[str, OptionGroup]]:
    """The groups below a group that have options of their own, and their paths."""
    for entry in dataclasses.fields(group):
        child = getattr(group, entry.name)
        if isinstance(child, OptionGroup):
            below = f"{path}.{entry.name}" if path else entry.name
            if option_names(child):
                yield below, child
            yield from option_groups(child, below)


def option_names(group: OptionGroup) -> list[str]:
    """The options of a group itself, without those of groups in it."""
    names = [entry.name for entry in dataclasses.fields(group)]
    return [name for name in names if not isinstance(getattr(group, name), OptionGroup)]
