"A step executed again outside its run, and the causes of breaks that were made on purpose."
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from shohin import attribute as A
from shohin.attribute import Replay, attribute, fork_report, lineage
from shohin.corpus import build_corpus, stdlib_sources
from shohin.shards import UserError, describe_shard
from shohin.train import RunConfig, Trainer, history, read_log
from shohin.warmstart import warmstart_checkpoint

MODEL = dict(n_layer=2, d_model=32, n_head=2, n_kv_head=1, head_dim=16, d_ff=64)
ENV = dict(os.environ, OMP_NUM_THREADS="1", COLUMNS="100")
B, T, FORK, AT = 6, 32, 160, 172          # rows, tokens; where the arms fork, where something happens in them


def tree(folder): return {str(p.relative_to(folder)): (p.stat().st_mtime_ns, p.read_bytes()) for p in sorted(folder.rglob("*")) if p.is_file()}


class World:
    "A base run on code, and forks of it with known causes. A shard is one step; one shard of noise is called code."
    def __init__(self, tmp):
        self.tmp, self.runs, self.made = tmp, tmp / "runs", {}
        m = build_corpus(tmp / "corpus", sources=stdlib_sources(120_000), shard_tokens=(T + 1) * B, probe_bytes=2048)
        np.save(tmp / "corpus/noise.npy", np.random.default_rng(0).integers(0, 256, (T + 1) * B).astype(np.uint16))
        self.corpus = replace(m, shards=(*m.shards, describe_shard(tmp / "corpus", "noise.npy", m.vocab_size, "code_python")))
        self.corpus.save()
        of = {d: [i for i, s in enumerate(m.shards) if s.domain == d] for d in m.domains}
        self.code, self.tables, self.noise = of["code_python"], of["tables"], len(m.shards)
        self.start = self.code[:40] * 4                                             # read four times
        self.base = RunConfig("base", str(tmp / "corpus"), MODEL, self.order(), steps=FORK, batch_size=B, seq_len=T, warmup=8, horizon=5000,
                              probe_every=20, probe_rows=4, guard="none", keep=(150, 155, FORK), checkpoint_every=1000)
        self.result = Trainer(self.base, self.runs).run()

    def order(self, *then): return dict(kind="contiguous", plan=[*self.start, *then])

    def arm(self, name, then=None, steps=200, **kw):
        "Run folder of a fork, trained once."
        if name not in self.made:
            then = self.code[40:100] if then is None else then
            cfg = replace(self.base, name=name, steps=steps, order=self.order(*then), keep=kw.pop("keep", ()), parent=dict(run=self.result["key"], step=FORK, hash=self.result["kept"][str(FORK)]), **kw)
            t = Trainer(cfg, self.runs)
            t.run()
            self.made[name] = t.folder
        return self.made[name]

    def boundary(self, **kw): return self.arm("boundary" + str(sorted(kw.items())), [*self.code[40:40 + AT - FORK], *self.tables[:40]], **kw)


@pytest.fixture(scope="module")
def world(tmp_path_factory): return World(tmp_path_factory.mktemp("attribute"))


def standing(a): return {c.name: c.standing for c in a.causes}


# --- the replay --------------------------------------------------------------------------------------------------------

def test_re_executed_steps_are_the_runs_own_bits(world):
    "Over a fork, with probes, updates and gradients taken in between: every logged number, and the weights at the end."
    folder = world.boundary()
    before = tree(world.runs)
    seen = []

    def look(r, done):
        seen.append(done.step)
        r.probe(); r.evaluate(done.step); r.update(done.step + 1, scale=15); r.evaluate(r.sample(dict(tables=2)), torch.float64)

    r = Replay(world.runs, folder.name, 150)
    r.advance(180, look)
    assert r.exact and r.checked == 30 and seen == list(range(150, 180)) and not r.differences
    r.advance(200)
    result = json.loads((folder / "result.json").read_text())
    assert r.weights_hash() == result["weights"] and r.exact and r.checked == 50
    assert r.probe() == {d: v["nats_per_token"] for d, v in result["final_probes"].items()}
    assert tree(world.runs) == before, "something was written into a run folder"


