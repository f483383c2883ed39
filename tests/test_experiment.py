"Sweeps, records, claims: what an experiment rests on."
import json
import math
import subprocess

import numpy as np
import pytest

from shohin import experiment as X
from shohin.experiment import Arm, CliffArms, Run, Sweep, base_config, load_profile, make_record, repo_root
from shohin.shards import UserError
from shohin.train import Trainer

ROOT = repo_root()


@pytest.fixture(scope="module")
def small():
    "The smoke profile, shorter."
    return dict(load_profile("smoke"), base_steps=16, restart_steps=8, block_steps=8, recovery_steps=8, probe_every=4)


def sweep(small, data, **kw):
    c = CliffArms(small, 1, data)
    return Sweep("cliff", small, c.pick("interleaved", "block", "no-guard"), [1], base_config(small), data=data, **kw)


@pytest.fixture(scope="module")
def done(small, tmp_path_factory):
    data = tmp_path_factory.mktemp("data")
    s = sweep(small, data)
    return data, s, s.run()


def test_arms_fork_where_they_part(done, small):
    "The unguarded arm begins at the boundary, from the block's checkpoint, and its history is the block's."
    data, s, runs = done
    at = small["base_steps"] + small["block_steps"]
    child, parent = runs["no-guard", 1], runs["block", 1]
    assert child.start == at and child.config["parent"]["run"] == parent.key
    steps, loss = child.history()
    assert steps.tolist() == list(range(at + small["recovery_steps"])) and np.array_equal(loss[:at], parent.loss)
    reads = [next(iter(d)) for d in child.domains]
    assert set(reads) == {small["new_domain"]} and {next(iter(d)) for d in parent.domains} == {small["old_domain"]}


def test_finished_runs_are_not_trained_again(done, small, monkeypatch):
    data, _, runs = done
    monkeypatch.setattr(Trainer, "_train", lambda *_: pytest.fail("trained again"))
    again = sweep(small, data).run()
    assert {k: v.key for k, v in again.items()} == {k: v.key for k, v in runs.items()}


def test_a_run_folder_says_what_it_read(done):
    data, s, runs = done
    for r in runs.values():
        saved = json.loads((s.runs / r.key / "order.json").read_text())
        assert saved["manifest_hash"] == r.config["manifest_hash"] and len(saved["shards"]) == 4 * len(s.manifest(next(iter(s.manifests))).shards)


def test_records_stand_in_for_run_folders(done, small, tmp_path, monkeypatch):
    "With the committed records and no run folder nothing is trained, and the numbers are the same."
    data, s, runs = done
    for r in runs.values(): (tmp_path / f"{r.key}.json").write_text(json.dumps(r.record))
    monkeypatch.setattr(Trainer, "_train", lambda *_: pytest.fail("trained"))
    again = sweep(small, data, runs=tmp_path / "runs", records=tmp_path).run()
    for job, r in runs.items():
        assert again[job].record == r.record


def test_a_child_needs_its_parents_checkpoint(done, small, tmp_path):
    "A parent known only by its record is trained again when a new arm must fork from it."
    data, s, runs = done
    records = tmp_path / "records"
    records.mkdir()
    block = runs["block", 1]
    (records / f"{block.key}.json").write_text(json.dumps(block.record))
    again = sweep(small, data, runs=tmp_path / "runs", records=records).run()
    assert (tmp_path / "runs" / block.key / "result.json").exists()
    assert again["no-guard", 1].result["weights"] == runs["no-guard", 1].result["weights"]


def test_checkpoint_of_a_run_known_by_its_record(done, small, tmp_path):
    "What is measured on weights trains just the run that it needs; the runs forked from it stay known."
    data, s, runs = done
    at = small["base_steps"] + small["block_steps"]
    assert s.checkpoint("block", 1, at) == s.runs / runs["block", 1].key                 # here already
    records = tmp_path / "records"
    records.mkdir()
    for r in runs.values(): (records / f"{r.key}.json").write_text(json.dumps(r.record))
    again = sweep(small, data, runs=tmp_path / "runs", records=records)
    again.run()
    folder = again.checkpoint("block", 1, at)
    assert folder == tmp_path / "runs" / runs["block", 1].key and (folder / f"checkpoints/step_{at:08d}").is_dir()
    assert [p.name for p in (tmp_path / "runs").iterdir()] == [folder.name] and set(again.done) == set(runs)
    assert again.done["no-guard", 1].record == runs["no-guard", 1].record
    X.shutil.rmtree(folder / "checkpoints")                                              # cleared away to save space
    assert (again.checkpoint("block", 1, at) / f"checkpoints/step_{at:08d}").is_dir()
    with pytest.raises(UserError, match="'block' keeps no checkpoint of step 3"): again.checkpoint("block", 1, 3)


