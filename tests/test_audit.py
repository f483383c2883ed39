"The audit: random orders pass, broken ones do not, and no input is trusted."
import io
import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from shohin.audit import (
    LIMITS,
    RULES,
    Reads,
    audit,
    audit_batches,
    find_shocks,
    measure,
    read_batches,
    read_index,
    read_llmc,
    read_log,
    read_megatron,
    read_order,
    read_rule,
)
from shohin.order import ContiguousOrder, InterleavedOrder, RoundRobinOrder, switch
from shohin.shards import UserError

DATA = Path(__file__).parent / "data" / "megatron"


def manifest(n=12, tokens=3200, domains=("code", "math", "web")):
    shards = tuple(SimpleNamespace(path=f"{d}/shard_{i:05d}.u16.zst", domain=d, tokens=tokens) for d in domains for i in range(n))
    return SimpleNamespace(shards=shards, domains=tuple(domains), hash="h")


def reads(label, batch, names=None):
    n = len(label) // batch
    D = int(max(label)) + 1
    return Reads(tuple(names or (f"d{i}" for i in range(D))), np.asarray(label[:n * batch], np.uint16), np.arange(n + 1) * batch, np.arange(n))


def findings(r): return {c.name: c for c in r.checks if c.level != "safe"}


# ---- what is safe ----

def test_random_orders_are_safe_in_99_of_100_trials():
    flagged = []
    for seed in range(200):
        rng = np.random.default_rng(seed)
        D, batch, n = int(rng.integers(2, 9)), int(rng.choice([4, 12, 64])), int(rng.choice([60, 400, 1500]))
        p = rng.dirichlet(np.full(D, 2.))
        label = rng.choice(D, batch * n, p=p)
        if seed % 2: label = rng.permutation(np.sort(label))  # a shuffle of fixed rows
        r = audit(reads(label, batch, [f"d{i}" for i in range(D)]))
        if r.verdict != "safe": flagged.append((seed, D, batch, n, [c.finding for c in r.checks if c.finding]))
    assert len(flagged) <= 2, flagged


@settings(max_examples=40, deadline=None)
@given(st.integers(3, 40), st.lists(st.integers(1, 60), min_size=3, max_size=3), st.integers(0, 5), st.integers(30, 400))
def test_the_fixes_are_safe_at_any_batch_size_and_weights(batch, w, seed, steps):
    m = manifest()
    for order in (RoundRobinOrder(m, batch, 15, seed), InterleavedOrder(m, batch, 15, seed, dict(zip(m.domains, w, strict=True)))):
        r = audit(order, steps)
        assert r.verdict == "safe" and r.exit_status == 0 and not r.advice and not r.shocks, (order, [c.finding for c in r.checks if c.finding])


# ---- what is not ----

@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([4, 12, 16]), st.sampled_from([(0,), (0, 70), (0, 45, 90)]))
def test_contiguous_orders_are_dangerous_and_their_shocks_foretold(seed, batch, restarts):
    order = ContiguousOrder(manifest(), batch, 15, seed, restarts)
    r = audit(order, 150)
    assert r.verdict == "dangerous" and r.exit_status == 1 and r.advice
    at, length = r.stats["run"]["first_step"], r.stats["run"]["rows"]
    assert length >= 200 and at < 150
    # every boundary after a block of ten steps is foretold, with its shards, and nothing else is
    want, last = [], 0
    for b in order.boundaries(0, 150):
        row = b.step * batch + b.row
        if row - last >= 10 * batch: want.append((b.step, b.row, order.index.paths[b.before], order.index.paths[b.after]))
        last = row
    assert [(s["step"], s["row"], s["shard_before"], s["shard_after"]) for s in r.shocks] == want


def test_the_published_step():
    "A 200M-token shard of 2,049-token rows, 256 rows a step, read from a resume at step 6000: the log's step 6382."
    m = manifest(2, 200_000_000)
    order = ContiguousOrder(m, 256, 2048, plan=[0, 2], restarts=(0, 6000))
    shock = audit(order, 400, start=6000).shocks[0]
    assert shock["step"] + 1 == 6382 and (shock["before"], shock["after"]) == ("code", "math")


