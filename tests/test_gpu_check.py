"The check for GPUs, on a CPU: it measures, and it finds what is wrong."
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[1] / "scripts/gpu_check.py"
ENV = dict(os.environ, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")


def test_it_runs_on_a_cpu(tmp_path):
    out = tmp_path / "check.json"
    r = subprocess.run([sys.executable, SCRIPT, "--device", "cpu", "--tiny", "--json", out], env=ENV, capture_output=True, text=True, timeout=120)
    assert r.returncode == 0 and r.stdout.strip().endswith("CPU: fit"), r.stdout + r.stderr
    doc = json.loads(out.read_text())
    assert doc["loss_difference_cpu"] == doc["loss_difference_resume"] == 0 and doc["tokens_per_s"] > 0 and 0 < doc["mfu"] < 1 and doc["planned_bytes"] > 10**6


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so():
    r = subprocess.run([sys.executable, SCRIPT], env=ENV, capture_output=True, text=True, timeout=60)
    assert r.returncode == 2 and "this torch sees none" in r.stderr and "Traceback" not in r.stderr


def test_a_difference_is_a_finding(monkeypatch, capsys):
    "Losses that drift apart are said, with exit status 1."
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    check = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(check)
    real = check.losses
    calls = []
    def drifting(trainer, n):
        calls.append(n)
        return [x + 2e-3 * (len(calls) == 2) for x in real(trainer, n)]
    monkeypatch.setattr(check, "losses", drifting)
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--device", "cpu", "--tiny"])
    assert check.main() == 1 and "! losses on CPU and CPU differ by 0.002" in capsys.readouterr().out