def test_one_arm_stops_with_arms_missing(done, small):
    data, _, _ = done
    with pytest.raises(UserError, match="arms missing: interleaved/1"): sweep(small, data, only="no-guard", runs=data / "other").run()
    with pytest.raises(UserError, match="unknown arm 'nope'"): sweep(small, data, only="nope")


def test_a_task_trains_its_arm_and_a_report_nothing(done, small, monkeypatch):
    "SHOHIN_TRAIN: what the jobs of a cluster may do (`shohin.submit`)."
    data, s, runs = done
    assert set(sweep(small, data, only="no-guard").run()) == set(runs)            # the cache has all: one arm goes on like the whole
    assert sweep(small, data).missing() == [] and sweep(small, data, runs=data / "none").missing() == [(n, 1) for n in s.by]
    monkeypatch.setattr(Trainer, "_train", lambda *_: pytest.fail("trained"))
    monkeypatch.setenv("SHOHIN_TRAIN", "no")
    assert set(sweep(small, data).run()) == set(runs)
    with pytest.raises(UserError, match=r"^arms missing: interleaved/1, block/1, no-guard/1$"): sweep(small, data, runs=data / "none").run()
    monkeypatch.setenv("SHOHIN_TRAIN", "arm")
    with pytest.raises(UserError, match=r"^no arms missing"): sweep(small, data, only="no-guard").run()
    with pytest.raises(UserError, match="no-guard forks from block/1, which is not finished"): sweep(small, data, only="no-guard", runs=data / "none").run()


def test_a_task_does_not_make_its_parent_anew(done, small, tmp_path, monkeypatch):
    "Two arms would do it at the same time. The plan of a submission sees to it before."
    data, s, runs = done
    X.shutil.copytree(data / "runs", tmp_path / "runs")
    X.shutil.rmtree(tmp_path / "runs" / runs["no-guard", 1].key)
    X.shutil.rmtree(tmp_path / "runs" / runs["block", 1].key / "checkpoints")
    from shohin.submit import _look
    again = sweep(small, data, runs=tmp_path / "runs")
    assert _look(again) == dict(missing=[("no-guard", 1)], again={("block", 1): runs["block", 1].key})
    monkeypatch.setenv("SHOHIN_TRAIN", "arm")
    with pytest.raises(UserError, match="the checkpoint of block/1 that no-guard forks from is gone; submit again"): sweep(small, data, only="no-guard", runs=tmp_path / "runs").run()
    assert (tmp_path / "runs" / runs["block", 1].key / "result.json").exists()
    monkeypatch.setenv("SHOHIN_TRAIN", "no")
    whole = sweep(small, tmp_path, runs=data / "runs")
    whole.data = data
    whole.run()
    whole.runs = tmp_path / "runs"
    with pytest.raises(UserError, match="the checkpoint of block/1 at step 24 is gone, and nothing may be trained here"): whole.checkpoint("block", 1, 24)


def test_children_run_in_processes_and_fail_in_one_line(small, tmp_path):
    "The child launcher gives the same run; a child that fails is named with its last words."
    prof = dict(small, launcher="child", jobs=2)
    c = CliffArms(prof, 1, tmp_path)
    arms = [Arm("a", order=dict(kind="interleaved"), guard="none", steps=6), Arm("b", order=dict(kind="interleaved"), guard="seed", steps=6)]
    runs = Sweep("x", prof, arms, [1], base_config(prof), data=tmp_path).run()
    assert runs["a", 1].result["weights"] == runs["b", 1].result["weights"] and runs["a", 1].key != runs["b", 1].key
    broken = [Arm("c", order=dict(kind="interleaved"), guard="seeed", steps=6)]
    with pytest.raises(UserError, match=r"x/c/1 ended with status 2: unknown guard 'seeed'"): Sweep("x", prof, broken, [1], base_config(prof), data=tmp_path).run()
    assert c.manifest.hash