def test_evaluate_gives_the_logged_loss_gradient_and_domains(world):
    folder = world.boundary()
    r = Replay(world.runs, folder.name, AT)
    row, e = r.log[AT], r.evaluate(AT)
    assert (float(f"{e.loss:.6g}"), float(f"{e.grad_norm:.6g}")) == (row["loss"], row["grad_norm"]) and set(e.domain_loss) == {"tables"}
    assert len(e.per_row) == B and abs(np.mean(e.per_row) - e.loss) < 1e-5
    assert abs(r.evaluate(AT, torch.float64).loss - e.loss) < 1e-5 and r.evaluate(AT, grad=False).grad_norm is None
    assert r.evaluate(r.batch(AT).tokens).loss == e.loss and r.evaluate(AT - 1).loss != e.loss
    g = r.gradient(AT)
    assert abs(torch.stack([x.norm() for x in g.values()]).norm().item() - e.grad_norm) < 1e-4
    assert r.batch(150).spans[0].domain == "code_python"                                  # the parent's step


def test_an_update_is_what_the_optimizer_subtracts(world):
    r = Replay(world.runs, world.boundary().name, AT)
    weights = {k: p.detach().clone() for k, p in r.model.named_parameters()}
    update, other = r.update(AT), r.update(AT, scale=15)
    hash = r.weights_hash()
    done = []
    r.advance(AT + 1, lambda r, d: done.append(d))
    assert r.exact and r.weights_hash() != hash
    for k, p in r.model.named_parameters(): assert torch.equal(weights[k] - update[k], p.detach()) or torch.allclose(weights[k] - update[k], p.detach(), atol=1e-7), k
    norm = torch.stack([u.norm() for u in update.values()]).norm().item()
    assert abs(norm - done[0].row["update_norm"]) < 1e-3 * norm
    for k, u in update.items(): assert abs(u.norm().item() - done[0].update_norms[k]) < 1e-3 * norm
    clipped = A.compare_updates(update, other)
    raw = A.compare_updates(*(Replay(world.runs, world.boundary().name, AT).update(AT, s, clip=False) for s in (1, 15)))
    muon = [k for k, v in r.by_optimizer().items() if v == "muon"]
    assert len(muon) == 14 and all(abs(raw[k][1] - 1) < 0.25 for k in muon), "an orthogonalised update keeps its size"
    assert np.mean([raw[k][0] for k in muon]) < np.mean([clipped[k][0] for k in muon]), "clipping undoes the scale"
    assert done[0].binds(1e-9) == 1 and done[0].binds(1e9) == 0


def test_state_and_counterfactuals(world):
    folder = world.boundary()
    r = Replay(world.runs, folder.name, AT)
    s, a = r.state(), r.weights_hash()
    r.skip(); r.advance(AT + 4)
    left_out = r.weights_hash()
    r.restore(s)
    assert r.weights_hash() == a and r.step == AT
    r.advance(AT + 4)
    assert r.exact and r.weights_hash() != left_out                                       # a skipped update is no difference from the log: nothing is compared after it
    r.restore(s); r.advance(AT + 4)
    assert r.exact
    c = Replay(world.runs, folder.name, AT, changes=dict(optim=dict(no_muon=True)))
    assert c.began == FORK and c.exact is None and len(c.fresh) == 14 * 3 and "adamw.exp_avg.blocks.0.attn.wk.weight" in c.fresh
    assert c.jump(150).step == 150 and c.advance(FORK + 1).segment == 1
    with pytest.raises(UserError, match="no saved state at step 151"): c.jump(151)
    with pytest.raises(UserError, match="go back to 3"): c.advance(3)


