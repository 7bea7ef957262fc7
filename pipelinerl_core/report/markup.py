"""What the pages of reports share: the files in templates/, and rows of tables."""

from collections.abc import Iterable
from importlib import resources


def template(name: str) -> str:
    """The text of a file in templates/."""
    return (resources.files("pipelinerl_core.report") / "templates" / name).read_text(encoding="utf-8")


def table_row(cells: Iterable[str], tag: str = "td") -> str:
    """A row of a table. cells: HTML; tag: th for headings."""
    return f"<tr>{''.join(f'<{tag}>{cell}</{tag}>' for cell in cells)}</tr>"
