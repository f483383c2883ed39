"""`shohin submit` on a real Slurm of one machine: scripts/slurm_one_machine.sh start, then pytest -m slurm tests/test_slurm.py.
SHOHIN_NEEDS_SLURM=1 makes a missing Slurm a failure."""
import getpass
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_notebook import midway, notebook, undisturbed, weights

from shohin.experiment import corpus_for, load_profile, repo_root

pytestmark = pytest.mark.slurm
ROOT = repo_root()
ENV = dict(os.environ, OMP_NUM_THREADS="1", COLUMNS="160", PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
PARTITION = "debug"


def shohin(*args, status=0):
    r = subprocess.run([sys.executable, "-m", "shohin.cli", *map(str, args)], capture_output=True, text=True, env=ENV, cwd=ROOT)
    assert r.returncode == status, r.stdout + r.stderr
    return r


def slurm(*cmd, check=True): return subprocess.run(cmd, capture_output=True, text=True, check=check, env=ENV).stdout


def until(what, timeout=120):
    "Wait for `what()` to be true; it is asked five times a second."
    deadline = time.time() + timeout
    while not (got := what()):
        assert time.time() < deadline, slurm("squeue", "-r") + (Path(os.environ["SLURM_CONF"]).parent / "log/slurmctld.log").read_text()[-2000:]
        time.sleep(.2)
    return got


def states(data): return {r["name"]: r["state"] for r in json.loads(shohin("status", data / "runs", "--json").stdout)}


def logged(data, arm): return max((f.stat().st_mtime for f in (data / "runs").glob("*/log.jsonl") if json.loads(f.with_name("config.json").read_text())["name"].split("/")[1] == arm), default=0)


def drained():
    "Is the queue empty? A requeued job would wait two minutes before it may start; not here."
    for job in (line.split()[0] for line in slurm("squeue", "-h", "-r", "-o", "%i %r").splitlines() if line.endswith("BeginTime")): slurm("scontrol", "update", f"JobId={job}", "StartTime=now", check=False)
    return not slurm("squeue", "-h").strip()


def restarts(job): return int(re.search(r"Restarts=(\d+)", slurm("scontrol", "show", "job", job))[1])


def at_once(job):
    "Start a requeued job."
    until(lambda: "JobState=PENDING" in slurm("scontrol", "show", "job", job))
    slurm("scontrol", "update", f"JobId={job}", "StartTime=now")


@pytest.fixture(autouse=True)
def cluster():
    up = shutil.which("sbatch") and subprocess.run(["sinfo", "-h"], capture_output=True, env=ENV).returncode == 0
    if not up:
        why = "no Slurm here: eval \"$(scripts/slurm_one_machine.sh start)\""
        if os.environ.get("SHOHIN_NEEDS_SLURM"): pytest.fail(why)
        pytest.skip(why)
    yield
    slurm("scancel", "-u", getpass.getuser(), check=False)
    until(drained, 30)


def commands():
    "The lines of the page's shell blocks, without comments."
    cells = json.loads((ROOT / "nbs/cluster.ipynb").read_text())["cells"]
    text = "\n".join("".join(c["source"]) for c in cells)
    return [line.split("  #")[0].strip() for block in re.findall(r"```sh\n(.*?)```", text, flags=re.S) for line in block.splitlines()]


# what a test can follow is the page with these words exchanged; torch is there already, and a hub cannot be reached
SMALLER = {"profile h100": "profile smoke", "PARTITION": PARTITION, "cliff fix": "one-update", "cliff.ipynb": "one-update.ipynb", "[1337]": "[1]", "--nproc-per-node 8": "--nproc-per-node 2"}
NOT_HERE = ("git clone", "python3 -m venv", "pip install", "shohin corpus data/mine")


def test_the_page_can_be_followed(tmp_path):
    """Every command of "Run it on your cluster", in a checkout of its own. An array that completes, with its report; submitted again
    nothing is doubled while it runs, and only the report is made when all is there."""
    clone = tmp_path / "clone"
    for f in subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "nbs", "shohin", "settings.ini", "pyproject.toml", "constraints.txt"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines():
        if (ROOT / f).is_file():
            (clone / f).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / f, clone / f)
    env, ran = dict(ENV, PYTHONPATH=str(clone)), []
    def sh(line, status=0):
        r = subprocess.run(["bash", "-c", line], cwd=clone, env=env, capture_output=True, text=True)
        assert r.returncode == status, f"{line}\n{r.stdout}{r.stderr}"
        return r.stdout
    for line in commands():
        if line.startswith(NOT_HERE): continue
        for a, b in SMALLER.items(): line = line.replace(a, b)
        if line.startswith("torchrun"):
            one = dict(json.loads(next((clone / "data/runs").glob("*/config.json")).read_text()), name="many", steps=8, keep=[], parent=None, device="cpu", micro_batch=3)
            (clone / "CONFIG.json").write_text(json.dumps(one))
        out = sh(line)
        ran.append(line.split()[0] + " " + line.split()[1])
        if line.startswith("shohin submit") and "--dry-run" not in line:
            if ran.count("shohin submit") == 1:
                again = json.loads(sh(line + " --json"))
                assert "2 arms: one-update/interleaved/1, one-update/block/1" in out and again["jobs"] == [] and len(again["waits_for"]) == 3
            else: assert out.splitlines()[0].endswith(": report"), out
        if line.startswith("shohin submit"): until(drained)
        if line == "bash sweep.sh": slurm("scancel", "-u", getpass.getuser())      # all is there already; what the script does is the last test
        if line == "shohin status --json": assert {r["state"] for r in json.loads(out)} == {"finished"}, out
    assert {"shohin doctor", "shohin submit", "shohin status", "shohin reproduce", "bash sweep.sh", "torchrun --standalone", "papermill nbs/experiments/one-update.ipynb"} <= set(ran)
    for name in ("one-update", "index", "cluster"): assert (clone / f"reports/local/{name}.html").exists()
    assert any(json.loads(f.read_text())["name"] == "many" for f in (clone / "data/runs").glob("*/result.json"))


