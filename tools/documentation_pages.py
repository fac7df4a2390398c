"""The pages of the site that are not files of docs/: the front page, the changelog, the reference.

A hook of MkDocs. The reference has one page for each public module of the package: one that has no part
with a leading underscore and declares `__all__`. Links from docs/ to files outside it, and from the root
pages into docs/, are turned into links that work on the site.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
PYTHON = ROOT / "python"
ROOT_PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages."""
    for source, target in ROOT_PAGES.items():
        if (ROOT / source).exists():
            text = for_the_site((ROOT / source).read_text())
            files.append(File.generated(config, target, content=text))
    for module in public_modules():
        text = f"::: {module}\n"
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


def public_modules() -> Iterator[str]:
    """Names of the modules that say in `__all__` what they offer."""
    for path in sorted((PYTHON / "waystation").rglob("*.py")):
        parts = [*path.relative_to(PYTHON).parent.parts]
        if path.name != "__init__.py":
            parts.append(path.stem)
        if not any(part.startswith("_") for part in parts) and declares_all(path):
            yield ".".join(parts)


def declares_all(path: Path) -> bool:
    """Whether a module assigns `__all__`."""
    assigned = (
        target
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Assign)
        for target in node.targets
    )
    return any(isinstance(target, ast.Name) and target.id == "__all__" for target in assigned)
