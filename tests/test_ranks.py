"One run on many ranks: the same losses, decisions and data, whatever happens to a rank."
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from shohin import train as T
from shohin.corpus import build_corpus, stdlib_sources
from shohin.order import make_order
from shohin.shards import Manifest, UserError
from shohin.train import DistributedConfig, DistributedTrainer, Trainer, checkpoints, key_of, load_config, read_log

MODEL = dict(n_layer=2, d_model=32, n_head=2, n_kv_head=1, head_dim=16, d_ff=64)
ENV = dict(os.environ, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
WORKER = Path(__file__).with_name("rank_worker.py")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    out = tmp_path_factory.mktemp("data") / "corpus"
    build_corpus(out, sources=stdlib_sources(60_000), shard_tokens=33 * 8 * 10, probe_bytes=2048)
    return out


@pytest.fixture
def cfg(corpus):
    return DistributedConfig("t", str(corpus), MODEL, dict(kind="interleaved"), steps=30, batch_size=8, seq_len=32, warmup=4, horizon=1000,
                             probe_every=20, probe_rows=2, attn_every=25, guard="default", checkpoint_every=7)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def launch(world, task, *args, status=0):
    "Run a task of rank_worker.py on `world` ranks; its output."
    r = subprocess.run([sys.executable, WORKER, str(world), str(free_port()), task, *map(str, args)], env=ENV, capture_output=True, text=True, timeout=120)
    assert r.returncode == status, r.stdout + r.stderr
    return r.stdout + r.stderr


def train(cfg, where, world, status=0):
    where.mkdir(exist_ok=True)
    (where / "config.json").write_text(json.dumps(asdict(cfg)))
    return launch(world, "train", where / "config.json", where, status=status)


def logged(where, cfg): return read_log(where / key_of(cfg, Manifest.load(Path(cfg.corpus))) / "log.jsonl")


def test_one_two_and_four_ranks_agree(cfg, tmp_path):
    "The loss within 1e-4 over 30 steps; data, decisions and the lines of the log the same; the key says nothing of ranks."
    plain = {f: v for f, v in asdict(cfg).items() if f not in ("device", "micro_batch", "autocast", "compile")}
    runs = [Trainer(load_config(plain), tmp_path / "plain")]
    runs[0].run()
    rows = [read_log(runs[0].folder / "log.jsonl")]
    for world, micro in ((1, 2), (2, None), (4, 1)):
        c = replace(cfg, micro_batch=micro)
        train(c, tmp_path / str(world), world)
        rows.append(logged(tmp_path / str(world), c))
    for other in rows[1:]:
        assert [r["step"] for r in other] == list(range(30))
        for a, b in zip(rows[0], other, strict=True):
            assert abs(a["loss"] - b["loss"]) < 1e-4 and abs(a["grad_norm"] - b["grad_norm"]) < 1e-3 and abs(a["update_norm"] - b["update_norm"]) < 1e-3
            assert list(a) == list(b) and all(a[k] == b[k] for k in ("tokens", "lr", "domains", "decision"))
            assert a.get("probes", {}) == pytest.approx(b.get("probes", {}), abs=1e-4)
            assert a.get("max_attention_logit", []) == pytest.approx(b.get("max_attention_logit", []), abs=1e-3)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_shared_muon_is_muon(world):
    "Seven matrices of a shape do not divide among two, three or four ranks; updates within 1e-5, momentum whole after a gather."
    launch(world, "muon")


def test_another_number_of_ranks_goes_on_with_the_same_data(cfg, tmp_path):
    quiet, c = tmp_path / "quiet", replace(cfg, steps=24)
    train(c, quiet, 2)
    train(replace(c, steps=24, keep=(10,)), tmp_path / "a", 4)
    folder = tmp_path / "a" / key_of(c, Manifest.load(Path(c.corpus)))
    (folder / "result.json").unlink()                      # as if it had ended at step 10
    assert list(checkpoints(folder)) == [10]
    assert "done" in train(c, tmp_path / "a", 1)
    order = make_order(c.order, Manifest.load(Path(c.corpus)), c.batch_size, c.seq_len)
    rows = logged(tmp_path / "a", c)
    assert [r["step"] for r in rows] == list(range(24))
    for a, b in zip(logged(quiet, c), rows, strict=True):
        spans = [s.domain for s in order.spans(a["step"])]
        assert a["domains"] == b["domains"] == {d: spans.count(d) for d in dict.fromkeys(spans)}
        assert abs(a["loss"] - b["loss"]) < 1e-3


def test_a_nan_on_one_rank_is_everybodys(cfg, tmp_path):
    "One rank's weights break for three steps: all skip those and go on together."
    (tmp_path / "config.json").write_text(json.dumps(asdict(replace(cfg, steps=12))))
    launch(2, "nan", tmp_path / "config.json", tmp_path, 5, 7)
    rows = logged(tmp_path, replace(cfg, steps=12))
    assert [r["step"] for r in rows if r["decision"] == "skip:nonfinite"] == [5, 6, 7] and len(rows) == 12
    assert all(math.isfinite(float(r["loss"])) == (r["step"] not in (5, 6, 7)) for r in rows)
    assert all((r["update_norm"] == 0) == (r["step"] in (5, 6, 7)) for r in rows)


def test_a_lasting_nan_on_one_rank_stops_all(cfg, tmp_path):
    "The breaker ends the run on every rank; none waits for another that has left."
    c = replace(cfg, steps=400, guard=["nonfinite", {"guard": "breaker", "window": 20, "limit": 15}], probe_every=0)
    try: Trainer(load_config({k: v for k, v in asdict(c).items() if k not in ("device", "micro_batch", "autocast", "compile")}), tmp_path)
    except UserError: c = replace(c, guard="default", steps=420)
    (tmp_path / "config.json").write_text(json.dumps(asdict(c)))
    launch(2, "nan", tmp_path / "config.json", tmp_path, 5, 500)
    result = json.loads(next(tmp_path.glob("*/result.json")).read_text())
    assert result["stopped"] and result["steps"] < c.steps and result["ranks"] == 2


def test_a_killed_rank_ends_the_job_and_torchrun_starts_it_again(cfg, tmp_path):
    "SIGKILL to one rank in the middle: the other says so in a line, torchrun starts both again, and the weights are those of a quiet run."
    c = replace(cfg, steps=80, probe_every=0, attn_every=0, checkpoint_every=5)
    train(c, tmp_path / "quiet", 2)
    key = key_of(c, Manifest.load(Path(c.corpus)))
    runs = tmp_path / "runs"
    runs.mkdir()
    (runs / "config.json").write_text(json.dumps(asdict(c)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1",
               "-m", "shohin.train", str(runs / "config.json"), str(runs)]
    with open(tmp_path / "out.txt", "w") as out: p = subprocess.Popen(command, env=ENV, stdout=out, stderr=subprocess.STDOUT)
    log, deadline = runs / key / "log.jsonl", time.time() + 90
    while not log.exists() or len(read_log(log)) < 12:
        assert time.time() < deadline and p.poll() is None, (tmp_path / "out.txt").read_text()
        time.sleep(.02)
    ranks = [int(q) for q in subprocess.run(["pgrep", "-P", str(p.pid)], capture_output=True, text=True).stdout.split()]
    victim = next(q for q in ranks if b"RANK=1\0" in Path(f"/proc/{q}/environ").read_bytes().replace(b"LOCAL_RANK", b"L").replace(b"GROUP_RANK", b"G").replace(b"ROLE_RANK", b"R"))
    os.kill(victim, signal.SIGKILL)
    assert p.wait(90) == 0, (tmp_path / "out.txt").read_text()
    said = (tmp_path / "out.txt").read_text()
    assert "shohin: lost another rank in step" in said and "goes on from the last checkpoint" in said, said
    ours, quiet = (json.loads((d / key / "result.json").read_text()) for d in (runs, tmp_path / "quiet"))
    assert ours["weights"] == quiet["weights"] and read_log(log) == read_log(tmp_path / "quiet" / key / "log.jsonl")


def test_told_to_end_it_saves_first(cfg, tmp_path):
    "SIGTERM to one of two ranks: both end after the same step, saved there; the same command goes on and nothing differs."
    c = replace(cfg, steps=3000, probe_every=0, attn_every=0, checkpoint_every=10_000)
    (tmp_path / "config.json").write_text(json.dumps(asdict(c)))
    key = key_of(c, Manifest.load(Path(c.corpus)))
    p = subprocess.Popen([sys.executable, WORKER, "2", str(free_port()), "train", tmp_path / "config.json", tmp_path], env=ENV, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    log, deadline = tmp_path / key / "log.jsonl", time.time() + 60
    while not log.exists() or len(read_log(log)) < 10:
        assert time.time() < deadline and p.poll() is None
        time.sleep(.02)
    os.kill(max(map(int, subprocess.run(["pgrep", "-P", str(p.pid)], capture_output=True, text=True).stdout.split())), signal.SIGTERM)
    said = p.communicate(timeout=60)[0]
    assert p.returncode == 143 and said.count("saved, the same command goes on from there") == 2, said
    (at,) = checkpoints(tmp_path / key)
    assert len(read_log(log)) == at > 9
    state = json.loads((checkpoints(tmp_path / key)[at] / "state.json").read_text())
    assert state["log_bytes"] == log.stat().st_size


@pytest.mark.parametrize("change, world, says", [
    (dict(batch_size=9), 2, "a batch of 9 rows does not divide among 2 ranks"),
    (dict(micro_batch=3), 2, "micro_batch 3 does not divide the 4 rows of a rank"),
    (dict(autocast="fp8"), 1, "autocast 'fp8'"),
    (dict(device="cuda"), 1, "this torch sees no GPU here"),
    (dict(device="tpu"), 1, "it is cpu or cuda")])
def test_what_cannot_run_is_one_line(cfg, tmp_path, change, world, says):
    if change.get("device") == "cuda" and torch.cuda.is_available(): pytest.skip("there is a GPU here")
    said = train(replace(cfg, **change), tmp_path / "x", world, status=2)
    assert says in said and "Traceback" not in said, said


def test_a_missing_corpus_is_said_once(cfg, tmp_path):
    said = train(replace(cfg, corpus=str(tmp_path / "nowhere")), tmp_path / "x", 2, status=2)
    assert said.count("nowhere") >= 1 and "Traceback" not in said


def test_step_by_hand_is_the_runs_step(cfg, tmp_path):
    "`step()` looks at the device once more than a run does, and gives the same rows."
    a = DistributedTrainer(cfg, tmp_path)
    by_hand = [a.step() for _ in range(5)]
    b = DistributedTrainer(replace(cfg, steps=5), tmp_path)
    b.run()
    assert by_hand == read_log(b.folder / "log.jsonl")


class Waits(torch.utils._python_dispatch.TorchDispatchMode):
    "Names of the operations dispatched that make the host wait for a GPU: a number read, an output whose size depends on values, a tensor made of Python numbers."
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name.split("::")[1] in ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "lift_fresh", "equal"): self.seen.append((func._schema.name[6:], tuple(args[0].shape)))
        return func(*args, **(kwargs or {}))


def test_the_host_waits_once_a_step(cfg, tmp_path, monkeypatch):
    """A step reads the device in one place, `to_host`. Besides it two tensors are made on the host, the batch and what this rank says, and both are
    sent without waiting. The plain trainer, made for a CPU, waits more often: the test can tell."""
    looks = []
    real = T.to_host
    monkeypatch.setattr(T, "to_host", lambda x: (looks.append(x.shape), real(x))[1])
    trainer = DistributedTrainer(replace(cfg, micro_batch=4, autocast="bf16", optim=dict(trust_clamp=.05, weight_decay=.1)), tmp_path)
    trainer.advance()
    for _ in range(3):
        looks.clear()
        with Waits() as w: trainer.advance()
        assert len(looks) == 1 and w.seen == [("lift_fresh", (8, 33)), ("lift_fresh", (2,))], (looks, w.seen)
    plain = Trainer(load_config({f: v for f, v in asdict(cfg).items() if f not in ("device", "micro_batch", "autocast", "compile")}), tmp_path)
    plain.step()
    with Waits() as w: plain.step()
    assert len(w.seen) > 3


@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler on a CPU")
def test_compiled_steps_are_the_same_steps(cfg, tmp_path):
    "torch.compile, within what other kernels round differently."
    rows = []
    for c in (cfg, replace(cfg, compile=True)):
        t = DistributedTrainer(replace(c, attn_every=0, probe_every=2), tmp_path)
        rows.append([t.step() for _ in range(4)])
    for a, b in zip(*rows, strict=True): assert abs(a["loss"] - b["loss"]) < 1e-3 and list(a) == list(b)