@pytest.mark.parametrize("rule, window, verdict", [
    ("none", 0, "dangerous"), ("shards", 0, "dangerous"), ("within", 0, "dangerous"), ("buffer", 1000, "dangerous"), ("buffer", 10_000, "flagged"),
    ("window", 8192, "flagged"), ("blocks", 16 * 64, "dangerous"), ("window", 1 << 18, "safe"), ("buffer", 1 << 18, "safe"), ("rows", 0, "safe")])
def test_rules_of_known_loaders(rule, window, verdict):
    "16 shards of one of 4 domains, 32,768 rows, batches of 64: as measured on the real loaders."
    names, sizes = [f"d{i % 4}/shard_{i:03d}" for i in range(16)], [2048] * 16
    for seed in range(3):
        r = audit(read_rule(names, sizes, 64, rule, window, seed))
        assert r.verdict in {"flagged": ("warning", "dangerous")}.get(verdict, (verdict,)), (seed, [c.finding for c in r.checks if c.finding])
    s = r.stats
    if (rule, window) == ("buffer", 1000):  # a real Hugging Face shuffle buffer of 1000: 5.3 % of batches, dispersion 36.9, lag 1 0.98
        assert .02 < s["mono"]["share"] < .12 and 30 < s["dispersion"]["value"] < 45 and s["autocorrelation"]["1"] > .95
    if (rule, window) == ("buffer", 10_000):  # of 10,000: no such batch, dispersion 4.1, lag 1 0.76
        assert s["mono"]["share"] == 0 and 2 < s["dispersion"]["value"] < 10 and .6 < s["autocorrelation"]["1"] < .95


def test_weak_permutations_are_flagged():
    N = 65_536
    lcg = np.arange(N) * 5 % N * 8 // N       # sorted by domain, read with a small stride: sweeps through the corpus
    assert "strongest rhythm" in findings(audit(reads(lcg, 64))) or audit(reads(lcg, 64)).verdict == "dangerous"
    rng = np.random.default_rng(0)
    anti = np.concatenate([rng.permutation(np.repeat([0, 1], [20, 44] if t % 2 else [44, 20])) for t in range(500)])
    f = findings(audit(reads(anti, 64)))
    assert "autocorrelation, lags 1 2 4" in f and "strongest rhythm" in f and f["strongest rhythm"].finding.endswith("2 steps")


def test_slow_drift_is_found_though_no_batch_looks_odd():
    rng = np.random.default_rng(1)
    p = np.linspace(.8, .2, 2000)
    label = (rng.random((2000, 64)) > p[:, None]).astype(int).ravel()
    r = audit(reads(label, 64))
    assert r.verdict == "warning" and r.stats["mono"]["steps"] == 0 and r.stats["run"]["steps"] == 0
    assert {"autocorrelation, lags 1 2 4", "largest shift, 1000 steps"} <= set(findings(r))


def test_weights_that_were_not_kept_and_domains_that_were_dropped():
    rng = np.random.default_rng(2)
    order = reads(rng.choice(3, 64 * 800, p=[.52, .28, .2]), 64, ["code", "math", "web"])
    assert audit(order).verdict == "safe"
    r = audit(order, weights={"code": .5, "math": .3, "web": .2})
    assert r.verdict == "warning" and "ends 2.0% from its weight" in findings(r)["furthest from the mix"].finding.replace("1.9", "2.0").replace("2.1", "2.0")
    dropped = reads(rng.choice(2, 64 * 800), 64, ["code", "math"])
    dropped.domains = ("code", "math", "web")
    assert "'web' is never read" in findings(audit(dropped, weights={"code": .499, "math": .499, "web": .002}))["furthest from the mix"].finding
    with pytest.raises(UserError, match="'code' is read but its weight is 0"): audit(order, weights={"code": 0, "math": 1, "web": 1})


