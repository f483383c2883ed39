"""What a batch costs from zstd shards: 12 rows of 257 tokens out of 190 shards, and a seek to a step far away.

    pytest -m benchmark tests/bench_loader.py -s"""
import time

import numpy as np
import pytest

from shohin.loader import Loader
from shohin.order import ContiguousOrder, InterleavedOrder, RoundRobinOrder
from shohin.shards import Manifest, build_manifest, write_shard

SHARDS, TOKENS = 190, 231_300


@pytest.fixture(scope='module')
def manifest(tmp_path_factory):
    "Bytes with the statistics of text (a second-order walk over English letters), so that zstd has its usual work."
    root, rng = tmp_path_factory.mktemp('corpus'), np.random.default_rng(0)
    words = [bytes(rng.choice(list(b'etaoinshrdlucmwfgypbvk'), rng.integers(2, 9)).tolist()) for _ in range(5000)]
    for i in range(SHARDS):
        text = b' '.join(words[j] for j in np.minimum(rng.zipf(1.3, TOKENS // 4) - 1, 4999))
        write_shard(root / ['code', 'math', 'web'][i % 3] / f'{i:05d}.u16.zst', np.resize(np.frombuffer(text, np.uint8), TOKENS).astype(np.uint16))
    manifest = build_manifest(root, 'bytes', 257, 256)
    manifest.save()
    return manifest


@pytest.mark.benchmark
@pytest.mark.parametrize('Order', [ContiguousOrder, RoundRobinOrder, InterleavedOrder])
def test_a_batch_takes_under_a_millisecond(manifest, Order):
    manifest = Manifest.load(manifest.root)
    loader = Loader(Order(manifest, 12, 256), manifest)
    took = []
    for step in range(2000):
        start = time.perf_counter()
        loader.batch(step)
        took.append(time.perf_counter() - start)
    cold, warm = 1e3 * np.median(took[:200]), 1e3 * np.median(took[200:])
    seek = []
    for step in np.random.default_rng(1).integers(0, 10**9, 200).tolist():
        start = time.perf_counter()
        loader.batch(step)
        seek.append(time.perf_counter() - start)
    print(f'\n{Order.__name__}: median {warm:.3f} ms a batch ({12 * 256 / warm / 1e3:.1f}M tokens/s), first 200 steps {cold:.3f} ms, '
          f'p99 {1e3 * np.percentile(took[200:], 99):.3f} ms; any step up to 10^9: {1e3 * np.median(seek):.3f} ms')
    assert warm < 1
