"A sweep cut into jobs, without a cluster: the plan, the words of a mistake, one arm by papermill, and what may become a page."
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest
from tiny_notebook import midway, notebook, undisturbed, weights

from shohin.experiment import repo_root
from shohin.report import build_site
from shohin.reproduce import EXPERIMENTS, error_of
from shohin.shards import UserError
from shohin.submit import plan_tasks

ROOT = repo_root()
ENV = dict(os.environ, OMP_NUM_THREADS="1", COLUMNS="200", PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["smoke", "cpu", "h100"])
def test_every_experiment_can_be_submitted_with_every_other(profile, tmp_path):
    "Runs that notebooks share are one task, trained through a notebook that keeps all the checkpoints that any of them needs."
    tasks, corpora = plan_tasks(EXPERIMENTS, profile, [1, 2], tmp_path)
    names = [n for t in tasks.values() for n in t.names]
    shared = [t for t in tasks.values() if not t.names[0].startswith(("instability/", "fine-or-bad/", "qk-insertion/"))]         # whose runs are like no others
    assert len(names) == len(set(names)) and 2 * len(shared) < 1.1 * sum(len(t.names) for t in shared) and corpora
    for t in tasks.values():
        assert t.level == (tasks[t.parent].level + 1 if t.parent else 0) and t.names[0].split("/")[2] == str(t.seed)
        if t.parent: assert t.start in tasks[t.parent].keep
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("args, words", [
    (["clif"], "unknown experiment 'clif'"), (["no.ipynb"], "give the path of a notebook"), (["cliff", "--profile", "huge"], "unknown profile 'huge'"),
    (["cliff", "--profile", "smoke", "--time", "soon"], "--time soon"), (["cliff", "--profile", "smoke", "--sbatch", "array=0-3"], "--sbatch array"),
    (["cliff", "--gpus-per-node", "3"], "--gpus-per-node 3 does not fit")])
def test_a_mistake_is_one_line(args, words, tmp_path):
    r = subprocess.run([sys.executable, "-m", "shohin.cli", "submit", *args, "--partition", "x", "--data", str(tmp_path / "data"), "--dry-run"], capture_output=True, text=True, env=ENV, cwd=ROOT)
    assert r.returncode == 2 and words in r.stderr and r.stderr.count("\n") == 1 and not r.stdout, r.stderr
    assert not list(tmp_path.iterdir())


def test_without_slurm_one_line_names_the_dry_run(tmp_path):
    env = dict(ENV, PATH=str(Path(sys.executable).parent))
    r = subprocess.run([sys.executable, "-m", "shohin.cli", "submit", "cliff", "--profile", "smoke", "--partition", "x", "--data", str(tmp_path / "data")], capture_output=True, text=True, env=env, cwd=ROOT)
    assert r.returncode == 2 and r.stderr.startswith("shohin: no sbatch here") and "--dry-run" in r.stderr and r.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_the_script_of_the_large_profile(tmp_path):
    "Cards for the arms and not for the report, both seeds of the profile, arms that fork after those they fork from."
    r = subprocess.run([sys.executable, "-m", "shohin.cli", "submit", "no-muon", "--partition", "big", "--data", str(tmp_path), "--mem", "900G", "--max-parallel", "4", "--dry-run", "--json"],
                       capture_output=True, text=True, env=ENV, cwd=ROOT)
    text = json.loads(r.stdout)["script"]
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
    for line in ("#SBATCH --partition=big", "#SBATCH --mem=900G", "#SBATCH --requeue", "level0=$(put arm --array=0-5%4 --gpus-per-node=8 --dependency=afterany:$corpora)", "report=$(put report --dependency="):
        assert line in text, line
    table = [x.split("\t") for x in text.split("table='")[1].split("'")[0].splitlines()]
    assert len(table) == 14 and {x[2] for x in table} == {"1337", "777"} and [x[1] for x in table[-2:]] == ["adamw-fork-guard"] * 2


# one arm by hand

def papermill(nb, out, data, *more):
    return [sys.executable, "-m", "papermill", str(nb), str(out), "--no-progress-bar", "-p", "profile", "smoke", "-p", "data", str(data), "-p", "results", str(data / "results"), *more]


def until(p, what, timeout=120):
    deadline = time.time() + timeout
    while not what():
        assert p.poll() is None and time.time() < deadline, p.stdout and p.stdout.read()
        time.sleep(.02)


