"""Every relative link and every anchor in the project's Markdown leads somewhere. Exit code 1 names those that do not."""

import re
import subprocess
import sys
from pathlib import Path

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+\s+(.*)$", re.MULTILINE)


def anchors(text: str) -> set[str]:
    """The anchors that a Markdown page offers, as repository hosts make them from headings."""
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in HEADING.findall(text)}


def broken(page: Path) -> list[str]:
    found = []
    for target in LINK.findall(page.read_text()):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        goal = (page.parent / path).resolve() if path else page.resolve()
        if not goal.exists():
            found.append(f"{page}: {target} leads nowhere")
        elif anchor and anchor not in anchors(goal.read_text()):
            found.append(f"{page}: {target} names no heading of {goal.name}")
    return found


def main() -> int:
    listed = subprocess.run(["git", "ls-files", "*.md"], capture_output=True, text=True, check=True, timeout=30)
    pages = [Path(name) for name in listed.stdout.split()]
    problems = [problem for page in pages for problem in broken(page)]
    print("\n".join(problems) or f"{len(pages)} pages, every link leads somewhere")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