def test_a_domain_that_has_a_weight_and_no_row():
    "Its name is in no batch, so that only the weights know of it: a finding, and the worse the more of the mix it is."
    rng = np.random.default_rng(3)
    for share, verdict in ((.1, "warning"), (.6, "dangerous"), (0, "safe")):
        r = audit_batches(({"d": rng.choice(["code", "math"], 32).tolist()} for _ in range(200)), "d", weights={"code": (1 - share) / 2, "math": (1 - share) / 2, "web": share})
        assert r.verdict == verdict and (share == 0) == (not any("'web' is never read" in c.finding for c in r.checks)), r.checks
        json.dumps(r.to_dict(), allow_nan=False)
        assert r.svg() and r.picture()
    rows = read_rule(["code/0", "math/0"], [500, 500], 10, "rows")
    assert "'a', 'b' are never read" in [c.finding for c in audit(rows, weights={"code": 1, "math": 1, "a": 1, "b": 1}).checks]
    with pytest.raises(UserError, match="'math' has no weight"): audit(rows, weights={"code": 1, "maths": 1})


def test_restarts_that_lose_the_place():
    m = manifest()
    for order in (ContiguousOrder(m, 12, 15, restarts=(0, 50, 100)), RoundRobinOrder(m, 12, 15, restarts=(0, 50, 100))):
        r = audit(order, 150)
        assert r.stats["repeats"]["early"] == pytest.approx(2 / 3) and r.stats["repeats"]["most_reads"] == 3 and r.stats["repeats"]["min_gap"] == 50
        assert "re-read while others wait" in findings(r) and any("order.state" in a for a in r.advice)
    whole = audit(InterleavedOrder(m, 12, 15), 1500).stats["repeats"]  # 2.5 epochs, and nothing before its time
    assert whole["early"] == 0 and whole["share"] == pytest.approx(.6)


def test_a_planned_change_of_the_mix_is_a_warning_that_says_so():
    m = manifest()
    r = audit(InterleavedOrder(m, 12, 15, weights=[(0, {"code": 8, "math": 1, "web": 1}), (200, {"code": 1, "math": 8, "web": 1})]), 400)
    assert r.verdict == "warning" and all("schedule itself changes 70% of the mix at step 200" in f.finding for f in findings(r).values())


def test_the_switch_is_what_makes_it_safe():
    m = manifest()
    mended = switch(ContiguousOrder(m, 12, 15, 3), 200, InterleavedOrder(m, 12, 15))
    assert audit(mended, 200).verdict == "dangerous" and audit(mended, 200, start=200).verdict == "safe"
    assert max(s["step"] for s in audit(mended, 400).shocks) <= 200


# ---- numbers ----

def test_numbers_of_a_hand_made_order():
    #       step 0     step 1     step 2     step 3
    label = [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 0, 1, 0, 1]
    r = reads(label, 4, ["a", "b"])
    r.row_tokens, r.target = 10, [(0, np.array([.5, .5]))]
    s = measure(r)
    assert r.counts().tolist() == [[4, 0], [2, 2], [0, 4], [2, 2]]
    assert (s["run"]["rows"], s["run"]["steps"], s["run"]["tokens"], s["run"]["domain"], s["run"]["first_step"], s["run"]["last_step"]) == (6, 1, 60, "a", 0, 1)
    assert s["mono"]["share"] == .5 and s["mono"]["usual"] == pytest.approx(2 * .5**4)
    assert s["entropy"]["min"] == 0 and s["entropy"]["mean"] == pytest.approx(.5)
    assert s["dispersion"]["value"] == pytest.approx((4 + 4) / 4)  # z^2 sums to 4 in steps 0 and 2, and to 0 in the others
    assert s["autocorrelation"] == pytest.approx({"1": 0, "2": -.5, "4": 0})
    assert s["prefix"]["rows"] == 2 and s["prefix"]["final"] == 0


def test_shift_names_the_step():
    label = np.random.default_rng(0).integers(0, 2, (100, 32))
    label[60:] += 1
    s = measure(reads(label.ravel(), 32))["shifts"]
    assert s["10"]["step"] == 60 and s["50"]["value"] == pytest.approx(.4, abs=.1) and "200" not in s