def test_preempted_out_of_time_and_failing(tmp_path):
    """Tasks are preempted in the middle, one then gets the signal of the time limit, one fails at once. The former end with the weights
    of runs that nobody disturbed, the latter takes only the arm with it that forks from it, and says why."""
    data = tmp_path / "data"
    good = [("base", None, None, "none", 800), ("late", None, None, "seed", 800), ("child", "base", 800, "none", 816)]
    nb = notebook(tmp_path, "tiny", [*good, ("broken", None, None, "seeed", 8), ("orphan", "broken", 8, "none", 16)])
    args = ["submit", nb, "--profile", "smoke", "--partition", PARTITION, "--data", data, "--reports", tmp_path / "reports", "--json"]
    jobs = {j["arm"] if j["kind"] == "arm" else j["kind"]: j["id"] for j in json.loads(shohin(*args).stdout)["jobs"]}
    assert set(jobs) == {"corpora", "base", "late", "child", "broken", "orphan", "report"}
    until(lambda: midway(data, "base") or midway(data, "late"))
    slurm("sbatch", "-p", "urgent", "-n", str(os.cpu_count()), "-o", "/dev/null", "--wrap", "true")      # all of the machine: what runs is preempted
    hit = until(lambda: [a for a in ("base", "late") if restarts(jobs[a])])
    for arm in hit: at_once(jobs[arm])
    since = time.time()
    arm = until(lambda: next((a for a in hit if midway(data, a) and logged(data, a) > since), None))
    slurm("scancel", "--signal=USR2", jobs[arm])                # what Slurm sends before the time limit
    at_once(jobs[arm])
    assert restarts(jobs[arm]) == 2
    quiet = undisturbed(tmp_path, data, good)
    until(drained)
    now = states(data)
    assert [now[f"tiny/{a}/1"] for a in ("base", "late", "child")] == ["finished"] * 3
    assert "unknown guard 'seeed'" in now["tiny/broken/1"] and now["tiny/broken/1"].startswith("failed: "), now
    assert now["tiny/orphan/1"] == "failed: orphan forks from broken/1, which is not finished"
    assert "arms missing: broken/1, orphan/1" in now["report tiny"] and not (tmp_path / "reports").exists() and not (data / "results/tiny.json").exists()
    assert weights(data) == quiet
    table = shohin("status", data / "runs").stdout
    assert "4 finished, 3 failed" in table, table
    assert [j["arm"] for j in json.loads(shohin(*args).stdout)["jobs"] if j["kind"] == "arm"] == ["broken", "orphan"]


