"""A small experiment with made-up numbers and hostile text, executed by papermill, for the tests of the reports."""
import json
from pathlib import Path

import nbformat
import papermill
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

HOSTILE = "</pre><script>window.pwned = 1</script><img src=x onerror='window.pwned = 2'> \x1b[31m\r& \"quotes\""


def result(name: str = "sample", seeds=(1, 2, 3)) -> dict:
    "A results file as the experiments write them."
    claim = {"source": "shohin", "criterion_commit": "0123456789abcdef", "superseded_by": None}
    return {
        "experiment": name, "profile": "cpu", "seeds": list(seeds), "commit": "d7e420a9f0d1c2b3", "dirty": False, "config_hash": "ab" * 32,
        "manifest_hash": "cd" * 32, "versions": {"torch": "2.13.0"}, "machine": {"cores": 2}, "wall_s": 812.4,
        "answers": ["The loss jumps 2.05-fold at the boundary.", f"It read {HOSTILE}", "Nothing was damaged."],
        "arms": {"guard 2.0x": {"jump_step": 400, "cliff_step": 400, "final_loss": 3.01, "probes": {"math": 2.95}},
                 "no_guard": {"jump_step": 400, "cliff_step": None, "final_loss": 1.93, "probes": {"math": 1.99}}},
        "claims": [
            claim | {"id": "pinned", "quote": "pinned at a finite ~3.0 forever after", "prediction": "the loss stays up", "criterion": "ratio in [0.8, inf]",
                     "verdict": "reproduced", "criterion_edits": 1, "unit": "times",
                     "evidence": {"quantity": "jump_ratio", "values": [0.93, 0.95, 0.91], "mean": 2.0519}, "interval": [0.88, 0.98]},
            claim | {"id": "wrecked", "quote": HOSTILE, "prediction": HOSTILE, "criterion": HOSTILE, "verdict": "contradicted",
                     "evidence": {"difference": -0.0132, "<b> & 'key'": HOSTILE}, "interval": [-0.05, 0.02], "superseded_by": "pinned"},
            claim | {"id": "release", "source": "ours", "quote": "", "prediction": "it lets go", "criterion": "16", "verdict": "inconclusive",
                     "evidence": {"step": [16, 16, 23]}, "interval": None},
            claim | {"id": "leads", "source": "marin", "quote": "update spikes always preceded", "prediction": "1", "criterion": "Wilson", "verdict": "not_reproduced",
                     "evidence": {"p": 0.81, "n": 32}, "interval": {"low": 0.65, "high": 0.91}},
            claim | {"id": "shards", "quote": "clean", "prediction": "", "criterion": "", "verdict": "not_testable", "evidence": {}, "interval": None}]}


def benchmark(name: str = "sample") -> dict:
    "A benchmark's file: numbers, words, values that are missing, many columns, hostile text everywhere."
    many = {f"column_{i}": f"heading {i} that is not short" for i in range(12)}
    return {
        "benchmark": name, "title": "How fast is the sample?", "summary": f"Made-up seconds {HOSTILE}", "machine": {"cores": 2, "processor": HOSTILE},
        "commit": "d7e420a9f0d1c2b3", "dirty": True, "command": "pytest " + "-x" * 60, "versions": {"python": "3.11.7"}, "wall_s": 12.5,
        "answers": ["Ours is 2.4 times as fast.", HOSTILE], "notes": ["The machine was idle.", HOSTILE], "raw": {"not shown": 0.123456},
        "tables": [
            {"title": "Seconds", "text": ["The first paragraph.", HOSTILE], "caption": f"Seconds by loader {HOSTILE}", "columns": {"loader": "loader", "s": "seconds", "exact": "exact", "note": "note"},
             "rows": [{"loader": "ours", "s": 0.03912, "exact": True, "note": "", "hidden": 1}, {"loader": HOSTILE, "s": 12345.6, "exact": False, "note": HOSTILE}, {"loader": "peer", "note": "skipped: does not install"}]},
            {"title": "Seconds", "text": "A table as wide as can be.", "caption": "Wide", "columns": many, "rows": [{k: n * 1000.5 + i for i, k in enumerate(many)} for n in range(3)]},
            {"caption": "No heading of its own", "columns": ["a.b", "a"], "rows": [{"a.b": "x", "a": [1, 2.5], "id": "named"}]}]}


