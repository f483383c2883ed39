"plan: sums that can be checked against torch, arms that come from the notebooks, and plans that cannot be."
import json
import os
import subprocess
import sys
import tomllib
from dataclasses import replace

import pytest
import torch

from shohin import plan as P
from shohin.experiment import (
    Planned,
    Sweep,
    base_config,
    load_profile,
    planned_manifest,
    repo_root,
    shard_rows,
    shards_for,
)
from shohin.model import GPT, GPTConfig
from shohin.muon import make_optimizers
from shohin.reproduce import EXPERIMENTS, make_plan, plan_notebook, seed_list
from shohin.shards import UserError

ENV = dict(os.environ, OMP_NUM_THREADS="1", COLUMNS="160")
SEED = dict(n_layer=30, d_model=576, n_head=9, n_kv_head=3, head_dim=64, d_ff=1536, vocab_size=32_768, seq_len=2048)
SMALL = dict(n_layer=3, d_model=128, n_head=4, n_kv_head=2, head_dim=32, d_ff=384, vocab_size=257, seq_len=64)


def cli(*args):
    return subprocess.run([sys.executable, "-m", "shohin.cli", "reproduce", *map(str, args), "--dry-run"], capture_output=True, text=True, env=ENV, timeout=300)


# ---- the sums

@pytest.mark.parametrize("optim", [{}, dict(no_muon=True)])
def test_state_is_what_torch_allocates(optim):
    "Weights, gradients and optimizer state, tensor by tensor, after a real step."
    model = GPT(GPTConfig.from_dict(SMALL))
    opt = make_optimizers(model, optim)
    model.loss(torch.zeros(1, 17, dtype=torch.long)).total.backward()
    opt.step()
    size = lambda ts: sum(t.numel() * t.element_size() for t in ts)
    want = P.state_bytes(SMALL, optim)
    assert want["weights"] == size(model.parameters()) and want["gradients"] == size(p.grad for p in model.parameters())
    assert want["optimizer"] == size(opt.state_tensors()[0].values())
    assert P.state_bytes(SMALL, optim, ranks=8)["gradients"] == 2 * want["gradients"]         # the buckets in which they travel


def test_the_seeds_model_on_the_meta_device():
    with torch.device("meta"): model = GPT(GPTConfig.from_dict(SEED))
    n = sum(p.numel() for p in model.parameters())
    assert n == GPT.n_params(model) and round(n / 1e6, 1) == 125.1                              # what the seed states
    assert P.state_bytes(SEED)["weights"] == 4 * n == sum(p.numel() * p.element_size() for p in model.parameters())
    _, m, o = P.shapes(SEED)
    assert len(m) == 30 * 7 and P._n(m) + P._n(o) == n
    assert P.flops_per_token(SEED) == 6 * n + 12 * 30 * 576 * 2048
    assert 0.30 < 281_959 * P.flops_per_token(SEED) / 989.4e12 < 0.36                            # the seed's own log, had it been one card


def test_activations_are_estimated_within_a_quarter():
    "Every tensor that autograd keeps for the backward pass of a CPU forward pass in fp32, counted once."
    cfg = dict(SMALL, d_model=192, n_head=6, n_kv_head=2, d_ff=512, vocab_size=1024, seq_len=128)
    model, rows = GPT(GPTConfig.from_dict(cfg)), 4
    kept, mine = {}, {p.untyped_storage().data_ptr() for p in model.parameters()} | {b.untyped_storage().data_ptr() for b in model.buffers()}
    def pack(t):
        s = t.untyped_storage()
        if s.data_ptr() not in mine: kept[s.data_ptr()] = t, s.nbytes()
        return t
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t): loss = model.loss(torch.randint(0, 1024, (rows, 129))).total
    real = sum(n for _, n in kept.values())
    want = P.activation_bytes(cfg, rows, autocast=False)
    logits = rows * 128 * 1024 * 4
    grads_of_logits = 2 * logits                                                                # the estimate has room for these, which come later
    assert abs(want["activations"] + want["logits"] - grads_of_logits - real) < real / 4, (want, real, loss.item())


def test_newton_schulz_counts_every_product():
    assert P.muon_flops(dict(SMALL, n_layer=1)) == 5 * sum(4 * min(s)**2 * max(s) + 2 * min(s)**3 for s in
        [(128, 128), (64, 128), (64, 128), (128, 128), (384, 128), (384, 128), (128, 384)])