def test_a_profile_with_ranks_starts_torchrun(small, tmp_path):
    "The same arms on two ranks: other keys, losses as on one; a fork of them; what cannot run is still one line."
    prof = dict(small, launcher="child", jobs=1, ranks=2, micro_batch=8)
    arms = [Arm("a", order=dict(kind="interleaved"), guard="none", steps=6, keep=[3]), Arm("b", "a", 3, order=dict(kind="interleaved"), guard="seed", steps=6)]
    many = Sweep("x", prof, arms, [1], base_config(prof), data=tmp_path).run()
    one = Sweep("x", dict(prof, launcher="inline"), [Arm("a", order=dict(kind="interleaved"), guard="none", steps=6)], [1], base_config(small), data=tmp_path).run()
    assert many["a", 1].result["ranks"] == 2 and many["b", 1].start == 3 and many["a", 1].key != one["a", 1].key
    assert np.abs(many["a", 1].loss - one["a", 1].loss).max() < 1e-4 and many["b", 1].result["weights"] == many["a", 1].result["weights"]
    broken = dict(prof, ranks=4)                             # six rows do not divide among four
    with pytest.raises(UserError, match=r"ended with status 1: (rank \d: )?a batch of 6 rows does not divide among 4 ranks"):
        Sweep("x", broken, [Arm("c", order=dict(kind="interleaved"), guard="none", steps=5)], [1], base_config(broken), data=tmp_path).run()


def test_record_is_small_and_exact_enough(done):
    data, s, runs = done
    for r in runs.values():
        folder = s.runs / r.key
        assert len(json.dumps(r.record, separators=(",", ":"))) <= 20_000
        rows = [json.loads(x) for x in (folder / "log.jsonl").read_text().splitlines()]
        assert np.abs(r.loss - [float(x["loss"]) for x in rows]).max() <= 5e-5
        assert r.decision == [x["decision"] for x in rows] and r.domains == [x["domains"] for x in rows]


def test_record_of_a_long_run_still_fits(done, tmp_path):
    data, s, runs = done
    r = runs["block", 1]
    folder = tmp_path / "long"
    folder.mkdir()
    for f in ("config.json", "result.json"): (folder / f).write_text((s.runs / r.key / f).read_text())
    rng = np.random.default_rng(0)
    rows = [dict(step=t, loss=float(rng.normal(2, .2)), grad_norm=float(rng.random()), decision="apply", domains={"code_python": 6}) for t in range(1500)]
    rows[700]["loss"] = "nan"
    (folder / "log.jsonl").write_text("\n".join(map(json.dumps, rows)))
    cfg = json.loads((folder / "config.json").read_text())
    cfg["order"]["weights"] = [[t, dict(code_python=t % 2, tables=1)] for t in range(1500)]
    (folder / "config.json").write_text(json.dumps(cfg))
    long = Run(make_record(folder))
    assert set(long.config["order"]) == {"kind", "sha256"}
    assert len(long.loss) == 1500 and math.isnan(long.loss[700]) and len(json.dumps(long.record, separators=(",", ":"))) <= 20_000


def test_a_host_in_segments_is_one_run_and_its_spike_can_be_aimed_at(small, tmp_path):
    "Forks between segments change nothing; a change may be read off the parent's run; records keep each layer's update."
    u = X.UnstableArms(dict(small, spike_segment=6))
    seen = {}
    def largest(run):
        seen["run"] = run
        return (int(run.step[2:][np.argmax(run.update_norm[2:])]),)
    arms = [*u.host(), u.start("whole", u.end), u.treat("skip", "host-2", u.fork + 2, skip_steps=X.FromParent(largest))]
    s = Sweep("spikes", small, arms, [1], base_config(small), data=tmp_path)
    assert "skip_steps" not in next(r for r in s.planned()["runs"] if r["arm"] == "skip")["config"]
    runs = s.run(); steps, loss = u.host_series(runs, 1)
    assert steps.tolist() == list(range(24)) and np.allclose(loss, runs["whole", 1].loss, atol=1e-3)      # logs of watched runs are rounded alike, sums may differ
    skipped = runs["skip", 1].step[~runs["skip", 1].applied]
    assert skipped.tolist() == list(largest(runs["host-2", 1])) and seen["run"].start == 6
    r = runs["host-2", 1]; n = small["proxy_small"]["n_layer"]
    rows = [json.loads(x) for x in (s.runs / r.key / "log.jsonl").read_text().splitlines()]
    assert r.layer_update_norm.shape == (6, n + 1)
    assert np.allclose(r.layer_update_norm, [x["layer_update_norm"] for x in rows], rtol=.02, atol=2e-3 * r.update_norm.max())
    assert np.allclose(np.linalg.norm(r.layer_update_norm, axis=1), r.update_norm, rtol=.01)


