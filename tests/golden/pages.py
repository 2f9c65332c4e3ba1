"""How what is generated gets into a page of the documentation: between two marks. Standard library only."""

from __future__ import annotations


def page_with(text: str, name: str, made: str) -> str:
    """The page with what was made between the two marks of that name."""
    start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
    before, _, rest = text.partition(start)
    _, _, after = rest.partition(end)
    return f"{before}{start}\n{made}\n{end}{after}"
