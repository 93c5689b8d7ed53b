"""Instructions made of Python's standard library, for fine-tuning: `python examples/instructions.py OUT_DIR`.

Writes three files of one kind each, as HPC-Coder-V2 mixed three sets: functions.jsonl (a description -> the function),
methods.jsonl (the same of methods) and descriptions.jsonl (a function -> its description).
"""

import ast
import json
import sys
import sysconfig
import textwrap
from pathlib import Path

LONGEST, DESCRIPTION = 600, 240
"""Characters of a function and of a description."""


def described(path: Path) -> list[tuple[bool, str, str, str]]:
    """Functions of a file that have a description: whether of a class, name, description, source without it."""
    try:
        source = path.read_text()
        tree = ast.parse(source)
    except (UnicodeDecodeError, SyntaxError):
        return []
    found = []
    for parent in ast.walk(tree):
        for node in ast.iter_child_nodes(parent):
            if not isinstance(node, ast.FunctionDef) or len(node.body) < 2:
                continue
            text = (ast.get_docstring(node) or "").split("\n\n")[0].replace("\n", " ")
            first, *_ = node.body
            if not 0 < len(text) <= DESCRIPTION or not isinstance(first, ast.Expr):
                continue
            lines = source.splitlines()[node.lineno - 1 : node.end_lineno]
            head, tail = first.lineno - node.lineno, (first.end_lineno or first.lineno) - node.lineno + 1
            code = textwrap.dedent("\n".join(lines[:head] + lines[tail:]))
            if len(code) <= LONGEST:
                found.append((isinstance(parent, ast.ClassDef), node.name, text, code))
    return found


def main(out: Path) -> None:
    rows: dict[str, list[dict[str, str]]] = {"functions": [], "methods": [], "descriptions": []}
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("**/*.py")):
        if "site-packages" in path.parts or "test" in path.parts:
            continue
        for method, name, text, code in described(path):
            kind = "methods" if method else "functions"
            rows[kind].append({"instruction": f"Write the Python function `{name}`. {text}", "output": code})
            question = {"instruction": "Describe the Python function in one sentence.", "input": code}
            rows["descriptions"].append({**question, "output": text})
    out.mkdir(parents=True, exist_ok=True)
    for name, entries in rows.items():
        (out / f"{name}.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
        print(f"{out / name}.jsonl: {len(entries)} rows")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/instructions"))
