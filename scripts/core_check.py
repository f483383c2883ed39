"""The core install on its own: run this with the Python of an environment made by `pip install .`, without extras.

Writes two small shards, a manifest and the log of a run that cliffs, and puts every command that must work without
torch to work on them. Uses nothing but the standard library and what it checks.
"""
import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from shohin.shards import build_manifest, write_shard

HEAVY = ("torch", "pandas", "matplotlib", "IPython")
SHOHIN = Path(sys.executable).parent / "shohin"


def call(*args, status=(0, 1)) -> str:
    "What `shohin ARGS` prints; 1 is a finding, 2 would be refused input."
    run = subprocess.run([SHOHIN, *map(str, args)], capture_output=True, text=True, timeout=120)
    if run.returncode not in status or "Traceback" in run.stderr:
        sys.exit(f"shohin {' '.join(map(str, args))}: exit status {run.returncode}, expected {status}\n{run.stdout}{run.stderr}")
    return run.stdout


def corpus(folder: Path) -> Path:
    "Two domains of four shards each; byte tokens, 256 ends a document."
    rng = np.random.default_rng(0)
    for domain, text in {"code_python": b"def f(x):\n    return x + 1\n", "math": b"Let x be a prime. Then x + 1 is even.\n"}.items():
        for i in range(4):
            docs = [np.append(np.frombuffer(text * int(rng.integers(2, 9)), np.uint8).astype(np.uint16), 256) for _ in range(60)]
            write_shard(folder / domain / f"shard_{i:05d}.u16.zst", np.concatenate(docs).astype(np.uint16))
    manifest = build_manifest(folder, tokenizer="bytes", vocab_size=257, eos=256)
    manifest.save()
    return folder / "manifest.json"


def log(path: Path) -> Path:
    "Loss 1.1 for 400 steps, then 3.0: the seed's cliff, with its guard refusing."
    rng = np.random.default_rng(1)
    rows = [{"step": s, "loss": float((1.1 if s < 400 else 3.0) + rng.normal() * 0.03), "gnorm": 0.08, "lr": 0.02} for s in range(700)]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def main():
    present = [name for name in HEAVY if importlib.util.find_spec(name)]
    if present: sys.exit(f"not the core install: {', '.join(present)} is here")
    with tempfile.TemporaryDirectory() as d:
        manifest, run = corpus(Path(d) / "corpus"), log(Path(d) / "log.jsonl")
        for command in ("scan", "audit", "peek", "diagnose", "replay"): call(command, "--help", status=(0,))
        call("scan", manifest.parent, status=(0, 1))
        audit = json.loads(call("audit", manifest, "--batch-size", 4, "--seq-len", 64, "--steps", 200, "--json"))
        assert audit, "audit says nothing"
        peek = call("peek", manifest, "--step", 3, "--batch-size", 4, "--seq-len", 64)
        assert "return x + 1" in peek or "prime" in peek, f"peek shows no text:\n{peek}"
        diagnosis = json.loads(call("diagnose", run, "--json", status=(1,)))
        assert diagnosis, "diagnose says nothing"
        call("replay", run, "--guard", "seed")
        call("scan", Path(d) / "no such folder", status=(2,))
        for command in (("train", manifest), ("reproduce",)): call(*command, status=(2,))  # one line that says to install torch
    print("core works without", ", ".join(HEAVY))


if __name__ == "__main__":
    main()