def test_hours_are_those_of_the_recorded_runs_within_a_factor_of_two():
    "The committed runs of the cpu profile say what a step took."
    took, want = [], []
    for f in (repo_root() / "reports/results/runs").glob("*.json"):
        r = json.loads(f.read_text())
        c = r["config"]
        if c["model"]["d_model"] != 128 or c["batch_size"] != 12: continue
        model = dict(c["model"], vocab_size=257, seq_len=c["seq_len"])
        took.append(r["result"]["s_per_step"])
        want.append((c["batch_size"] * c["seq_len"] * P.flops_per_token(model) + P.muon_flops(model)) / (P.DEVICES["cpu"].peak * P.DEVICES["cpu"].mfu))
    if not took: pytest.skip("no records")
    middle = lambda v: sorted(v)[len(v) // 2]
    assert 0.5 < middle(want) / middle(took) < 2, (middle(want), middle(took))


# ---- the profile

def test_the_h100_profile_is_the_seeds_configuration():
    p = load_profile("h100")
    assert p["model"] == {k: SEED[k] for k in ("n_layer", "d_model", "n_head", "n_kv_head", "head_dim", "d_ff")}
    cfg = GPTConfig.from_dict(dict(p["model"], vocab_size=p["bpe_vocab"], seq_len=p["seq_len"]))
    assert (cfg.rope_theta, cfg.norm_eps, cfg.qk_norm, cfg.tie_embeddings, cfg.z_loss, cfg.init_std) == (50_000, 1e-6, True, True, 1e-4, .02)
    assert p["batch_size"] * p["seq_len"] == 524_288 and p["shard_tokens"] == 200_000_000 and p["seeds"] == [1337, 777]
    assert p["base_steps"] == 6000 and p["warmup"] == 200 and p["optim"] == dict(muon_lr=.02, adamw_lr=3e-3)
    assert round(p["shard_tokens"] / 524_288, 2) == 381.47 and shard_rows(p) == 97_608
    assert [shards_for(p, s) for s in (381, 1525, 1526)] == [1, 4, 5]                            # the block of seed 1337 is four shards
    assert set(load_profile("cpu")) <= set(p) and planned_manifest(p, 1337).domains == ("finemath4", "openwebmath", "code_python")


def test_the_other_tables_are_as_they_were():
    "Runs of the cpu profile are published: a number changed there would orphan them."
    import hashlib
    table = tomllib.loads((repo_root() / "nbs/experiments/profiles.toml").read_text())
    digest = {n: hashlib.sha256(json.dumps(table[n], sort_keys=True).encode()).hexdigest()[:16] for n in ("smoke", "cpu")}
    assert digest == DIGEST, digest

DIGEST = dict(smoke="f6db772d83caacef", cpu="a76dca1c2f54a253")


def test_seeds():
    assert seed_list(dict(seeds=[1337, 777]), None) == [1337, 777] and seed_list({}, None) == [1] and seed_list(dict(seeds=[9]), 3) == [1, 2, 3] and seed_list({}, [5]) == [5]


# ---- the arms

def test_a_sweep_that_is_planned_trains_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("SHOHIN_PLAN", str(tmp_path / "plan.json"))
    from shohin.experiment import CliffArms
    prof = load_profile("smoke")
    c = CliffArms(prof, 1, tmp_path / "data")
    s = Sweep("cliff", prof, c.pick("block", "no-guard"), [1, 2], base_config(prof), data=tmp_path / "data")
    with pytest.raises(Planned): s.run()
    doc = json.loads((tmp_path / "plan.json").read_text())
    assert [(r["arm"], r["seed"], r["parent"], r["at"], r["config"]["steps"], r["config"]["keep"]) for r in doc["runs"]] == [
        ("block", 1, None, None, 48, [32, 48]), ("no-guard", 1, "block", 48, 64, []), ("block", 2, None, None, 48, [32, 48]), ("no-guard", 2, "block", 48, 64, [])]
    assert not (tmp_path / "data").exists()


def test_at_135m_the_boundary_falls_into_the_step_that_the_arms_fork_at(tmp_path, monkeypatch):
    "Shards of 200M tokens are no whole number of steps: the order itself says where the blocks end, in both histories, and for seed 777's single shard."
    from shohin.experiment import CliffArms
    from shohin.order import make_order
    monkeypatch.setenv("SHOHIN_PLAN", str(tmp_path / "plan.json"))
    p = load_profile("h100")
    c = CliffArms(p, 1337, tmp_path)
    bounds = lambda order, start, stop: [(b.step, b.row) for b in make_order(order, c.manifest, p["batch_size"], p["seq_len"]).boundaries(start, stop)]
    assert bounds(c.order, 6000, 7800) == [(7525, 32)] and c.at == 7525
    assert [s for s, _ in bounds(c.one_pass().changes["order"], 5990, 7800)] == [6000, 7525]
    assert [s for s, _ in bounds(c.contiguous((p["old_domain"], 0, 381), (p["new_domain"], 0, 381)), 6001, 6700)] == [6381]


def test_every_experiment_can_be_planned_at_135m(tmp_path):
    "All notebooks, the real profile, no corpus: the sums of the bill are those of its lines, and nothing is left behind."
    p = make_plan([], "h100", None, everything=True, data=tmp_path / "data")
    assert p.findings() == [f for f in p.findings() if "of disk" in f]
    assert {r.experiment for r in p.runs} | set(p.nothing) == set(EXPERIMENTS) and "timing" in p.nothing
    arms = {(r.experiment, r.arm) for r in p.runs}
    assert {("cliff", "seed-guard"), ("muon-lr", "muon-0.005-guard"), ("no-muon", "adamw"), ("fresh-opt", "fresh"), ("base-history", "one-pass")} <= arms
    by = {(r.experiment, r.arm, r.seed): r for r in p.runs}
    block, free = by["cliff", "block", 1337], by["cliff", "no-guard", 1337]
    assert (block.steps, free.start, free.steps) == (7525, 7525, 7825) and block.tokens == 7525 * 524_288 and free.tokens == 300 * 524_288
    assert block.flops == pytest.approx(block.tokens * P.flops_per_token(SEED), rel=.03)          # Muon and the probes are the rest
    assert by["fix", "block", 777].shared == "cliff/block" and not by["cliff", "block", 777].shared
    doc = p.to_dict()
    assert doc["bill"]["tokens"] == sum(r["tokens"] for r in doc["runs"] if not r["shared"])
    assert doc["bill"]["device_hours"] == pytest.approx(sum(r["device_hours"] for r in doc["runs"]))
    assert doc["bill"]["device_hours"] == pytest.approx(doc["bill"]["flops"] / (989.4e12 * .3) / 3600)
    assert [c["domains"] for c in doc["corpora"]] == [dict(finemath4=24, openwebmath=24, code_python=24)] * 2
    assert not list(tmp_path.iterdir()) and "SHOHIN_PLAN" not in os.environ
    one_pass = plan_notebook("base-history", dict(profile="h100", seeds=[1337], data=str(tmp_path / "data")))
    order = next(r for r in one_pass["runs"] if r["arm"] == "one-pass")["config"]["order"]
    late = order["restarts"][1]                                                                    # its block must begin at step 6000 too
    assert late + 15 * shard_rows(load_profile("h100")) // 256 == 6000 and len(order["plan"]) == 15 + 4 + 1
    narrow = replace(p, ranks=7)
    assert "does not divide over 7 ranks" in narrow.findings()[0]


# ---- the command

def test_the_command_prints_the_bill_and_refuses_what_cannot_be(tmp_path):
    ok = cli("cliff", "--profile", "smoke", "--data", tmp_path / "data", "--json")
    assert ok.returncode == 0, ok.stderr
    doc = json.loads(ok.stdout)
    assert doc["bill"]["runs"] == 5 and doc["findings"] == [] and not list(tmp_path.iterdir())
    bad = cli("cliff", "--profile", "h100", "--data", tmp_path / "data", "--ranks", 3, "--memory", 4)
    assert bad.returncode == 2 and len(bad.stderr.strip().splitlines()) == 1
    for says in ("does not divide over 3 ranks", "GB a rank"): assert says in bad.stderr, bad.stderr
    for says in ("no-guard", "GPU-h", "of 989 TFLOP/s", "bill:", "finemath4"): assert says in bad.stdout, bad.stdout


def test_a_real_run_that_cannot_fit_ends_before_it_starts(tmp_path, monkeypatch):
    from shohin import reproduce as R
    monkeypatch.setattr(R, "make_plan", lambda *a, **k: replace(P.Plan("h100", [], P.DEVICES["h100"], 3, 1, 256, 16, [], 10**12)))
    monkeypatch.setattr(R, "run_notebook", lambda *a, **k: pytest.fail("started"))
    with pytest.raises(UserError, match="does not divide"): R.reproduce(["cliff"], "h100", data=tmp_path / "data")
