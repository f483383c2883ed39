"A small experiment with arms of a test's choosing, long enough to be interrupted."
import json

import nbformat

from shohin.experiment import Arm, Sweep, base_config, load_profile

PARAMETERS = '''profile: str = "smoke"  # a table of profiles.toml
seeds: list = [1]  # of the weights
arm: str = ""  # just this one
data: str = ""  # corpora and runs
records: str = ""  # of finished runs
results: str = ""  # where the results go'''
BODY = '''from shohin.experiment import parameters
p = parameters(globals(), profile=str, seeds=list, arm=str, data=str, records=str, results=str)
import time
t0 = time.time()
from shohin import report
from shohin.experiment import Arm, Sweep, base_config, load_profile, write_results
prof = dict(load_profile(p["profile"]), launcher="child")
arms = [Arm(name, parent, at, order=dict(kind="interleaved"), guard=guard, steps=steps) for name, parent, at, guard, steps in ARMS]
sweep = Sweep(NAME, prof, arms, p["seeds"], dict(base_config(prof), checkpoint_every=20), data=p["data"], only=p["arm"])'''
SHOW = '''result = write_results(NAME, sweep, {a.name: [dict(loss=float(runs[a.name, s].loss[-1])) for s in p["seeds"]] for a in arms}, {}, ["It came to its end."], p["results"], t0)
report.show_claims(result)'''


def notebook(folder, name, arms):
    nb = nbformat.v4.new_notebook(cells=[
        nbformat.v4.new_markdown_cell(f"# {name}\n\n> A test."), nbformat.v4.new_code_cell(PARAMETERS, metadata=dict(tags=["parameters"])),
        nbformat.v4.new_code_cell(BODY.replace("ARMS", repr(arms)).replace("NAME", repr(name)), metadata=dict(tags=["hide"])),
        nbformat.v4.new_code_cell("runs = sweep.run()"), nbformat.v4.new_code_cell(SHOW.replace("NAME", repr(name)))],
        metadata=dict(kernelspec=dict(display_name="python3", language="python", name="python3")))
    nbformat.write(nb, folder / f"{name}.ipynb")
    return folder / f"{name}.ipynb"


def undisturbed(tmp_path, data, arms):
    "{arm: weights} of the same arms trained here, one after the other."
    prof = load_profile("smoke")
    made = [Arm(name, parent, at, order=dict(kind="interleaved"), guard=guard, steps=steps) for name, parent, at, guard, steps in arms]
    done = Sweep("tiny", prof, made, [1], dict(base_config(prof), checkpoint_every=20), data=data, runs=tmp_path / "undisturbed").run()
    return {n: r.result["weights"] for (n, _), r in done.items()}


def weights(data): return {json.loads(f.read_text())["name"].split("/")[1]: json.loads(f.read_text())["weights"] for f in (data / "runs").glob("*/result.json")}


def midway(data, arm):
    "Is the run of an arm under way, with a checkpoint to go on from?"
    f = next((f for f in (data / "runs").glob("*/config.json") if json.loads(f.read_text())["name"].split("/")[1] == arm), None)
    return f and list(f.parent.glob("checkpoints/step_*")) and not f.with_name("result.json").exists()
