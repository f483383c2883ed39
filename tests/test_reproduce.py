"`shohin reproduce` end to end in the smoke profile: interrupted, it goes on; run again, it trains nothing."
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shohin.experiment import repo_root
from shohin.report import check_pages

ENV = dict(os.environ, OMP_NUM_THREADS="1", COLUMNS="100")


def start(folder, *more):
    cmd = [sys.executable, "-m", "shohin.cli", "reproduce", "cliff", "--profile", "smoke", "--data", str(folder / "data"), "--reports", str(folder / "reports"), *more]
    return subprocess.Popen(cmd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENV, start_new_session=True)


def rows(folder): return sum(p.read_bytes().count(b"\n") for p in (folder / "data/runs").glob("*/log.jsonl"))


def until(p, folder, n, timeout=180):
    "Wait until `n` steps are logged."
    deadline = time.time() + timeout
    while rows(folder) < n:
        assert p.poll() is None and time.time() < deadline, p.stderr.read()
        time.sleep(.02)


def stable(folder):
    doc = json.loads((folder / "data/results/cliff.json").read_text())
    return {k: v for k, v in doc.items() if k not in ("wall_s", "train_s", "machine", "commit", "dirty")}


@pytest.mark.slow
def test_interrupted_twice_then_a_cache(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    a.mkdir()
    b.mkdir()
    p = start(a)
    until(p, a, 20)
    os.killpg(p.pid, signal.SIGINT)                  # what Ctrl-C does
    out, err = p.communicate(timeout=60)
    assert p.returncode == 130 and "interrupted" in err, err
    p = start(a)
    until(p, a, rows(a) + 60)
    os.killpg(p.pid, signal.SIGKILL)
    p.wait()
    time.sleep(1)
    p = start(a)
    out, err = p.communicate(timeout=300)
    assert p.returncode == 0, err
    assert "[one seed]" in out and "index.html" in out
    q = start(b)
    out, err = q.communicate(timeout=300)
    assert q.returncode == 0, err
    assert stable(a) == stable(b)                    # the interrupted one ends where the quiet one does
    assert check_pages(a / "reports") == []
    before = {f: f.stat().st_mtime_ns for f in (a / "data/runs").glob("*/log.jsonl")}
    p = start(a, "--json")
    out, err = p.communicate(timeout=300)
    assert p.returncode == 0 and json.loads(out)["results"]["cliff"]["experiment"] == "cliff"
    assert before == {f: f.stat().st_mtime_ns for f in (a / "data/runs").glob("*/log.jsonl")}


@pytest.mark.slow
def test_a_misspelt_parameter_ends_the_notebook(tmp_path):
    "Papermill only warns; the notebook stops with the name and what there is, and writes no results."
    nb = repo_root() / "nbs/experiments/cliff.ipynb"
    out = tmp_path / "out.ipynb"
    r = subprocess.run([sys.executable, "-m", "papermill", str(nb), str(out), "--no-progress-bar", "--cwd", str(nb.parent),
                        "-y", json.dumps(dict(profile="smoke", sedes=[1], data=str(tmp_path / "data"), results=str(tmp_path)))], capture_output=True, text=True, env=ENV)
    assert r.returncode != 0
    from shohin.reproduce import error_of
    assert error_of(out).startswith("unknown parameter 'sedes'"), error_of(out)
    assert not (tmp_path / "cliff.json").exists() and not list(Path(tmp_path).glob("data/runs/*"))
