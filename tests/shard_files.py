"""Shards of every supported format, written from the formats' own descriptions: not with the code under test."""
import gzip
import struct
from dataclasses import dataclass

import numpy as np
import zstandard

from shohin.shards import write_shard


@dataclass(frozen=True)
class Kind:
    file: str
    format: str
    wide: bool = False          # tokens come out as uint32
    dtype: str | None = None    # has to be given on opening


FORMATS = {
    'u16.zst': Kind('x.u16.zst', 'zst'), 'u32.zst': Kind('x.u32.zst', 'zst', True), 'foreign.u16.zst': Kind('y.u16.zst', 'zst'),
    'llmc': Kind('gpt2.bin', 'llmc'), 'llmc32': Kind('llama3.bin', 'llmc', True),
    'megatron': Kind('meg.bin', 'megatron'), 'megatron8': Kind('meg8.bin', 'megatron'),
    'megatron32': Kind('meg32.bin', 'megatron', True), 'megatron64': Kind('meg64.bin', 'megatron', True),
    'datatrove': Kind('00000_tokens.ds', 'datatrove'), 'datatrove32': Kind('00001_tokens.ds', 'datatrove', True),
    'olmo': Kind('part-0-00000.npy', 'raw'), 'olmo32': Kind('part-1-00000.npy', 'raw', True),
    'raw16': Kind('train.bin', 'raw', False, 'uint16'), 'raw32': Kind('val.bin', 'raw', True, 'uint32'),
    'npy': Kind('real.npy', 'npy'), 'npy-pairs': Kind('pairs.npy', 'npy', True), 'npy-big-endian': Kind('be.npy', 'npy', True),
}
_CODES = {'megatron': (8, 'uint16'), 'megatron8': (1, 'uint8'), 'megatron32': (4, 'int32'), 'megatron64': (5, 'int64')}


def token_sample(n, wide=False, seed=0):
    "Zipf-like tokens: frequent ones have low numbers, as a BPE's do."
    x = np.random.default_rng(seed).zipf(1.25, n) % (100_000 if wide else 50_000)
    return x.astype(np.uint32 if wide else np.uint16)


def megatron_index(lengths, itemsize, code, docs=None, pointers=None):
    lengths = np.asarray(lengths, np.int32)
    if pointers is None: pointers = np.concatenate([[0], np.cumsum(lengths.astype(np.int64) * itemsize)[:-1]])
    docs = np.arange(len(lengths) + 1) if docs is None else np.asarray(docs)
    return (b'MMIDIDX\0\0' + struct.pack('<QBQQ', 1, code, len(lengths), len(docs)) + lengths.tobytes()
            + np.asarray(pointers, np.int64).tobytes() + docs.astype(np.int64).tobytes())


def write(kind, folder, tokens, lengths=None):
    "Write `tokens` as one shard of `kind` in `folder`; its path."
    path, n = folder / FORMATS[kind].file, len(tokens)
    lengths = [n // 3, n - n // 3] if lengths is None and n > 3 else [n] if lengths is None else lengths
    if kind in ('u16.zst', 'u32.zst'): write_shard(path, tokens)
    elif kind == 'foreign.u16.zst': path.write_bytes(zstandard.ZstdCompressor().compress(tokens.tobytes()))
    elif kind in ('llmc', 'llmc32'):
        head = (20240801, 7, n) if kind == 'llmc32' else (20240520, 1, n)
        path.write_bytes(struct.pack('<256i', *head, *[0] * 253) + tokens.tobytes())
    elif kind in _CODES:
        code, stored = _CODES[kind]
        if kind == 'megatron8': tokens %= 256
        path.write_bytes(tokens.astype(stored).tobytes())
        path.with_suffix('.idx').write_bytes(megatron_index(lengths, np.dtype(stored).itemsize, code))
    elif kind.startswith('datatrove'):
        path.write_bytes(tokens.tobytes())
        (folder / f'{path.name}.index').write_bytes(np.cumsum(lengths).astype('<u8').tobytes())
        (folder / f'{path.name}.metadata').write_text(f'gpt2|{tokens.itemsize}\n{n}\n{n} tokens')
    elif kind.startswith('olmo'):
        path.write_bytes(tokens.tobytes())
        ends = np.cumsum(lengths)
        lines = ''.join(f'{e - m},{e},doc{i},src/file.jsonl.gz,{i}\n' for i, (e, m) in enumerate(zip(ends, lengths, strict=True)))
        path.with_suffix('.csv.gz').write_bytes(gzip.compress(lines.encode()))
    elif kind.startswith('raw'): path.write_bytes(tokens.tobytes())
    elif kind == 'npy': np.save(path, tokens)
    elif kind == 'npy-pairs': np.save(path, tokens.astype(np.int64).reshape(-1, 2))
    elif kind == 'npy-big-endian': np.save(path, tokens.astype('>u4'))
    return path