def test_samples_are_rows_the_run_did_not_read(world):
    r = Replay(world.runs, world.boundary().name, AT)
    seen = r.visits(200)
    assert sum(int(v.sum()) for v in seen.values()) == 200 * B and max(int(v.max()) for v in seen.values()) == 4
    b = r.sample(dict(code_python=20, tables=10), seed=1, stop=200)
    n = r.trainer.order.index.row_len
    assert b.tokens.shape == (30, T + 1) and [s.domain for s in b.spans] == ["code_python"] * 20 + ["tables"] * 10
    assert all(s.shard not in seen or seen[s.shard][s.start // n] == 0 for s in b.spans)
    again = r.sample(dict(code_python=20, tables=10), seed=1, stop=200)
    assert torch.equal(again.tokens, b.tokens) and not torch.equal(r.sample(dict(code_python=20, tables=10), seed=2, stop=200).tokens, b.tokens)
    with pytest.raises(UserError, match="no domain 'latin'"): r.sample(dict(latin=1))


def test_fork_report_names_what_starts_fresh(world):
    for name, kw, n in (("same", {}, 0), ("fresh", dict(fresh_opt=True), None), ("adamw", dict(optim=dict(no_muon=True)), 14 * 3), ("spelt out", dict(optim=dict(muon_lr=0.02)), 0)):
        r = Replay(world.runs, world.arm(name, steps=164, **kw).name, FORK)
        f = fork_report(world.runs, r.lineage[-1].cfg, r.trainer)
        assert f["fresh"] == r.fresh and f["step"] == FORK and f["fresh_opt"] == kw.get("fresh_opt", False)
        assert len(f["fresh"]) == (n if n is not None else len(r.trainer.optim.state_tensors()[0]) + len(r.trainer.optim.state_tensors()[1])), name
        assert ("optim" in f["changed"]) == (name == "adamw") and (len(f["dropped"]) == 14) == (name == "adamw")


def test_a_warm_start_in_the_history(world):
    "The folder that `shohin warmstart` writes stands between two runs; what it changed is not lost."
    out = world.runs / "warm"
    parent = warmstart_checkpoint(world.runs / world.result["key"] / f"checkpoints/step_{FORK:08d}", out, optimizer="adamw")
    t = Trainer(replace(world.base, name="on adamw", steps=FORK + 8, optim=dict(no_muon=True), keep=(), parent=parent), world.runs)
    weights = t.run()["weights"]
    r = Replay(world.runs, t.key, 155)
    assert [s.key for s in r.lineage] == [world.result["key"], "warm", t.key] and r.began == 155
    r.advance(FORK + 8)
    assert r.exact and r.checked == 13 and r.weights_hash() == weights and r.fresh == []
    assert not attribute(t.folder, FORK + 4).measured["differences"]
    shutil.rmtree(out); shutil.rmtree(t.folder)


def test_lineage_is_the_trainers_history(world):
    folder = world.boundary()
    rows = [row for s in lineage(world.runs, folder.name) for row in s.rows]
    assert rows == history(world.runs, folder.name) and [s.stop for s in lineage(world.runs, folder.name)] == [FORK, 200]


# --- known causes --------------------------------------------------------------------------------------------------------

def test_healthy(world):
    folder = world.arm("healthy")
    a = attribute(folder, 180)
    assert not a.found and a.exit_status == 0 and a.cause == "nothing found" and a.verdict.startswith("Nothing found at step 180")
    assert a.measured["checked"] and not a.measured["differences"]
    a = attribute(folder)
    assert (a.step, a.exit_status, a.cause) == (None, 0, "nothing found")


def test_boundary(world):
    "The domains change at step 172, twelve steps after the fork."
    before = tree(world.runs)
    folder = world.boundary()
    a = attribute(folder, AT)
    assert a.cause == "data order" and a.exit_status == 1, a.render(140, False)
    assert attribute(folder).step == AT
    assert {k for k, v in standing(a).items() if v == "supported"} == {"data order"} and "tables" in a.verdict and "code_python" in a.verdict
    assert standing(a)["damage by an update"] == "ruled out" and not a.missing
    c = a.measured["costs"]
    assert c[AT]["this"] > c[AT]["old"] + 0.5 and c[AT - 5]["this"] > c[AT - 5]["old"] + 0.5
    assert sorted(a.measured["updates"]) == list(range(AT - 5, AT + 5)) and a.measured["event"]["loss"] == Replay(world.runs, folder.name, AT).log[AT]["loss"]
    assert attribute(folder, AT + 1).cause in ("nothing found", "data order")
    assert {k: v for k, v in tree(world.runs).items() if k in before} == before


def test_boundary_with_a_guard_that_freezes(world):
    folder = world.boundary(guard=["nonfinite", dict(guard="loss-ratio", ratio=1.15), "breaker"])
    a = attribute(folder, AT)
    assert a.cause == "data order" and standing(a)["guard freeze"] == "supported" and "guard freeze" in a.verdict, a.render(140, False)
    assert a.measured["moved"] is False
    late = attribute(folder, AT + 10)
    assert late.cause == "guard freeze" and standing(late)["data order"] == "supported" and f"ask for step {AT}" in late.verdict, late.render(140, False)


def test_poisoned_batch(world):
    a = attribute(world.arm("poisoned", [*world.code[40:40 + AT - FORK], world.noise, *world.code[60:100]]), AT)
    assert a.cause == "bad batch" and a.exit_status == 1, a.render(140, False)
    assert "noise.npy" in a.verdict and len(a.measured["dear_rows"]) == B
    assert {k for k, v in standing(a).items() if v == "supported"} == {"bad batch"}
    assert a.measured["batch"]["odd"], "noise is unlike its neighbours"


def test_learning_rate_raised_at_a_fork(world):
    folder = world.arm("raised", optim=dict(muon_lr=1., adamw_lr=.1))
    rows = read_log(folder / "log.jsonl")
    at = next(r["step"] for r in rows if r["loss"] > 1.5 * rows[0]["loss"])
    a = attribute(folder, at)
    assert a.cause == "learning rate or optimizer" and "muon_lr 0.02 -> 1.0" in a.verdict, a.render(140, False)
    assert standing(a)["damage by an update"] == "supported" and standing(a)["data order"] == "ruled out"
    assert attribute(folder).step <= at + 1
    kept = attribute(world.arm("boundary at a fork", world.tables[:40], optim=dict(muon_lr=.03)), FORK)
    assert kept.cause == "data order" and "no update was made under it yet" in next(c.why for c in kept.causes if c.name == "learning rate or optimizer"), kept.render(140, False)


def test_not_finite(world):
    folder = world.arm("nan", optim=dict(muon_lr=1e38, adamw_lr=1e38), steps=168)
    a = attribute(folder)
    assert a.step == FORK + 1 and a.cause == "learning rate or optimizer" and standing(a)["not finite"] == "supported", a.render(140, False)
    assert "in the weights" in next(c.why for c in a.causes if c.name == "not finite")
    json.dumps(a.to_dict())


def test_frozen_by_a_guard(world):
    a = attribute(world.arm("frozen", guard=["nonfinite", dict(guard="loss-ratio", ratio=.3), "breaker"]), AT)
    assert a.cause == "guard freeze" and a.measured["event"]["kind"] == "frozen" and a.measured["moved"] is False and a.exit_status == 1, a.render(140, False)
    assert f"from step {FORK}" in a.verdict


def test_without_near_checkpoints_it_says_what_is_missing(world):
    folder = world.boundary()
    a = attribute(folder, AT, reach=3)
    assert a.cause == "cannot tell" and a.exit_status == 1 and "Missing: the weights of step 172" in a.verdict and "--reach 12" in a.verdict and "keep = 167, 172" in a.verdict, a.verdict
    assert standing(a)["data order"] == "open" and standing(a)["guard freeze"] == "ruled out"


def test_rules_on_numbers_alone():
    "Undecided costs decide nothing."
    event = dict(step=100, kind="jump", loss=3., level=1., noise=.05, ema=1., ratio=3., excess=2., freeze=None, decision="apply", grad_norm=1., grad_level=1.)
    m = dict(event=event, around=5, missing=[], lr=dict(now=.02, before=.02, rose=False), fork=None, counterfactual=None, zero_updates=False, weights_finite=True,
             mix=dict(before=dict(a=6), at=dict(b=6), changed=True, next_alike=True), reads=dict(before=0., now=0., ended=False))
    cost = lambda old, new: {100: dict(this=3., old=old, new=new, previous=1., next=new), 95: dict(this=3., old=1., new=3.)}
    table = {(1., 3.): ("data order", "supported"), (2., 3.): ("data order", "open"), (3., 3.): ("data order", "ruled out"), (1., 1.): ("bad batch", "supported"), (1., 2.): ("bad batch", "open")}
    for (old, new), (name, want) in table.items():
        got = {c.name: c.standing for c in A.judge(m | dict(costs=cost(old, new)))}
        assert got[name] == want, (old, new, got)
    assert {c.name: c.standing for c in A.judge(m | dict(costs=cost(3., 3.)))}["damage by an update"] == "supported"
    assert {c.standing for c in A.judge(m | dict(costs={})) if c.name in ("data order", "bad batch", "damage by an update")} == {"open"}


# --- folders that are not what they should be -----------------------------------------------------------------------------

@pytest.fixture
def copy(world, tmp_path):
    "The boundary run and its parent in a folder of their own, to be damaged."
    runs = tmp_path / "runs"
    for f in (world.boundary(), world.runs / world.result["key"]): shutil.copytree(f, runs / f.name)
    return runs / world.boundary().name


def edit(path, **kw): path.write_text(json.dumps({k: v for k, v in dict(json.loads(path.read_text()), **kw).items() if v != "DROP"}))


@pytest.mark.parametrize("change, says", [
    (dict(parent=dict(run="../elsewhere", step=1, hash="x")), "parent is"), (dict(parent=dict(run="gone", step=FORK, hash="x")), "it is not there"),
    (dict(parent=3), "parent is"), (dict(model=dict(n_layer=1)), "model."), (dict(seq_len="long"), "seq_len is 'long'"), (dict(batch_size=0), "batch_size"),
    (dict(order=dict(kind="spiral")), "unknown order"), (dict(keep=3), "config.json"), (dict(surprise=1), "unknown field"), (dict(model="DROP"), "not the config of a run of ours"),
    (dict(manifest_hash="0" * 64), "is not the corpus that run"), (dict(corpus="/nowhere/corpus"), "--data"), (dict(guard="seeed"), "unknown guard"), (dict(threads=-1), "cannot be used"),
    (dict(optim=dict(muon_lr="fast")), "cannot be used")])
def test_hostile_config(copy, change, says):
    edit(copy / "config.json", **change)
    with pytest.raises(UserError, match=" ") as e: attribute(copy, AT)
    assert says in str(e.value), str(e.value)


def test_hostile_folders(copy, world, tmp_path):
    with pytest.raises(UserError, match="no such run folder"): attribute(tmp_path / "none", 1)
    with pytest.raises(UserError, match="no run folder"): attribute(tmp_path, 1)
    with pytest.raises(UserError, match="step 999 is not in its history; it has steps 0 to 199"): attribute(copy, 999)
    with pytest.raises(UserError, match="around must be"): attribute(copy, AT, around=0)
    parent = copy.parent / world.result["key"]
    edit(parent / "config.json", parent=dict(run=copy.name, step=0, hash="x"))
    with pytest.raises(UserError, match=r"ancestor|after the fork"): attribute(copy, AT)
    edit(parent / "config.json", parent=None)
    log = (copy / "log.jsonl").read_text()
    for bad, says in ((log.replace('"loss"', '"lost"'), "line 1 is not a row"), ('[1]\n' + log, "line 1 is not a row"), (log.split("\n", 3)[0] + "\n" + log.split("\n", 3)[3], "follows"), ("\x00\xff", "has steps 0 to 159")):
        (copy / "log.jsonl").write_text(bad)
        with pytest.raises(UserError, match=says): attribute(copy, AT)
    (copy / "log.jsonl").write_text(log + '{"step": 200, "lo')                            # the writer was killed
    assert attribute(copy, AT).cause == "data order"
    at = parent / f"checkpoints/step_{FORK:08d}"
    raw = (at / "model.safetensors").read_bytes()
    (at / "model.safetensors").write_bytes(raw[:-4] + b"\x00\x00\x00\x01")
    with pytest.raises(UserError, match="does not match its own hash"): attribute(copy, AT)
    (at / "model.safetensors").write_bytes(raw)
    (parent / "checkpoints/step_what").mkdir(); (parent / "checkpoints/step_what/state.json").write_text("{}")
    with pytest.raises(UserError, match="only step_N folders"): attribute(copy, AT)
    shutil.rmtree(parent / "checkpoints"); shutil.rmtree(copy / "checkpoints")
    with pytest.raises(UserError, match="no checkpoints folder"): attribute(copy, AT)


# --- the command -------------------------------------------------------------------------------------------------------------

def call(*args): return subprocess.run([sys.executable, "-m", "shohin.cli", "attribute", *map(str, args)], capture_output=True, text=True, env=ENV, timeout=120)


def test_command(world, copy, tmp_path):
    r = call(copy, "--step", AT, "--html", tmp_path / "page.html")
    assert r.returncode == 1 and "Data order at step 172" in r.stdout and not r.stderr, (r.stdout, r.stderr)
    page = (tmp_path / "page.html").read_text()
    assert "<script" not in page and "How each cause stands" in page and page.count("<tr>") > 20
    r = call(copy, "--step", AT, "--json", "--around", 3)
    d = json.loads(r.stdout)
    assert r.returncode == 1 and d["cause"] == "data order" and len(d["causes"]) == 7 and d["measured"]["around"] == 3
    assert call(world.arm("healthy"), "--step", 180).returncode == 0
    r = call(copy, "--step", 999)
    assert r.returncode == 2 and r.stdout == "" and len(r.stderr.splitlines()) == 1 and "999" in r.stderr
    moved = tmp_path / "moved"
    moved.mkdir(); shutil.copytree(world.tmp / "corpus", moved / "corpus")
    for f in copy.parent.iterdir(): edit(f / "config.json", corpus="/elsewhere/corpus")
    r = call(copy, "--step", AT)
    assert r.returncode == 2 and "--data" in r.stderr and len(r.stderr.splitlines()) == 1
    assert call(copy, "--step", AT, "--data", moved).returncode == 1


def test_nothing_from_outside_reaches_the_terminal_raw(copy):
    evil = "\x1b]0;owned\x07\u202e[red]"
    for f in copy.parent.iterdir():
        edit(f / "config.json", name=evil)
        rows = [json.loads(x) for x in (f / "log.jsonl").read_text().splitlines()]
        for x in rows:
            if "probes" in x: x["probes"] = {evil: 1.0}
        (f / "log.jsonl").write_text("".join(json.dumps(x) + "\n" for x in rows))
    a = attribute(copy, AT)
    for text in (a.render(100, False), a.to_html()):
        assert "\x1b" not in text and "\x07" not in text and "\u202e" not in text
    assert "\\x1b" in a.render(100, False)