CELLS = [
    ("md", "# The sample\n\n> Does the order make the loss jump?\n\nIt was **read** by step."),
    ("parameters", "seed: int = 1  # a secret parameter"),
    ("code", "#| hide\nimport json, sys\nimport matplotlib.pyplot as plt\nfrom IPython.display import HTML, Markdown, display\n"
             "from shohin.report import *\nresult = json.load(open('results/sample.json'))\nHOSTILE = result['claims'][1]['quote']"),
    ("md", "## Loss by step\n\n| arm | steps |\n| --- | --- |\n| guard | 400 |"),
    ("code", "# Draw the loss\nlog = [dict(step=s, loss=1.4 if s < 40 else 3.0, domains={'code_python': 12} if s < 40 else {'math': 12},\n"
             "            decision='skip:loss' if s > 40 else 'apply', probes={'math': {'nats_per_token': 3 - s / 99}}) for s in range(80)]\n"
             "style()\nfig, axes = plt.subplots(2, 1, figsize=(5.8, 5))\nplot_loss(axes[0], log); plot_probes(axes[1], log); axes[0].legend()\n"
             "show_figure(fig, alt='Loss jumps to 3.0 at step 40.', caption=f'Read: {HOSTILE}', table=[{'arm': HOSTILE, 'loss': 3.0}])"),
    ("code", "print(HOSTILE); print('progress', file=sys.stderr)\nfor i in range(30): print(i)"),
    ("code", "display(HTML('<b id=foreign>not ours</b>' + HOSTILE)); display(Markdown('**bold** ' + HOSTILE)); HOSTILE"),
    ("code", "show_arms(result, {'jump_step': 'jump', 'final_loss': 'final loss', 'probes.math': 'math probe', 'no.such': 'none'}, 'Arms ' + HOSTILE)"),
    ("md", "## What was found"),
    ("code", "#| hide\nprint('hidden print')\nshow_claims(result, ['pinned', 'wrecked'])"),
    ("md", "## Loss by step\n\nThe same heading again, and a long line of code:\n\n```python\n" + "x = 1 + " * 60 + "1\n```"),
]


def notebook() -> nbformat.NotebookNode:
    "The sample before it is run."
    make = {"md": new_markdown_cell, "code": new_code_cell, "parameters": lambda s: new_code_cell(s, metadata={"tags": ["parameters"]})}
    return new_notebook(cells=[make[kind](source) for kind, source in CELLS],
                        metadata={"kernelspec": {"name": "python3", "display_name": "python3", "language": "python"}})


def broken_log(folder: Path) -> Path:
    "A log with a cliff, a spike and hostile names."
    path = folder / "<b>run & 'log'.jsonl"
    path.write_text("".join(json.dumps({"step": s, "loss": (2.0 if s < 300 else 3.1) + (s == 150) + s * 7 % 13 / 400, "grad_norm": 0.3 + s * 5 % 7 / 50, f"eval_{HOSTILE}loss": 2.2 if s % 50 == 0 else None}) + "\n" for s in range(400)))
    return path


def run(folder: Path) -> Path:
    "Write the results and, where the site will be, a benchmark; execute the notebook, and return its path."
    for path, what in (("results", result()), ("site/benchmarks", benchmark())):
        (folder / path).mkdir(parents=True)
        (folder / path / "sample.json").write_text(json.dumps(what))
    nbformat.write(notebook(), folder / "source.ipynb")
    papermill.execute_notebook(folder / "source.ipynb", folder / "sample.ipynb", parameters={"seed": 7}, cwd=folder, progress_bar=False, start_timeout=300)
    return folder / "sample.ipynb"
