"The command line as a process: exit statuses, one line for a mistake, JSON and nothing else."
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from shohin.corpus import build_corpus, stdlib_sources

SHOHIN = [sys.executable, "-m", "shohin.cli"]
ENV = dict(os.environ, OMP_NUM_THREADS="1", COLUMNS="100")


def call(*args, cwd=None):
    return subprocess.run([*SHOHIN, *map(str, args)], capture_output=True, text=True, env=ENV, cwd=cwd, timeout=120)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    out = tmp_path_factory.mktemp("data") / "corpus"
    build_corpus(out, sources=stdlib_sources(60_000), shard_tokens=33 * 6 * 10, probe_bytes=2048)
    return out


SIZES = ("--batch-size", 6, "--seq-len", 32)


def one_line(r, *says):
    assert r.returncode == 2, (r.returncode, r.stdout, r.stderr)
    assert r.stdout == "" and len(r.stderr.strip().splitlines()) == 1 and r.stderr.startswith("shohin: "), r.stderr
    for s in says: assert s in r.stderr, r.stderr


def test_scan_audit_peek_speak_json(corpus):
    for args, status in ((("scan", corpus), (0, 1)), (("audit", corpus, *SIZES, "--steps", 200), (1,)), (("audit", corpus, *SIZES, "--steps", 200, "--order", "interleaved"), (0,)),
                         (("peek", corpus, *SIZES, "--step", 7), (0,)), (("doctor",), (0, 1))):
        r = call(*args, "--json")
        assert r.returncode in status, (args, r.stderr)
        assert json.loads(r.stdout), args
        assert call(*args).stdout.strip(), args


def test_audit_names_the_step_of_the_shock(corpus):
    "A contiguous order is dangerous, and the first boundary of its plan is the step that the audit names."
    order = json.dumps(dict(kind="contiguous", plan=[0, 1, 2, 60, 61, 62]))
    doc = json.loads(call("audit", corpus, *SIZES, "--steps", 60, "--order", order, "--json").stdout)
    assert doc["verdict"] == "dangerous" and 30 in [s["step"] for s in doc["shocks"]]


def test_train_resumes_forks_and_says_where(corpus, tmp_path):
    runs = tmp_path / "runs"
    args = ("train", corpus, *SIZES, "--runs", runs, "--steps", 12, "--warmup", 4, "--keep", 6, "--every", 5)
    r = call(*args)
    assert r.returncode == 0, r.stderr
    lines = r.stdout.splitlines()
    assert [x.split()[:2] for x in lines[:-1]] == [["step", "0"], ["step", "5"], ["step", "10"]] and "12 steps, 0 skipped" in lines[-1]
    folder = Path(lines[-1].split(": ")[0])
    again = call(*args, "--json")
    assert json.loads(again.stdout)["folder"] == str(folder)
    fork = call(*args[:-4], "--from", f"{folder.name}@6", "--no-muon", "--fresh-opt", "--gnorm-mult", 8, "--json")
    assert fork.returncode == 0 and json.loads(fork.stdout)["start"] == 6, fork.stderr
    cfg = json.loads((Path(json.loads(fork.stdout)["folder"]) / "config.json").read_text())
    assert cfg["optim"] == dict(no_muon=True) and cfg["fresh_opt"] and dict(guard="gnorm-ratio", ratio=8.) in cfg["guard"]
    rows = json.loads(call("status", runs, "--json").stdout)
    assert len(rows) == 2 and all(x["state"] == "finished" and x["step"] == 12 for x in rows)
    one_line(call(*args, "--from", f"{folder.name}@7"), "has checkpoints at 6")
    peek = json.loads(call("peek", "--run", folder, "--step", 3, "--json").stdout)
    assert len(peek["batches"][0]["rows"]) == 6


def test_mistakes_are_one_line(corpus, tmp_path):
    one_line(call("scan", tmp_path / "nope"), "nope")
    one_line(call("audit", tmp_path), str(tmp_path.name))
    one_line(call("peek", corpus, "--step", 3, "--order", "contigous"), "contigous")
    one_line(call("peek", corpus, "--rank", "1-2"), "r/W")
    one_line(call("train"), "give a manifest")
    one_line(call("train", corpus, "--steps", 3, "--guard", "seeed", "--runs", tmp_path / "r"), "seeed")
    one_line(call("reproduce", "clif"), "unknown experiment 'clif'")
    one_line(call("reproduce", "--profile", "huge"), "unknown profile 'huge'")
    one_line(call("status", tmp_path / "nope"), "nope")
    one_line(call("corpus", tmp_path / "c", "--source", "math"), "DOMAIN=FILE")
    bad = tmp_path / "bad.json"
    bad.write_text("{")
    one_line(call("train", "--config", bad), "bad.json")


