"""What a look at a step costs: `pytest tests/bench_peek.py -m benchmark -s`. 100 ms is what the tool promises."""
import time
from pathlib import Path

import numpy as np
import pytest

from shohin.order import InterleavedOrder
from shohin.peek import peek
from shohin.shards import Manifest, build_manifest, write_shard


@pytest.mark.benchmark
@pytest.mark.parametrize('rows, seq_len', [(12, 256), (64, 2048), (512, 1024)])
def test_any_step_within_100_ms(tmp_path, rows, seq_len):
    raw = b'\0'.join(p.read_bytes() for p in sorted(Path(np.__file__).parent.rglob('*.py')))
    text = np.resize(np.frombuffer(raw, np.uint8), 3_000_000).astype(np.uint16)
    for i in range(6): write_shard(tmp_path / f'd{i % 3}' / f'{i}.u16.zst', text[i * 500_000:(i + 1) * 500_000])
    build_manifest(tmp_path, 'bytes', 257, 0).save()
    took = []
    for step in (0, 7, 10**6, 10**9):                          # each in a process of its own, as far as files go: nothing is open
        manifest = Manifest.load(tmp_path, verify='none')
        start = time.process_time()                     # other work on the machine does not count
        peek(manifest, InterleavedOrder(manifest, rows, seq_len), step)
        took.append(1e3 * (time.process_time() - start))
    print(f'\n{rows} x {seq_len}: {", ".join(f"{t:.0f}" for t in took)} ms')
    assert min(took) < 100