def test_the_printed_script(tmp_path):
    "The script of --dry-run, submitted by hand: two levels, a report; the signal before the time limit requeues."
    data = tmp_path / "data"
    arms = [("base", None, None, "none", 800), ("child", "base", 800, "none", 816)]
    nb = notebook(tmp_path, "tiny", arms)
    text = shohin("submit", nb, "--profile", "smoke", "--partition", PARTITION, "--data", data, "--reports", tmp_path / "reports", "--sbatch", "comment=by hand", "--dry-run").stdout
    sh = tmp_path / "sweep.sh"
    sh.write_text(text)
    assert not data.exists() and drained()                       # a dry run leaves nothing
    assert subprocess.run(["bash", "-n", sh]).returncode == 0 and "#SBATCH --comment='by hand'" in text
    corpora, level0, level1, report = subprocess.run(["bash", sh.name], cwd=tmp_path, env=ENV, capture_output=True, text=True, check=True).stdout.removeprefix("submitted: ").split()
    until(lambda: midway(data, "base"))
    assert states(data)["tiny/base/1"] == "running"
    slurm("scancel", "--batch", "--signal=USR1", f"{level0}_0")
    at_once(f"{level0}_0")
    quiet = undisturbed(tmp_path, data, arms)
    until(drained)
    assert weights(data) == quiet
    assert (tmp_path / "reports/tiny.html").exists() and (tmp_path / "reports/index.html").exists()
    for job in (corpora, f"{level0}_0", f"{level1}_1", report): assert "ExitCode=0:0" in slurm("scontrol", "show", "job", job), job


def test_a_run_on_its_way_for_another_notebook_is_waited_for(tmp_path):
    "Two submissions that share three runs: the second waits for the block of the first, also when the corpus was made in between."
    args = ["--profile", "smoke", "--partition", PARTITION, "--data", tmp_path, "--json"]
    slurm("scontrol", "update", f"PartitionName={PARTITION}", "State=DOWN")                 # nothing starts
    try:
        a = json.loads(shohin("submit", "one-update", *args).stdout)
        corpus_for(load_profile("smoke"), 1, "bytes", tmp_path)
        b = json.loads(shohin("submit", "muon-lr", *args).stdout)
        block = next(j["id"] for j in a["jobs"] if j.get("arm") == "block")
        assert sorted(b["waits_for"]) == sorted(j["id"] for j in a["jobs"] if j["kind"] == "arm")
        assert [j["arm"] for j in b["jobs"] if j["kind"] == "arm"] == ["muon-0.01", "muon-0.005", "muon-0.003", "muon-0.005-guard", "muon-0.003-guard"]
        waits = dict(line.split(" ") for line in slurm("squeue", "-h", "-o", "%F %E").splitlines())
        level1, level2 = dict.fromkeys(j["id"].partition("_")[0] for j in b["jobs"] if j["kind"] == "arm")
        assert waits[level1].startswith(f"afterany:{block}(") and set(re.findall(r":(\w+)", waits[level2])) == {f"{level1}_1", f"{level1}_2"}
        now = states(tmp_path)
        assert set(now.values()) == {"queued", "queued: PartitionDown"} or set(now.values()) == {"queued"}, now
        slurm("scancel", block)
        assert "never started" in states(tmp_path)["one-update/block/1"]
    finally: slurm("scontrol", "update", f"PartitionName={PARTITION}", "State=UP", check=False)


def test_what_slurm_refuses_is_one_line_and_nothing_stays(tmp_path):
    "The corpora could be made, the arms want cards that no node has: all or nothing."
    r = shohin("submit", "one-update", "--profile", "smoke", "--partition", PARTITION, "--data", tmp_path, "--gpus-per-node", 64, status=2)
    assert r.stderr.startswith("shohin: Slurm takes no such job (arm): ") and r.stderr.count("\n") == 1, r.stderr
    assert not list((tmp_path / "submitted").glob("2*"))
    until(drained, 30)
    r = shohin("submit", "one-update", "--profile", "smoke", "--partition", "nowhere", "--data", tmp_path, status=2)
    assert r.stderr == f"shohin: unknown partition 'nowhere'; there are {PARTITION}, urgent\n"
