"The trainer: the same bits after any kill, a key that sees what matters, and errors in one line."
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from shohin import train as T
from shohin.corpus import build_corpus, stdlib_sources
from shohin.shards import UserError
from shohin.train import RunConfig, Trainer, checkpoints, history, load_config, read_log, run_key

MODEL = dict(n_layer=2, d_model=32, n_head=2, n_kv_head=1, head_dim=16, d_ff=64)
ENV = dict(os.environ, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    out = tmp_path_factory.mktemp("data") / "corpus"
    build_corpus(out, sources=stdlib_sources(60_000), shard_tokens=33 * 6 * 10, probe_bytes=2048)
    return out


@pytest.fixture
def cfg(corpus):
    return RunConfig("t", str(corpus), MODEL, dict(kind="interleaved"), steps=60, batch_size=6, seq_len=32, warmup=4, horizon=1000,
                     probe_every=20, probe_windows=((30, 33),), probe_rows=2, attn_every=25, guard="default", checkpoint_every=7, keep=(30,))


def strip(result): return {k: v for k, v in result.items() if k != "s_per_step"}


# Imports once, then forks a process for each line on stdin, to be killed. Each write of a checkpoint stops in the middle for
# a moment, so that a kill often meets one half-written.
NURSERY = """
import os, sys, time, shohin.train as T
real = T.save_file
def slow(tensors, path):
    real(tensors, path)
    time.sleep(.03)
T.save_file = slow
for line in sys.stdin:
    pid = os.fork()
    if not pid:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os._exit(T.main(sys.argv[1:]))
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


def test_twenty_kills_change_nothing(cfg, tmp_path):
    "SIGKILL at least 20 times, in saves and before the first checkpoint: the log and the weights are those of a quiet run."
    quiet = Trainer(cfg, tmp_path / "quiet").run()
    key = quiet["key"]
    runs, config = tmp_path / "runs", tmp_path / "config.json"
    config.write_text(json.dumps(asdict(cfg)))
    folder, rng = runs / key, random.Random(0)
    log, saves = folder / "log.jsonl", folder / "checkpoints"
    nursery = subprocess.Popen([sys.executable, "-c", NURSERY, str(config), str(runs)], env=ENV, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    kills = in_save = before_first = 0
    deadline = time.time() + 300
    while kills < 20:
        assert time.time() < deadline, f"only {kills} kills"
        size = log.stat().st_size if log.exists() else 0
        nursery.stdin.write("\n")
        nursery.stdin.flush()
        pid = int(nursery.stdout.readline())
        alive = lambda pid=pid: Path(f"/proc/{pid}/stat").exists() and Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
        grown = lambda size=size: log.exists() and log.stat().st_size != size
        while alive() and not grown(): time.sleep(.001)
        until = time.time() + rng.random() * (.02 if kills < 3 else .3)
        while alive() and (time.time() < until or kills % 2 and kills >= 3):      # every second one waits for a save
            if kills % 2 and kills >= 3 and list(saves.glob(".tmp_*")): break
            time.sleep(.001)
        if alive(): os.kill(pid, signal.SIGKILL)
        status = int(nursery.stdout.readline())
        if status == 0:                                        # it got to the end: begin again, kills still to come
            shutil.rmtree(folder)
            continue
        assert status == -signal.SIGKILL, status
        kills += 1
        in_save += bool(list(saves.glob(".tmp_*")))
        before_first += not checkpoints(folder)
    nursery.stdin.close()
    nursery.wait()
    assert in_save >= 3 and before_first >= 2, (in_save, before_first)
    done = Trainer(cfg, runs).run()
    assert strip(done) == strip(quiet)
    assert read_log(log) == read_log(tmp_path / "quiet" / key / "log.jsonl")


def test_probes_and_captures_change_no_step(cfg, tmp_path):
    a = Trainer(cfg, tmp_path).run()
    b = Trainer(replace(cfg, probe_every=0, probe_windows=(), attn_every=0), tmp_path).run()
    assert a["key"] != b["key"] and a["weights"] == b["weights"]


def test_fork_is_the_same_run(cfg, tmp_path):
    "A child that changes nothing ends where the parent ends; its history is the parent's."
    a = Trainer(cfg, tmp_path).run()
    child = replace(cfg, parent=dict(run=a["key"], step=30, hash=a["kept"]["30"]))
    b = Trainer(child, tmp_path).run()
    assert b["weights"] == a["weights"] and b["start"] == 30
    assert history(tmp_path, b["key"]) == read_log(tmp_path / a["key"] / "log.jsonl")
    assert Trainer(replace(child, guard="seed"), tmp_path).run()["warm_disagreements"] == 0
    with pytest.raises(UserError, match="no checkpoint at step 31"):
        Trainer(replace(child, parent=dict(child.parent, step=31)), tmp_path).run()


def test_fresh_optimizer_and_no_muon_forks(cfg, tmp_path):
    a = Trainer(cfg, tmp_path).run()
    parent = dict(run=a["key"], step=30, hash=a["kept"]["30"])
    ends = {a["weights"]}
    for kw in (dict(fresh_opt=True), dict(optim=dict(no_muon=True))):
        r = Trainer(replace(cfg, parent=parent, **kw), tmp_path).run()
        first = read_log(tmp_path / r["key"] / "log.jsonl")[0]
        assert first["step"] == 30 and (first["lr"] < .006 if "fresh_opt" in kw else first["lr"] == 3e-3)
        ends.add(r["weights"])
    assert len(ends) == 3


def test_breaker_ends_cleanly_and_saves_nothing_after(cfg, tmp_path):
    "A guard that refuses everything: the run ends at the limit, the last checkpoint is from before."
    guard = ["nonfinite", dict(guard="loss-ratio", ratio=0.1), dict(guard="breaker", limit=12)]
    said = []
    t = Trainer(replace(cfg, guard=guard, keep=()), tmp_path, said.append)
    r = t.run()
    rows = read_log(t.folder / "log.jsonl")
    assert r["stopped"] and "12 updates skipped" in r["stopped"] and r["skips"] == 12
    assert rows[-1]["decision"] == "skip:loss" and rows[-1]["update_norm"] == 0
    assert sum(line.startswith("[skip:loss] step ") for line in said) == 12


def test_nan_never_gets_in(cfg, tmp_path):
    "A non-finite gradient leaves weights, momentum and guards as they were."
    t = Trainer(cfg, tmp_path)
    t.step()
    before = T.tensors_hash(*t.tensors())
    real = t.model.loss
    t.model.loss = lambda rows: real(rows)._replace(total=real(rows).total * float("nan"))
    row = t.step()
    assert row["decision"] == "skip:nonfinite" and row["grad_norm"] == "nan"
    assert T.tensors_hash(*t.tensors()) == before
    t.model.loss = real
    assert t.step()["decision"] == "apply"


def test_key_sees_code_not_comments(cfg, tmp_path):
    "One edited line of muon is a miss, one comment a hit, and so is a module that training does not reach."
    t = Trainer(cfg, tmp_path)
    here = Path(T.__file__).parent
    copy = tmp_path / "shohin"
    shutil.copytree(here, copy, ignore=shutil.ignore_patterns("__pycache__"))
    key = lambda: run_key(cfg, t.manifest, json.dumps(T.reachable_source(root=copy)))
    first = key()
    def edit(name, old, new):
        p = copy / name
        s = p.read_text()
        assert old in s, (name, old)
        p.write_text(s.replace(old, new, 1))
    edit("muon.py", "def newton_schulz(", "# a comment\ndef newton_schulz(")
    assert key() == first
    (copy / "diagnose.py").write_text((copy / "diagnose.py").read_text() + "\nx = 1\n")
    assert key() == first
    edit("muon.py", "3.4445", "3.4446")
    assert key() != first


def test_key_is_about_the_rows_that_are_read(cfg):
    "An order spelt differently that reads the same rows is the same run; another row anywhere, another run."
    from shohin.order import shuffled_shards
    from shohin.shards import Manifest
    m = Manifest.load(Path(cfg.corpus))
    key = lambda **order: run_key(replace(cfg, order=dict(kind="contiguous", **order)), m)
    plan = [int(i) for i in shuffled_shards(m, 5)]
    assert key(data_seed=5) == key(plan=plan) != key(data_seed=6)
    assert key(plan=plan, restarts=[0, 59]) != key(plan=plan)
    assert key(plan=plan, restarts=[0, 60]) == key(plan=plan)     # the run ends at 60


def test_finished_run_is_a_cache(cfg, tmp_path):
    a = Trainer(cfg, tmp_path).run()
    t = Trainer(cfg, tmp_path)
    t._train = lambda *_: pytest.fail("trained again")
    assert t.run() == a
    assert set(checkpoints(t.folder)) == {30}


@pytest.mark.parametrize("change, says", [
    (dict(order=dict(kind="contigous")), "unknown order 'contigous'"),
    (dict(guard="seeed"), "unknown guard 'seeed'"),
    (dict(optim=dict(moun_lr=1)), "moun_lr"),
    (dict(model=dict(MODEL, n_head=3, n_kv_head=2)), "head"),
    (dict(corpus="nowhere"), "nowhere"),
    (dict(batch_size=0), "batch_size"),
])
def test_bad_configs_are_one_line(cfg, tmp_path, change, says):
    path = tmp_path / "c.json"
    path.write_text(json.dumps(dict(asdict(cfg), **change)))
    r = subprocess.run([sys.executable, "-m", "shohin.train", str(path), str(tmp_path / "runs")], env=ENV, capture_output=True, text=True)
    assert r.returncode == 2, r.stderr
    assert len(r.stderr.strip().splitlines()) == 1 and r.stderr.startswith("shohin: ")
    import re
    assert re.search(says, r.stderr)


def test_unknown_field_and_type(cfg):
    with pytest.raises(UserError, match="unknown field 'lerning_rate'"): load_config(dict(asdict(cfg), lerning_rate=1))
    with pytest.raises(UserError, match="missing"): load_config(dict(name="x"))


def test_damaged_checkpoint_is_named(cfg, tmp_path):
    a = Trainer(cfg, tmp_path).run()
    p = checkpoints(tmp_path / a["key"])[30] / "optim.safetensors"
    raw = bytearray(p.read_bytes())
    raw[-3] ^= 8
    p.write_bytes(raw)
    with pytest.raises(UserError, match="step_00000030 does not match its own hash"):
        Trainer(replace(cfg, steps=61, parent=dict(run=a["key"], step=30, hash=a["kept"]["30"])), tmp_path).run()


def test_full_disk_is_one_line_and_loses_nothing(cfg, tmp_path):
    "A file-size limit stands in for a full disk: the run ends with one line, and goes on when there is room."
    code = "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000)); import shohin.train as T; sys.exit(T.main(sys.argv[1:]))"
    path = tmp_path / "c.json"
    path.write_text(json.dumps(asdict(cfg)))
    r = subprocess.run([sys.executable, "-c", code, str(path), str(tmp_path / "runs")], env=ENV, capture_output=True, text=True)
    assert r.returncode == 2 and "make room there and run again" in r.stderr and len(r.stderr.strip().splitlines()) == 1, r.stderr
    done = Trainer(cfg, tmp_path / "runs").run()
    assert strip(done) == strip(Trainer(cfg, tmp_path / "other").run())


def test_threads_are_fixed(cfg, tmp_path):
    Trainer(cfg, tmp_path)
    assert torch.get_num_threads() == 1 and os.environ["MKL_DYNAMIC"] == "FALSE"