def test_following_some_rows_estimates_what_following_all_would(monkeypatch):
    order = ContiguousOrder(manifest(40), 12, 15, restarts=(0, 300, 500))
    full = audit(order, 900).stats["repeats"]
    monkeypatch.setattr("shohin.audit.KEEP_IDS", 3000)
    r = audit(order, 900)
    assert r.reads.id_every == 4 and len(r.reads.row_id) < 4000 and any("one row in 4" in n for n in r.notes)
    part = r.stats["repeats"]
    assert part["share"] == pytest.approx(full["share"], abs=.05) and part["early"] == pytest.approx(full["early"], abs=.05)


# ---- what to do ----

def test_skip_ranges_mean_the_same_steps_in_both_trainers():
    r = audit(ContiguousOrder(manifest(), 12, 15, 3), 150)
    steps = {t for a, b in r.skip["steps"] for t in range(a, b)}
    olmo = json.loads(r.skip["olmo_core"].split("=", 1)[1].strip("'").replace("start", '"start"').replace("stop", '"stop"'))
    assert {t for x in olmo for t in range(x["start"], x["stop"])} == {t + 1 for t in steps}  # StepSkipRange: from 1, stop excluded
    flags = subprocess.run(["bash", "-c", "echo " + r.skip["megatron"]], capture_output=True, text=True, check=True).stdout.split()
    assert flags[0] == "--iterations-to-skip" and set(map(int, flags[1:])) == {t + 1 for t in steps}
    counts = r.reads.counts()
    assert steps == {t for a, b in r.skip["steps"] for t in range(a, b) if counts[t].max() == 12} and len(steps) > 130
    assert r.skip["share"] == len(steps) / 150 and "no cure" in r.advice[-1]
    assert any(r.skip["first_olmo_core"] in a and r.skip["first_megatron"] in a for a in r.advice)


def test_one_rogue_shard_in_a_mixed_order_can_be_skipped():
    rng = np.random.default_rng(4)
    mixed = [rng.integers(0, 3, 12 * n + k) for n, k in ((200, 5), (300, 0))]
    label = np.concatenate([mixed[0][:-1], [1], np.full(12 * 40, 2), [1], mixed[1][1:]])
    r = audit(reads(label, 12))
    assert r.verdict == "dangerous" and r.skip["steps"] == [[201, 240]] and r.skip["olmo_core"] == "--trainer.steps_to_skip='[{start: 202, stop: 241}]'"
    assert [s["step"] for s in r.shocks] == [240] and not any("no cure" in a for a in r.advice)
    kept = np.concatenate([label[:201 * 12], label[240 * 12:]])
    assert audit(reads(kept, 12)).verdict != "dangerous"


def test_the_advised_order_is_safe():
    r = audit(ContiguousOrder(manifest(), 12, 15, 3), 150)
    spec = json.loads(next(a for a in r.advice if a.startswith("mix by row")).split(": ", 1)[1].split(";")[0])
    assert audit(InterleavedOrder(manifest(), 12, 15, weights=spec["weights"]), 150).verdict == "safe"


def test_result_is_json_and_its_pictures_are_safe():
    evil = ["\x1b[31mred\x07", "<script>alert(1)</script>&", "[bold]web[/bold]"]
    label = np.repeat([0, 1, 2, 0, 1, 2], 400)
    r = audit(reads(label, 12, evil))
    d = json.loads(json.dumps(r.to_dict(), allow_nan=False))
    assert d["verdict"] == "dangerous" and d["limits"] == LIMITS and len(d["shocks"]) == 5
    out = io.StringIO()
    Console(file=out, width=120).print(r.render())
    text = out.getvalue()
    assert "\x1b" not in text and "\x07" not in text and "[bold]web[/bold]" in text and "verdict: dangerous" in text and "What to do now" in text
    svg = r.svg()
    ET.fromstring(svg)
    assert "<script" not in svg and "\x1b" not in svg
    lines = r.picture(60, 8).split("\n")
    assert len(lines) == 10 and all(len(line) == 60 for line in lines[:8])
    assert lines[0][0] == lines[7][0] == "█" and lines[0][12] == "░"


