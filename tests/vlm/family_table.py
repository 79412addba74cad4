"""The table of families in README.md, made from their files: name, model, how images and clips are seen, ids, dialects.

`python -m tests.vlm.family_table --write` rewrites it.
"""

import re
import sys
from pathlib import Path

from visionpos import config
from visionpos.vlm import family, family_names

README = Path(__file__).resolve().parents[2] / "README.md"
BEGIN, END = "<!-- families -->\n", "<!-- /families -->\n"
SEEN = {"per_view": "tiles", "joined": "joined tiles"}


def rows() -> list[str]:
    """One row a family. The model is what its file names in its first line."""
    out = []
    for name in family_names():
        spec, dialects = family(name).spec, family(name).dialects
        head = config.shipped("vlm")[name].read_text(encoding="utf-8").splitlines()[0]
        model = head.removeprefix("# ").partition(":")[0]
        seen = "one view" if spec.views.pick is None else SEEN[spec.views.arrange]
        clips = "" if spec.video is None else spec.rule.video if spec.rule else "yes"
        ids = "" if spec.rule is None else ", ".join(spec.rule.axes)
        out.append(f"| `{name}` | {model} | {seen} | {clips} | {ids} | {', '.join(dialects)} |")
    return out


def table() -> str:
    head = [
        "| family | model | an image is | a clip is | ids | dialects |",
        "|---|---|---|---|---|---|",
    ]
    return "\n".join([*head, *rows()]) + "\n"


def in_readme(text: str) -> str:
    """What stands between the marks."""
    found = re.search(re.escape(BEGIN) + r"(.*?)" + re.escape(END), text, re.S)
    assert found, "README.md has no table of families"
    return found[1]


def main(arguments: list[str]) -> int:
    if arguments != ["--write"]:
        sys.stderr.write("usage: python -m tests.vlm.family_table --write\n")
        return 2
    text = README.read_text(encoding="utf-8")
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    README.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
