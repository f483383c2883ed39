"""README.md from nbs/index.ipynb: `python scripts/readme.py` writes it, with `--check` it only compares (exit status 1).

Text cells as they are, code cells as fenced code with what they printed under it; cells marked `#| hide` are dropped.
"""
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def readme(notebook: dict) -> str:
    "The notebook as Markdown."
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"]).strip()
        directives = re.findall(r"^#\| *(\w+)", source, flags=re.M)
        source = re.sub(r"^#\|.*\n?", "", source, flags=re.M).strip()
        if not source or "hide" in directives or cell["cell_type"] == "raw":
            continue
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            text = "".join(output.get("text") or output.get("data", {}).get("text/plain") or []).strip("\n")
            if text and output.get("name") != "stderr":
                parts.append(f"```text\n{text}\n```")
    return "\n\n".join(parts) + "\n"


def main() -> int:
    made = readme(json.loads((ROOT / "nbs/index.ipynb").read_text(encoding="utf-8")))
    target = ROOT / "README.md"
    if "--check" in sys.argv[1:]:
        if target.read_text(encoding="utf-8") != made:
            print("README.md is not what nbs/index.ipynb makes: run python scripts/readme.py")
            return 1
        return 0
    target.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