def test_one_domain_is_a_note_and_not_a_verdict():
    r = audit(reads(np.zeros(400, int), 4))
    assert r.verdict == "safe" and "no mix to check" in r.notes[0]
    r.svg(), r.picture(), Console(file=io.StringIO()).print(r.render())


# ---- other loaders ----

def write_log(path, order, steps, domain=False):
    with open(path, "w") as f:
        f.write("step,shard,offset,length" + (",domain\n" if domain else "\n"))
        for t in range(steps):
            for s in order.spans(t): f.write(f"{t},{order.index.paths[s.shard]},{s.start},{s.stop - s.start}" + (f",{s.domain}\n" if domain else "\n"))


@pytest.mark.parametrize("form", ["csv", "csv with domain", "parquet"])
def test_a_log_gives_the_same_audit_as_the_order(tmp_path, form):
    order = ContiguousOrder(manifest(), 12, 15, 3, restarts=(0, 60))
    path = tmp_path / "order.csv"
    write_log(path, order, 150, "domain" in form)
    if form == "parquet":
        csv, parquet = pytest.importorskip("pyarrow.csv"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(csv.read_csv(path), path := tmp_path / "order.parquet")
    ours, theirs = audit(order, 150), audit(read_log(path))
    assert theirs.verdict == "dangerous" and theirs.shocks == ours.shocks and theirs.stats["tokens"] == ours.stats["tokens"]
    for k in ("rows", "steps", "domain", "first_step"): assert theirs.stats["run"][k] == ours.stats["run"][k]
    for k in ("share", "most_reads", "min_gap", "median_gap"): assert theirs.stats["repeats"][k] == ours.stats["repeats"][k]
    late = audit(read_log(path), steps=50, start=100)
    assert late.stats["first_step"] == 100 and late.stats["steps"] == 50 and [(s["step"], s["shard_after"]) for s in late.shocks] == [(s["step"], s["shard_after"]) for s in ours.shocks if s["step"] >= 110]


@pytest.mark.parametrize("text, what", [
    ("", "line 1: no column 'step'"), ("step,shard,offset\n1,a,0\n", "line 1: no column 'length'"), ("step,shard,offset,length\n", "no rows"),
    ("step,shard,offset,length\n1,a,0,5\n\n2,a,zero,5\n", "line 4: offset 'zero' is not an integer"), ("step,shard,offset,length\n1,a,0\n", "line 2: 3 fields"),
    ("step,shard,offset,length\n1,a,-1,5\n", "line 2: offset -1 is out of range"), ("step,shard,offset,length\n" + "9" * 30 + ",a,0,5\n", "out of range"),
    ("step,shard,offset,length\n5,a,0,5\n4,a,5,5\n", "line 3: step goes back from 5 to 4"), ('step,shard,offset,length\n1,"a\n', "line 2"),
    ("step,shard,offset,length\n1,a,1e3,5\n", "'1e3' is not an integer"), ("step,shard,offset,length\n1,a," + "9" * 5000 + ",5\n", "line 2")])
def test_a_bad_log_is_one_line(tmp_path, text, what):
    (tmp_path / "x.csv").write_text(text)
    with pytest.raises(UserError) as e: audit(read_log(tmp_path / "x.csv"))
    assert what in str(e.value) and "\n" not in str(e.value) and "x.csv" in str(e.value)


def test_logs_as_spreadsheets_write_them(tmp_path):
    path = tmp_path / "order.csv"
    path.write_bytes(b'\xef\xbb\xbf"length","x","offset","step","shard","domain"\r\n' + b"".join(b'9,,%d,%d,"a,b",%s\r\n\r\n' % (9 * i, i // 4, b"xy"[i % 2:][:1]) for i in range(200)))
    r = read_log(path)
    assert r.domains == ("x", "y") and len(r.steps) == 50 and r.shard_of(0) == "a,b" and audit(r).verdict == "safe"
    assert read_log(path, domain_of={"a,b": "z"}).domains == ("z",)         # what is asked for goes before a column


def test_a_log_of_bytes_that_are_no_text_or_no_parquet(tmp_path):
    blob = np.random.default_rng(0).bytes(5000)
    for name in ("x.csv", "x.parquet"):
        (tmp_path / name).write_bytes(blob)
        with pytest.raises(UserError, match=name): read_log(tmp_path / name)
    with pytest.raises(UserError, match="no such file"): read_log(tmp_path / "none.csv")
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    good = {"step": [0, 1], "shard": ["a", "b"], "offset": [0, 0], "length": [4, 4]}
    for change, what in (({"step": [0., 1.]}, "'step' holds double"), ({"offset": [0, -5]}, "row 1: offset -5"), ({"shard": ["a", None]}, "row 1: shard is empty"), ({"length": None}, "no column 'length'")):
        parquet.write_table(pa.table({k: v for k, v in {**good, **change}.items() if v}), tmp_path / "x.parquet")
        with pytest.raises(UserError, match=what): read_log(tmp_path / "x.parquet")


def test_a_real_megatron_blend():
    "Written by megatron-core 0.16.1 for weights 0.5 / 0.3 / 0.2."
    r = read_megatron(DATA, 10)
    assert r.domains == ("code", "math", "web") and r.label[:10].tolist() == [0, 1, 2, 0, 1, 0, 2, 0, 1, 0] and len(r.steps) == 20
    result = audit(r)
    assert result.verdict == "safe" and result.stats["prefix"]["rows"] < 1.5
    assert result.stats["domains"]["math"]["share"] == pytest.approx(.3)


def test_a_real_megatron_cache_of_one_merged_file():
    shuffle = next(DATA.glob("*-GPTDataset-train-shuffle_index.npy"))
    with pytest.raises(UserError, match="give documents"): read_megatron(shuffle, 10)
    r = read_megatron(shuffle, 10, documents={"first": 15, "second": 25})
    sample, document = (np.load(str(shuffle).replace("shuffle", k)) for k in ("sample", "document"))
    want = [int(document[sample[i][0]] >= 15) for i in np.load(shuffle)]
    assert r.label.tolist() == want[:len(r.label)] and audit(r).verdict == "safe"
    with pytest.raises(UserError, match="-5 documents of 'first'"): read_megatron(shuffle, 10, documents={"first": -5, "second": 45})
    with pytest.raises(UserError, match="but there are 20 documents"): read_megatron(shuffle, 10, documents={"first": 10, "second": 10})


def test_hostile_megatron_indices(tmp_path):
    path = tmp_path / "a-BlendedDataset-train-dataset_index.npy"
    good = (DATA / "aa6a2351076a85d79470e64d22f1184e-BlendedDataset-train-dataset_index.npy").read_bytes()
    def load(): return read_megatron(path, 10)
    for blob in (b"", good[:40], good[:200], b"\x93NUMPY" + b"\xff" * 100, good.replace(b"(200,)", b"(20,7)"), good.replace(b"(200,)", b"(999999999999,)"), good.replace(b"<i2", b"<f2"), good.replace(b"<i2", b"|O ")):
        path.write_bytes(blob)
        with pytest.raises(UserError, match=r"dataset_index\.npy"): load()
    np.save(path, np.array([0, 1, -1, 2], np.int16))
    with pytest.raises(UserError, match=r"entry 2 \(byte 132\) is -1"): load()
    np.save(path, np.zeros(40, np.int16))
    about = tmp_path / "a-BlendedDataset-train-description.txt"
    for text in ("", "[]", '{"datasets": 3, "weights": []}', '{"datasets": [{"dataset_path": "a"}], "weights": [0]}', '{"datasets": [{"dataset_path": "a"}], "weights": [NaN]}', "[" * 100_000):
        about.write_text(text)
        with pytest.raises(UserError, match=r"description\.txt"): load()
    about.unlink()
    assert load().domains == ("data set 0",)
    (tmp_path / "b-BlendedDataset-train-dataset_index.npy").write_bytes(good)
    with pytest.raises(UserError, match="several"): read_megatron(tmp_path, 10)
    with pytest.raises(UserError, match="less than one batch"): read_megatron(path, 100)


def mosaic(folders, n=4, samples=500):
    return {"version": 2, "shards": [{"samples": samples, "raw_data": {"basename": f"{f}shard.{i:05d}.mds"}} for f in folders for i in range(n)]}


def test_indices_of_mosaic_and_litdata(tmp_path):
    (tmp_path / "index.json").write_text(json.dumps(mosaic(["code/", "math/"])))
    assert audit(read_index(tmp_path, 16)).verdict == "safe"
    assert audit(read_index(tmp_path / "index.json", 16, "within")).verdict == "dangerous"
    for d in ("code", "math"):
        (tmp_path / d).mkdir()
        (tmp_path / d / "index.json").write_text(json.dumps({"chunks": [{"chunk_size": 1, "dim": 512 * 300, "filename": f"chunk-0-{i}.bin"} for i in range(4)]}))
    r = audit(read_index({d: tmp_path / d for d in ("code", "math")}, 16, block_size=512))
    assert r.verdict == "dangerous" and set(r.stats["domains"]) == {"code", "math"} and r.stats["rows"] == 2400
    two_epochs = audit(read_index({d: tmp_path / d for d in ("code", "math")}, 16, "rows", block_size=512, steps=300))
    assert two_epochs.stats["steps"] == 300 and two_epochs.stats["repeats"]["share"] == pytest.approx(.5)


@pytest.mark.parametrize("text, what", [
    ("", "line 1 column 1: not JSON"), ('{"shards": [\n{"samples": }]}', "line 2 column"), ("[]", "expected an object"), ('{"shards": []}', "not empty"), ('{"shards": {"a": 1}}', "expected a list"),
    ('{"shards": [3]}', r"shards\[0\] is not an object"), ('{"shards": [{"samples": 3}]}', "has no file name"), ('{"shards": [{"samples": 3, "raw_data": [1]}]}', "has no file name"),
    ('{"shards": [{"samples": 1e3, "raw_data": {"basename": "a"}}]}', "number of rows is 1000.0"), ('{"shards": [{"samples": true, "raw_data": {"basename": "a"}}]}', "is True"),
    ('{"shards": [{"samples": 99999999999999999999, "raw_data": {"basename": "a"}}]}', "number of rows is 9999"), ('{"shards": [{"samples": 3, "raw_data": {"basename": "a"}}]}', "less than one batch"),
    (json.dumps({"shards": [{"samples": 3, "raw_data": {"basename": "a"}}] * 2}), "listed twice"), ("[" * 200_000, "nested too deep"), ('{"chunks": [{"filename": "a", "dim": 100}]}', "give block_size")])
def test_hostile_index_json(tmp_path, text, what):
    (tmp_path / "index.json").write_text(text)
    with pytest.raises(UserError, match=what) as e: read_index(tmp_path / "index.json", 16)
    assert "\n" not in str(e.value)


json_values = st.recursive(st.none() | st.booleans() | st.integers(-5, 10**20) | st.floats() | st.text(max_size=5), lambda x: st.lists(x, max_size=3) | st.dictionaries(
    st.sampled_from(["shards", "chunks", "samples", "raw_data", "zip_data", "basename", "filename", "chunk_size", "dim"]), x, max_size=4), max_leaves=12)


@settings(max_examples=150, deadline=None)
@given(json_values, st.sampled_from([None, 4]))
def test_any_json_is_an_audit_or_one_line(tmp_path_factory, value, block):
    path = tmp_path_factory.getbasetemp() / "fuzz.json"
    path.write_text(json.dumps(value))
    try: audit(read_index(path, 2, block_size=block, steps=5))
    except UserError as e: assert "\n" not in str(e)


def test_a_huge_declared_corpus_costs_no_memory(tmp_path):
    (tmp_path / "index.json").write_text(json.dumps(mosaic(["code/", "math/"], 1000, 100_000_000)))  # 2 x 10^11 rows declared
    for rule in RULES: assert len(read_index(tmp_path, 64, rule, window=10_000, steps=200).label) == 12_800
    assert any("first 131,072 steps" in n for n in read_index(tmp_path, 64, "shards").notes)
    with pytest.raises(UserError, match="too many"): read_index(tmp_path, 64, "rows", steps=10**9)


def test_llmc_rule():
    m = manifest(tokens=4000)
    r = read_llmc(m, 16, 15, shuffle=False)
    assert len(r.label) == 36 * (3999 // 240) * 16 and audit(r).verdict == "dangerous"
    shuffled = audit(read_llmc(m, 16, 15, shuffle=True))
    assert shuffled.verdict == "dangerous" and shuffled.stats["mono"]["share"] == 1 and shuffled.stats["repeats"]["share"] == 0


def test_any_iterable_of_batches():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    forms = [lambda d: {"source": torch.tensor(d)}, lambda d: {"source": np.array(d)}, lambda d: {"source": [f"d{i}" for i in d]}, lambda d: {"source": tuple(map(str, d))}]
    for form in forms:
        assert audit_batches((form(rng.integers(0, 3, 16).tolist()) for _ in range(120)), "source").verdict == "safe"
        r = audit_batches((form([t // 30 % 3] * 16) for t in range(10**9)), "source", steps=120)
        assert r.verdict == "dangerous" and [s["step"] for s in r.shocks] == [30, 60, 90]
    assert audit_batches(((x, x % 2) for x in [np.arange(8)] * 50), lambda b: b[1]).verdict == "safe"
    assert len(read_batches([{"d": []}, {"d": ["a", "b"]}, {"d": "a"}], "d").steps) == 3
    for batches, what in (([], "no batches"), ([{"x": 1}], "batch 0 gives no domain"), ([3], "batch 0 gives no domain")):
        with pytest.raises(UserError, match=what): audit_batches(batches, "domain")


def test_questions_that_make_no_sense():
    m = manifest()
    for ask, what in ((lambda: audit(ContiguousOrder(m, 12, 15)), "how many steps"), (lambda: audit([1, 2], 5), "cannot audit a list"), (lambda: audit(ContiguousOrder(m, 12, 15), 0), "at least 1"),
                      (lambda: audit(ContiguousOrder(m, 12, 15), 10**9), "too many for one audit"), (lambda: audit(read_order(ContiguousOrder(m, 12, 15), 10), 5, start=50), "no rows from step 50 on for 5 steps"),
                      (lambda: read_rule(["a/b"], [50], 5, "random"), "unknown shuffle"), (lambda: read_rule(["a/b"], [50], 5, "buffer"), "needs window"), (lambda: read_rule(["a/b"], [50], 0, "rows"), "at least 1"),
                      (lambda: audit(InterleavedOrder(m, 3, 15), 20_000_000), "too many numbers for one audit: at most 11,184,810 steps"),
                      (lambda: read_llmc(m, 0, 15), "batch size must be at least 1"), (lambda: read_llmc(m, 12, 0), "seq_len must be at least 1"),
                      (lambda: read_rule([], [], 4, "rows"), "no shards"), (lambda: read_rule(["a/b"], [0], 4, "rows", steps=5), "less than one batch"), (lambda: read_rule(["a/b"], [50], 4, "rows", steps=-1), "at least 1"),
                      (lambda: read_rule(["a/b"], [50], 4, "window", 10**12), "too large"), (lambda: audit(read_order(ContiguousOrder(m, 12, 15), 10), -3), "at least 1"), (lambda: audit(read_order(ContiguousOrder(m, 12, 15), 10), weights=[1]), "dict by domain"),
                      (lambda: audit_batches(5, "d"), "an iterable of batches"), (lambda: audit_batches([{"d": None}], "d"), "None as its domain")):
        with pytest.raises(UserError, match=what): ask()


def test_the_audit_needs_no_torch():
    code = "import sys, shohin.audit; sys.exit(any(m in sys.modules for m in ('torch', 'pandas', 'matplotlib', 'pyarrow', 'rich')))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_find_shocks_is_bounded():
    label = np.tile(np.repeat([0, 1], 20), 400)
    assert len(find_shocks(reads(label, 2), measure(reads(label, 2)))) == 100
