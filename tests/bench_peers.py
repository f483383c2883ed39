"""Our loader beside torchdata, grain, litdata, mosaicml-streaming, datasets and megatron-core; see benchmarks/peers/run.py.

    pytest -m benchmark tests/bench_peers.py -s             installs the peers on first use; SHOHIN_BENCH_PEERS=shohin,grain for some"""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.benchmark
def test_beside_other_loaders():
    few = os.environ.get('SHOHIN_BENCH_PEERS')                # the published page is made from a whole run
    command = [sys.executable, ROOT / 'benchmarks/peers/run.py', *(['--peers', few] if few else ['--page', ROOT / 'reports/benchmarks/peers.json'])]
    subprocess.run(command, cwd=ROOT, check=True)
    ours = json.loads((ROOT / 'data/bench/peers/result.json').read_text())['peers']['shohin']
    assert ours['resume_0']['exact'] and ours['resume_2']['exact'] and ours['elastic']['elastic'] and ours['order_0']['verdict'] == 'safe'
    assert ours['mixing']['prefix_rows'] < 1.5