def test_a_corpus_from_files_of_ones_own(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(dict(body=f"{i} times {i} is {i * i}, which is what it was when it was last looked at")) for i in range(400)))
    args = ("corpus", tmp_path / "out", "--source", f"sums={tmp_path}/*.jsonl", "--field", "body", "--tokenizer", "bytes", "--shard-tokens", 5000, "--workers", 1)
    r = call(*args, "--json")
    assert r.returncode == 0 and "shard_00000.u16.zst: 5,000 tokens" in r.stderr, r.stderr
    doc = json.loads(r.stdout)
    assert [d["domain"] for d in doc["domains"]] == ["sums"] and doc["domains"][0]["tokens"] > 20_000
    assert json.loads(call(*args, "--json").stdout)["hash"] == doc["hash"]
    one_line(call("corpus", tmp_path / "x", *args[2:4]), "a.jsonl, line 1", "'body'")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "out"]


def test_a_changed_shard_is_refused(corpus, tmp_path):
    import shutil
    copy = tmp_path / "copy"
    shutil.copytree(corpus, copy)
    shard = sorted((copy / "prose").glob("*.zst"))[0]
    first = [s["path"] for s in json.loads((copy / "manifest.json").read_text())["shards"]].index(f"prose/{shard.name}")
    raw = bytearray(shard.read_bytes())
    raw[len(raw) // 2] ^= 1
    shard.write_bytes(raw)
    r = call("train", copy, *SIZES, "--steps", 200, "--runs", tmp_path / "runs", "--order", json.dumps(dict(kind="contiguous", plan=[first])))
    one_line(r, shard.name)
    shard.unlink()
    one_line(call("peek", copy, *SIZES, "--order", json.dumps(dict(kind="contiguous", plan=[first]))), shard.name)
    assert call("scan", copy, "--verify").returncode in (1, 2)


def test_a_resume_on_other_data_names_the_shard(corpus, tmp_path):
    "Same command, but a shard was written anew and the manifest with it: not a silent start at step 0."
    import shutil

    from shohin.shards import Manifest, open_shard, write_shard
    copy, runs = tmp_path / "copy", tmp_path / "runs"
    shutil.copytree(corpus, copy)
    args = ("train", copy, *SIZES, "--runs", runs, "--steps", 3, "--warmup", 2, "--keep", 2, "--json")
    r = call(*args)
    assert r.returncode == 0, r.stderr
    folder = Path(json.loads(r.stdout)["folder"])
    (folder / "result.json").unlink()                           # as an interrupted run leaves it
    assert call("peek", "--run", folder, "--step", 2, "--json").returncode == 0
    m = Manifest.load(copy)
    entry = m.shards[3]
    entry = write_shard(copy / entry.path, open_shard(copy / entry.path).read(0, entry.tokens)[::-1].copy())
    Manifest(copy, (*m.shards[:3], entry, *m.shards[4:]), m.tokenizer, m.vocab_size, m.eos, m.meta).save()
    one_line(call(*args), "unfinished", entry.path, "is not what it was")
    one_line(call("train", "--config", folder / "config.json", "--runs", runs), entry.path)
    one_line(call("peek", "--run", folder), entry.path)
    one_line(call("audit", "--run", folder), entry.path)
    (folder / "order.json").unlink()
    one_line(call("peek", "--run", folder), entry.path)         # from the checkpoint
    assert len(list(runs.iterdir())) == 1
    assert call(*args, "--name", "again").returncode == 0


def test_audit_options_reach_every_adapter(corpus, tmp_path):
    audit = lambda *a: json.loads(call("audit", *a, "--json").stdout)
    log = tmp_path / "log.csv"
    log.write_text("step,shard,offset,length\n" + "".join(f"{t},/data/{'web' if (t + i) % 2 else 'code'}_{t % 3}.bin,{1000 * t + i},9\n" for t in range(60) for i in range(4)))
    assert any("no domains are known" in n for n in audit("--log", log)["notes"])
    d = audit("--log", log, "--domain", "web_*=web", "--domain", "*code*=code")
    assert d["verdict"] == "safe" and set(d["stats"]["domains"]) == {"web", "code"}
    d = audit("--log", log, "--domain", "web_*=web", "--domain", "*code*=code", *(x for w in ("web=4", "code=4", "math=2") for x in ("--weight", w)))
    assert d["verdict"] == "warning" and "'math' is never read" in [c["finding"] for c in d["checks"]]
    one_line(call("audit", "--log", log, "--domain", "web_*=web"), "no domain is given for shard")
    one_line(call("audit", "--log", log, "--weight", "web"), "DOMAIN=NUMBER")
    one_line(call("audit", "--log", log, "--window", 5), "--window says nothing")
    one_line(call("audit", corpus, "--llmc", "--log", log), "one of")
    for d in ("code", "web"):
        (tmp_path / d).mkdir()
        (tmp_path / d / "index.json").write_text(json.dumps({"chunks": [{"chunk_size": 1, "dim": 512 * 300, "filename": f"{i}.bin"} for i in range(4)]}))
    lit = [x for d in ("code", "web") for x in ("--index", f"{d}={tmp_path / d}")]
    one_line(call("audit", *lit), "block_size")
    one_line(call("audit", "--index", tmp_path / "code", "--index", tmp_path / "web"), "DOMAIN=PATH")
    assert audit(*lit, "--block-size", 512)["verdict"] == "dangerous"
    d = audit(*lit, "--block-size", 512, "--rule", "rows", "--start", 50, "--steps", 100)
    assert d["verdict"] == "safe" and (d["stats"]["first_step"], d["stats"]["steps"]) == (50, 100)
    one_line(call("audit", *lit, "--block-size", 512, "--rule", "window"), "needs window")
    one_line(call("audit", *lit, "--block-size", 512, "--rule", "window", "--window", 10**18), "too large")
    one_line(call("audit", *lit, "--block-size", 512, "--rule", "wyndow"), "choose none, shards, within")
    assert audit(corpus, *SIZES, "--rule", "shards")["verdict"] == "dangerous" and audit(corpus, *SIZES, "--rule", "rows")["verdict"] == "safe"
    assert audit(corpus, *SIZES, "--llmc", "--shuffle")["verdict"] == "dangerous"
    one_line(call("audit", "--megatron", tmp_path, "--documents", "code=x"), "DOMAIN=NUMBER")


def test_scan_writes_a_manifest_for_shards_that_have_none(tmp_path):
    "Foreign shards, in one command: what the other commands need."
    from shohin.shards import write_shard
    for i, d in enumerate(("math", "web")): write_shard(tmp_path / d / "0.bin", np.random.default_rng(i).zipf(1.5, 30_000) % 500)
    one_line(call("scan", tmp_path, "--write-manifest"), "--vocab-size")
    one_line(call("scan", tmp_path / "math/0.bin", "--write-manifest", "--vocab-size", 500), "one folder")
    one_line(call("scan", tmp_path, "--write-manifest", "--vocab-size", 500, "--tokenizer", "../t.json"), "t.json")
    r = call("scan", tmp_path, "--write-manifest", "--vocab-size", 300, "--json")
    assert r.returncode == 1 and "manifest" not in json.loads(r.stdout) and not (tmp_path / "manifest.json").exists()
    r = call("scan", tmp_path, "--write-manifest", "--vocab-size", 500, "--json")
    assert r.returncode == 0 and json.loads(r.stdout)["manifest"] == str(tmp_path / "manifest.json")
    assert call("audit", tmp_path, *SIZES, "--order", "interleaved", "--steps", 100).returncode == 0
    one_line(call("scan", tmp_path, "--write-manifest", "--vocab-size", 500), "move it away")


def test_pages_are_written_whole(corpus, tmp_path):
    page = tmp_path / "page.html"
    page.write_text("the one before")
    assert call("peek", corpus, *SIZES, "--html", page).returncode == 0 and page.read_text().rstrip().endswith("</html>") and len(list(tmp_path.iterdir())) == 1
    one_line(call("peek", corpus, *SIZES, "--html", tmp_path), tmp_path.name)
    r = call("audit", corpus, *SIZES, "--svg", "/dev/stdout")
    assert r.stdout.startswith("<svg") and Path("/dev/stdout").exists()


def test_hostile_text_never_reaches_the_terminal_raw(tmp_path):
    "Escape sequences in the corpus and in names come out as visible text."
    own = tmp_path / "a.txt"
    own.write_text("\x1b]0;owned\x07 \x1b[31mred " * 400)
    other = tmp_path / "b.txt"
    other.write_text("plain words " * 800)
    r = call("corpus", tmp_path / "c", "--source", f"esc={own}", "--source", f"plain={other}", "--shard-tokens", 660)
    assert r.returncode in (0, 2)
    if r.returncode == 0:
        out = call("peek", tmp_path / "c", "--batch-size", 4, "--seq-len", 32).stdout
        assert "\x1b" not in out and "\x07" not in out
    r = call("scan", tmp_path / "no\x1b[31mpe")
    assert r.returncode == 2 and "\x1b" not in r.stderr


def test_following_tells_each_event_once_and_ends_with_ctrl_c(tmp_path):
    "A log that is not there yet, grows, breaks, is cut short and is replaced."
    import signal
    import time
    path, run = tmp_path / "run.log", lambda a, b, at=10**9: "".join(f"step {s} loss {(2 if s < at else 4) + s * 7 % 13 / 999:.4f}\n" for s in range(a, b))
    p = subprocess.Popen([*SHOHIN, "diagnose", str(path), "--follow"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENV)
    try:
        assert "waiting for" in p.stderr.readline()
        path.write_text(run(1, 200) + "step 200 lo")                              # the last line is not whole
        assert p.stdout.readline().startswith("step 199: Healthy")
        with open(path, "a") as f: f.write("ss 2.0100\n" + run(201, 300, 250))
        assert p.stdout.readline().startswith("step 299: A cliff at step 250")
        path.write_text(run(1, 100))
        assert [p.stdout.readline()[:20] for _ in range(2)] == ["the log was cut shor", "step 99: Healthy: 99"]
        (tmp_path / "new").write_text(run(1001, 1090, 1050))
        (tmp_path / "new").replace(path)
        assert [p.stdout.readline()[:27] for _ in range(2)] == ["the log was cut short or re", "step 1,089: A cliff at step"]
        time.sleep(.1)
        p.send_signal(signal.SIGINT)
        out, err = p.communicate(timeout=30)
        assert p.returncode == 1 and "A cliff at step 1,050" in out and err == ""
    finally: p.kill()


def test_following_as_json_is_one_document_a_line(tmp_path):
    import signal
    path = tmp_path / "run.jsonl"
    path.write_text("".join(json.dumps({"step": 1000 + s, "loss": 2.0 if s < 50 else 5.0}) + "\n" for s in range(99)))
    p = subprocess.Popen([*SHOHIN, "diagnose", str(path), "--follow", "--json", "--html", str(tmp_path / "page.html")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENV)
    try:
        doc = json.loads(p.stdout.readline())
        assert doc["step"] == 1098 and not doc["healthy"] and [(e["kind"], e["onset"]) for e in doc["new"]] == [("level shift", 1050)]
        p.send_signal(signal.SIGINT)
        out, err = p.communicate(timeout=30)
        assert (p.returncode, out, err) == (1, "", "") and "step 1,050" in (tmp_path / "page.html").read_text()
    finally: p.kill()


def test_what_cannot_be_followed_is_one_line(tmp_path):
    (tmp_path / "binary").write_bytes(bytes(range(256)) * 99)
    one_line(call("diagnose", tmp_path / "binary", "--follow"), "binary data")
    one_line(call("diagnose", "-", "--follow"), "cannot be followed")
    one_line(call("diagnose", tmp_path, "--follow"), "no log in this folder")


@pytest.mark.parametrize("command", ["scan", "audit", "peek"])
def test_data_commands_import_no_torch(corpus, command):
    code = f"import sys; sys.argv = ['shohin', '{command}', {str(corpus)!r}, '--json']\nimport shohin.cli as c\ntry: c.main()\nexcept SystemExit: pass\nprint([m for m in ('torch', 'pandas', 'matplotlib') if m in sys.modules], file=sys.stderr)"
    r = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENV)
    assert r.stderr.strip().splitlines()[-1] == "[]", r.stderr