@pytest.mark.parametrize("change, says", [(dict(name="huge"), "unknown profile 'huge'")])
def test_unknown_profile(change, says):
    with pytest.raises(UserError, match=says): load_profile(change["name"])


def test_plan_that_does_not_fit(small, tmp_path):
    c = CliffArms(small, 1, tmp_path)
    with pytest.raises(UserError, match="the corpus has"): c.contiguous((small["old_domain"], 0, 10**6))


# --- claims ------------------------------------------------------------------------------------------------------------
CLAIMS = X.tomllib.loads((ROOT / X.CLAIMS).read_text())


def test_claims_are_complete():
    for id, c in CLAIMS.items():
        assert c["source"] in ("shohin", "marin", "ours"), id
        assert c["quote"] and c["experiment"], id
        if "not_testable" in c: assert c["not_testable"] and "quantity" not in c, id; continue
        assert c["prediction"] and c["quantity"], id
        assert c.get("superseded_by", id) in CLAIMS, id
        lo, hi = c["holds"]
        assert lo <= hi, id
        if "opposite" in c:
            a, b = c["opposite"]
            assert b <= lo or a >= hi, f"{id}: holds and opposite overlap"


def test_few_claims_are_beyond_testing():
    shohin = [c for c in CLAIMS.values() if c["source"] == "shohin"]
    assert sum("not_testable" in c for c in shohin) <= len(shohin) / 4


def published():
    return sorted((ROOT / "reports/results").glob("*.json"))


@pytest.mark.parametrize("path", published(), ids=lambda p: p.stem)
def test_criteria_were_committed_before_the_results(path):
    "The commit that fixed a criterion is an ancestor of the one that the results were made from."
    doc = json.loads(path.read_text())
    if not doc.get("claims") or "commit" not in doc: pytest.skip("no claims")
    shallow = subprocess.run(["git", "rev-parse", "--is-shallow-repository"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    if shallow != "false" or subprocess.run(["git", "cat-file", "-e", doc["commit"]], cwd=ROOT, capture_output=True).returncode: pytest.skip("history is not here")
    assert not doc["dirty"], "results were made from uncommitted code"
    for c in doc["claims"]:
        assert c["criterion_commit"], f"{c['id']}: criterion was not committed"
        assert subprocess.run(["git", "merge-base", "--is-ancestor", c["criterion_commit"], doc["commit"]], cwd=ROOT).returncode == 0, c["id"]


def test_criterion_history_sees_edits(tmp_path):
    "A criterion changed after it was committed is shown, and its commit is the one of the change."
    git = lambda *a: subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@localhost", *a], cwd=tmp_path, check=True, capture_output=True, text=True).stdout.strip()
    git("init", "-q")
    p = tmp_path / X.CLAIMS
    p.parent.mkdir(parents=True)
    claim = lambda lo, note="": f'{note}\n[a]\nexperiment="x"\nsource="ours"\nquote="q"\nprediction="p"\nquantity="k"\nholds=[{lo}, inf]\n'
    heads = []
    for text in (claim(1.5), claim(1.5, "# a remark"), claim(2.0), claim(2.0) + '\n[b]\nexperiment="x"\n'):
        p.write_text(text)
        git("add", ".")
        git("commit", "-qm", "m")
        heads.append(git("rev-parse", "HEAD"))
    h = X.criterion_history("a", tmp_path)
    assert h == dict(commit=heads[2], edits=1)
    p.write_text(claim(3.0))
    assert X.criterion_history("a", tmp_path)["commit"] is None


def test_pages_and_results_agree():
    from shohin.report import check_pages
    if not (ROOT / "reports/index.html").exists(): pytest.skip("nothing published yet")
    assert check_pages(ROOT / "reports") == []