def trainers(data):
    "Processes that train in this data folder."
    out = []
    for f in Path("/proc").glob("[0-9]*/cmdline"):
        try: words = f.read_bytes().split(b"\0")
        except OSError: continue
        if b"shohin.train" in words and str(data / "runs").encode() in words: out.append(f.parent.name)
    return out


# papermill in this process, with the usual way to turn SIGTERM into a clean end
POLITE = """import signal, sys, papermill
def stop(*_): raise KeyboardInterrupt
signal.signal(signal.SIGTERM, stop)
papermill.execute_notebook(sys.argv[1], sys.argv[2], dict(profile='smoke', data=sys.argv[3], results=sys.argv[3] + '/results'), progress_bar=False)"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="looks for processes in /proc")
def test_one_arm_by_papermill_killed_and_resumed(tmp_path):
    """SIGTERM leaves a run that goes on to the same weights; one arm ends with `arms missing`, and nothing but the whole notebook
    becomes a page, whatever papermill's metadata says."""
    data, out = tmp_path / "data", tmp_path / "tiny.out" / "tiny.ipynb"
    out.parent.mkdir()
    arms = [("base", None, None, "none", 300), ("child", "base", 300, "none", 316), ("late", None, None, "seed", 300)]
    nb = notebook(tmp_path, "tiny", arms)
    p = subprocess.Popen(papermill(nb, out, data, "-p", "arm", "child"), env=ENV, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until(p, lambda: midway(data, "base"))
    p.send_signal(signal.SIGTERM)
    assert p.wait(30) == -signal.SIGTERM
    deadline = time.time() + 20
    while trainers(data) and time.time() < deadline: time.sleep(.1)
    assert trainers(data) == [] and not weights(data)            # nobody trains on, nothing is finished
    r = subprocess.run(papermill(nb, out, data, "-p", "arm", "child"), env=ENV, cwd=ROOT, capture_output=True, text=True)
    assert r.returncode == 1 and error_of(out) == "arms missing: late/1", r.stderr
    assert set(weights(data)) == {"base", "child"} and not (data / "results").exists()
    r = subprocess.run([sys.executable, "-m", "shohin.cli", "reproduce", str(nb), "--profile", "smoke", "--data", str(data), "--reports", str(tmp_path / "reports"), "--no-train"], env=ENV, cwd=ROOT, capture_output=True, text=True)
    assert r.returncode == 2 and "arms missing: late/1" in r.stderr and not list((data / "results").iterdir()) and set(weights(data)) == {"base", "child"}
    p = subprocess.Popen([sys.executable, "-c", POLITE, str(nb), str(tmp_path / "tiny.out/polite.ipynb"), str(data)], env=ENV, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until(p, lambda: midway(data, "late"))
    p.send_signal(signal.SIGTERM)
    p.wait(60)
    r = subprocess.run(papermill(nb, out, data), env=ENV, cwd=ROOT, capture_output=True, text=True)
    assert r.returncode == 0 and (data / "results/tiny.json").exists(), r.stderr
    assert weights(data) == undisturbed(tmp_path, data, arms)
    before, one = (data / "results/tiny.json").read_text(), tmp_path / "tiny.ipynb"
    r = subprocess.run(papermill(nb, tmp_path / "tiny.out/one.ipynb", data, "-p", "arm", "late"), env=ENV, cwd=ROOT, capture_output=True, text=True)
    assert r.returncode == 0, r.stderr                           # the cache has all now: one arm goes on to the claims
    one.write_text((tmp_path / "tiny.out/one.ipynb").read_text())
    with pytest.raises(UserError, match="is of another run"): build_site([out], data / "results", tmp_path / "reports")
    (data / "results/tiny.json").write_text(before)
    with pytest.raises(UserError, match="is of another run"): build_site([one], data / "results", tmp_path / "reports")
    polite = nbformat.read(out.with_name("polite.ipynb"), as_version=4)
    assert {c.metadata.papermill.status for c in polite.cells if c.cell_type == "code"} == {"completed"}, "papermill tells the truth now: see _refuse_unfinished"
    nbformat.write(polite, one)
    with pytest.raises(UserError, match="tiny: "): build_site([one], data / "results", tmp_path / "reports")
    assert not (tmp_path / "reports").exists()
    assert build_site([out], data / "results", tmp_path / "reports").exists()
