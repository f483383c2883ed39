"""scan beside np.bincount over the same bytes, page cache warm: `pytest tests/bench_scan.py -m benchmark -s`.

The same bytes are those of the shard: to count them np.bincount needs them read, and decompressed where they are
compressed. What it takes when the tokens are in memory already is printed beside it, in brackets."""
import time
from pathlib import Path

import numpy as np
import pytest
from shard_files import token_sample, write

from shohin.scan import scan
from shohin.shards import build_manifest, open_shard

N = 20_000_000


def best(f, times=5):
    "Processor time, the least of several runs: both are one thread, and other processes only ever add."
    spent = []
    for _ in range(times):
        start = time.process_time(); f(); spent.append(time.process_time() - start)
    return min(spent)


def byte_text(n):
    "Byte-level tokens of real text: the sources of this environment's packages, with rules, indents and tables in them."
    raw, out = bytearray(), Path(np.__file__).parent
    for path in sorted(out.rglob('*.py')):
        raw += path.read_bytes() + b'\0'
        if len(raw) > n: break
    return np.resize(np.frombuffer(raw, np.uint8), n).astype(np.uint16)


@pytest.mark.benchmark
@pytest.mark.parametrize('text', ['bpe', 'bytes'])
@pytest.mark.parametrize('kind', ['llmc', 'megatron', 'u16.zst'])
def test_scan_is_at_least_half_as_fast_as_counting(tmp_path, kind, text):
    tokens = token_sample(N) if text == 'bpe' else byte_text(N)
    path = write(kind, tmp_path, tokens)
    if kind == 'u16.zst': build_manifest(tmp_path, 'bytes', 65_536, None).save()
    eos = 999 if text == 'bpe' else 0
    count, same = best(lambda: np.bincount(tokens)), best(lambda: np.bincount(open_shard(path).read(0, N)))
    took = best(lambda: scan(path, vocab_size=65_536, eos=eos))
    verified = best(lambda: scan(tmp_path, verify=True), 2) if kind == 'u16.zst' else None
    print(f'\n{kind} {text}: np.bincount of the shard {N / same / 1e6:.0f} ({N / count / 1e6:.0f} of the tokens in memory), scan {N / took / 1e6:.0f} Mtoken/s, '
          f'{same / took:.2f} of it ({count / took:.2f})' + (f', with SHA-256 {N / verified / 1e6:.0f}' if verified else ''))
    assert took < 2 * same
