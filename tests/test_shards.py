"""Shards and manifests: what is written is read, from any position, in every format, in bounded memory."""
import hashlib
import json
import os
import pickle
import resource
import struct
import subprocess
import sys
import threading

import numpy as np
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shard_files import FORMATS, token_sample, write

from shohin.shards import (
    FRAME_TOKENS,
    Manifest,
    Shard,
    ShardError,
    UserError,
    ZstReader,
    ZstStream,
    build_manifest,
    check_shard,
    open_shard,
    write_shard,
)

few = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv('SHOHIN_CACHE', str(tmp_path / 'cache'))
    return tmp_path / 'cache'


# ---- reading ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('kind', FORMATS)
def test_every_format_reads_back_at_any_position(tmp_path, kind):
    tokens = token_sample(200_001 if 'pairs' not in kind else 200_000, wide=FORMATS[kind].wide)
    path = write(kind, tmp_path, tokens)
    shard = open_shard(path, dtype=FORMATS[kind].dtype)
    assert (shard.tokens, shard.format) == (len(tokens), FORMATS[kind].format)
    assert shard.dtype == ('uint32' if FORMATS[kind].wide else 'uint16')
    rng = np.random.default_rng(1)
    for a in [0, 1, FRAME_TOKENS - 1, FRAME_TOKENS, 131_071, len(tokens) - 1, len(tokens), *rng.integers(0, len(tokens), 40)]:
        b = min(len(tokens), a + int(rng.integers(0, 70_000)))
        got = shard.read(a, b)
        assert got.dtype == shard.dtype and np.array_equal(got, tokens[a:b])
        got[:] = 0                                                      # a fresh array: nothing shared with the next read
    assert np.array_equal(np.concatenate(list(shard.blocks(7_777))), tokens)
    assert np.array_equal(np.concatenate(list(shard.blocks(7_777, 100, 100_000))), tokens[100:100_000])


@pytest.mark.parametrize('kind', ['u16.zst', 'foreign.u16.zst', 'llmc', 'megatron'])
def test_reads_outside_the_shard_are_errors(tmp_path, kind):
    shard = open_shard(write(kind, tmp_path, token_sample(1000)))
    for a, b in [(-1, 5), (0, 1001), (1000, 1001), (5, 4), (2**62, 2**62 + 5)]:
        with pytest.raises(ShardError, match='1000'): shard.read(a, b)


@few
@given(n=st.integers(1, 300_000), wide=st.booleans(), cuts=st.lists(st.integers(1, 90_000), max_size=6), data=st.data())
def test_write_shard_however_the_tokens_arrive(tmp_path, n, wide, cuts, data):
    tokens = token_sample(n, wide=wide, seed=n)
    at = np.minimum(np.cumsum(cuts), n).astype(int) if cuts else []
    suffix = data.draw(st.sampled_from(['u32.zst' if wide else 'u16.zst', 'bin']))
    path = tmp_path / 'd' / f'x.{suffix}'
    entry = write_shard(path, iter(np.split(tokens, at)), 'uint32' if wide else None)
    whole = path.read_bytes()
    assert entry.sha256 == hashlib.sha256(tokens.tobytes()).hexdigest() and entry.tokens == n
    assert write_shard(path, tokens, tokens.dtype) == Shard(**{**entry.__dict__, 'mtime_ns': path.stat().st_mtime_ns})
    assert path.read_bytes() == whole                                   # the same tokens, the same bytes
    a = data.draw(st.integers(0, n)); b = data.draw(st.integers(a, n))
    assert np.array_equal(open_shard(path).read(a, b), tokens[a:b])
    assert not [p for p in path.parent.iterdir() if p.name.startswith('.')]   # no temporary file stays


def test_ours_is_plain_zstd_with_the_standard_seek_table(tmp_path):
    tokens = token_sample(231_300)
    path = tmp_path / 'x.u16.zst'
    write_shard(path, tokens)
    raw = path.read_bytes()
    with zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True) as f: assert f.read() == tokens.tobytes()
    frames, flags, magic = struct.unpack('<IBI', raw[-9:])
    assert (frames, flags, magic) == (4, 0x80, 0x8F92EAB1)
    table = np.frombuffer(raw[-9 - 12 * frames:-9], '<u4').reshape(-1, 3)
    assert table[:, 0].sum() + 8 + 12 * frames + 9 == len(raw) and table[:, 1].sum() == tokens.nbytes


def test_a_row_costs_one_frame(tmp_path):
    write_shard(tmp_path / 'x.u16.zst', token_sample(40 * FRAME_TOKENS))
    shard = open_shard(tmp_path / 'x.u16.zst')
    assert isinstance(shard, ZstReader)
    shard.read(30 * FRAME_TOKENS + 5, 30 * FRAME_TOKENS + 262)
    assert shard._work == 2 * FRAME_TOKENS                              # bytes decompressed


def test_a_shard_read_at_random_moves_to_the_raw_cache(tmp_path, cache):
    tokens = token_sample(4 * FRAME_TOKENS)
    write_shard(tmp_path / 'x.u16.zst', tokens)
    shard, rng = open_shard(tmp_path / 'x.u16.zst'), np.random.default_rng(0)
    for a in rng.integers(0, len(tokens) - 257, 60): assert np.array_equal(shard.read(a, a + 257), tokens[a:a + 257])
    assert shard._raw and len(list((cache / 'raw').iterdir())) == 1
    assert shard._work <= 6 * tokens.nbytes


def test_a_shard_read_in_order_never_moves_to_the_raw_cache(tmp_path, cache):
    write_shard(tmp_path / 'x.u16.zst', token_sample(4 * FRAME_TOKENS))
    shard = open_shard(tmp_path / 'x.u16.zst')
    for _ in range(5):
        for a in range(0, shard.tokens, 1024): shard.read(a, a + 1024)
    assert shard._work == 5 * 8 * FRAME_TOKENS and not shard._raw and not cache.exists()


def test_what_another_run_unpacked_is_used_if_it_is_right(tmp_path, cache):
    tokens = token_sample(4 * FRAME_TOKENS)
    write_shard(tmp_path / 'corpus' / 'a' / 'x.u16.zst', tokens)
    m = build_manifest(tmp_path / 'corpus', 'bytes', 1 << 16, None)
    again = lambda: Manifest(m.root, m.shards, m.tokenizer, m.vocab_size, m.eos)
    for i in range(0, 200_000, 1000): m.read(0, i * 7919 % 200_000, i * 7919 % 200_000 + 9)
    raw, = (cache / 'raw').iterdir()
    warm = again().reader(0)
    work = warm._work                                                   # of the check
    assert np.array_equal(warm.read(150_000, 250_000), tokens[150_000:250_000]) and warm._work == work
    for damage in (lambda: raw.write_bytes(bytes(tokens.nbytes) + raw.read_bytes()[-8:]), lambda: os.truncate(raw, 1000), raw.unlink):
        damage()
        cold = again().reader(0)
        assert np.array_equal(cold.read(150_000, 250_000), tokens[150_000:250_000]) and cold._work > work


def test_the_raw_cache_is_limited_and_never_evicts_for_a_seekable_shard(tmp_path, cache, monkeypatch):
    tokens = token_sample(100_000)
    monkeypatch.setenv('SHOHIN_CACHE_GB', '0.0005')                     # two and a half of these
    for i in range(6):
        (tmp_path / f'{i}.u16.zst').write_bytes(zstandard.ZstdCompressor().compress(tokens.tobytes()))
        assert np.array_equal(open_shard(tmp_path / f'{i}.u16.zst').read(5, 9), tokens[5:9])
    assert len(list((cache / 'raw').iterdir())) == 2
    write_shard(tmp_path / 'ours.u16.zst', tokens)
    shard = open_shard(tmp_path / 'ours.u16.zst')
    for a in range(0, 90_000, 1000): assert np.array_equal(shard.read(a % 2 * 80_000, a % 2 * 80_000 + 9), tokens[a % 2 * 80_000:a % 2 * 80_000 + 9])
    monkeypatch.setenv('SHOHIN_CACHE_GB', '0.0001')
    (tmp_path / 'big.u16.zst').write_bytes(zstandard.ZstdCompressor().compress(tokens.tobytes()))
    with pytest.raises(UserError, match='SHOHIN_CACHE_GB'): open_shard(tmp_path / 'big.u16.zst').read(0, 5)
    monkeypatch.setenv('SHOHIN_CACHE_GB', 'lots')
    with pytest.raises(UserError, match='SHOHIN_CACHE_GB'): open_shard(tmp_path / 'big.u16.zst').read(0, 5)


@pytest.mark.parametrize('stated', [True, False])
def test_foreign_zstd_is_streamed_without_a_cache(tmp_path, cache, stated):
    tokens = token_sample(300_000)
    half = tokens[:100_000].tobytes(), tokens[100_000:].tobytes()
    skip = struct.pack('<II', 0x184D2A53, 5) + b'hello'
    z = zstandard.ZstdCompressor(write_content_size=stated)
    (tmp_path / 'x.u16.zst').write_bytes(z.compress(half[0]) + skip + z.compress(half[1]) + skip)
    shard = open_shard(tmp_path / 'x.u16.zst')
    assert isinstance(shard, ZstStream) and shard.tokens == 300_000
    assert np.array_equal(np.concatenate(list(shard.blocks())), tokens) and not cache.exists()
    for _ in range(2):
        assert np.array_equal(open_shard(tmp_path / 'x.u16.zst').read(99_990, 100_010), tokens[99_990:100_010])
    assert len(list((cache / 'raw').iterdir())) == 1
    os.truncate(next((cache / 'raw').iterdir()), 1000)                  # a damaged cache is made again, not believed
    assert np.array_equal(open_shard(tmp_path / 'x.u16.zst').read(99_990, 100_010), tokens[99_990:100_010])


def test_the_cache_knows_a_file_that_was_replaced(tmp_path):
    "Same path, same size, same time: the change time cannot be set back."
    a, b = token_sample(20_000, seed=1), token_sample(20_000, seed=2)
    path, z = tmp_path / 'x.u16.zst', zstandard.ZstdCompressor(level=-100)       # hardly compresses: equal sizes are easy to find
    path.write_bytes(z.compress(a.tobytes()))
    assert np.array_equal(open_shard(path).read(5, 900), a[5:900])
    at, pad = path.stat(), lambda raw, n: raw + struct.pack('<II', 0x184D2A50, n - len(raw) - 8) + bytes(n - len(raw) - 8)
    size = max(at.st_size, len(z.compress(b.tobytes()))) + 8
    for tokens in (a, b):
        path.write_bytes(pad(z.compress(tokens.tobytes()), size))
        os.utime(path, ns=(0, at.st_mtime_ns))
        assert np.array_equal(open_shard(path).read(5, 900), tokens[5:900])


def test_a_foreign_seek_table_without_checksums_or_with_uneven_frames(tmp_path):
    tokens = token_sample(50_000)
    parts = [tokens[:7].tobytes(), b'', tokens[7:30_001].tobytes(), tokens[30_001:].tobytes()]
    for stated in (True, False):
        frames = [zstandard.ZstdCompressor(write_content_size=stated).compress(p) for p in parts]
        frames[1] = struct.pack('<II', 0x184D2A50, 3) + b'abc'
        table = b''.join(struct.pack('<II', len(f), len(p)) for f, p in zip(frames, parts, strict=True)) + struct.pack('<IBI', 4, 0, 0x8F92EAB1)
        (tmp_path / 'x.u16.zst').write_bytes(b''.join(frames) + struct.pack('<II', 0x184D2A5E, len(table)) + table)
        shard = open_shard(tmp_path / 'x.u16.zst')
        assert isinstance(shard, ZstReader if stated else ZstStream)     # unstated and uneven: nothing to check the table by
        for a, b in [(0, 50_000), (5, 9), (30_000, 30_002), (49_999, 50_000), (7, 7)]:
            assert np.array_equal(shard.read(a, b), tokens[a:b])


def test_threads_share_a_reader(tmp_path):
    tokens = token_sample(6 * FRAME_TOKENS)
    write_shard(tmp_path / 'x.u16.zst', tokens)
    shard, wrong = open_shard(tmp_path / 'x.u16.zst'), []
    def work(seed):
        for a in np.random.default_rng(seed).integers(0, len(tokens) - 300, 60):
            if not np.array_equal(shard.read(a, a + 300), tokens[a:a + 300]): wrong.append(a)
    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads: t.start()
    for t in threads: t.join()
    assert not wrong


def test_unusable_tokens_are_refused_and_leave_nothing(tmp_path):
    for tokens, dtype, why in [([1, 2, 65_536], None, 'token 2 is 65536'), ([3, -1], None, 'token 1 is -1'), ([0.5], None, 'integers'),
                               ([], None, 'no tokens'), ([1], 'uint32', 'does not go with'), ([1], 'int8', 'does not go with'),
                               (iter([np.array([1]), np.array([2, 70_000])]), None, 'token 2 is 70000')]:
        with pytest.raises(UserError, match=why): write_shard(tmp_path / 'd/x.u16.zst', tokens, dtype)
    with pytest.raises(UserError, match='name it'): write_shard(tmp_path / 'd/x.txt', [1])
    def dies():
        yield np.arange(100_000)[:60_000]
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt): write_shard(tmp_path / 'd/x.u16.zst', dies())
    assert list((tmp_path / 'd').iterdir()) == []


def test_a_full_disk_is_one_clear_line(tmp_path):
    "A real limit on the size of files stands in for the full disk: the kernel refuses the write."
    code = ('import resource, signal, numpy as np; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);'
            'resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000)); from shohin.shards import write_shard, UserError\n'
            'try: write_shard("d/x.u16.zst", np.random.default_rng(0).integers(0, 9999, 200_000))\n'
            'except UserError as e: print(e)')
    out = subprocess.run([sys.executable, '-c', code], cwd=tmp_path, capture_output=True, text=True)
    assert out.stdout == 'd/x.u16.zst: cannot be written: File too large\n' and out.stderr == ''
    assert list((tmp_path / 'd').iterdir()) == []


def test_memory_is_bounded_when_streaming_a_large_foreign_shard(tmp_path):
    "200 MB of tokens through a process that may grow by 50 MB."
    code = '''if True:
        import resource, sys, numpy as np
        from shohin.shards import open_shard, Digest
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        shard = open_shard(sys.argv[1]); digest = Digest(shard.tokens)
        for block in shard.blocks(): digest.update(block)
        print(digest.at, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)'''
    z = zstandard.ZstdCompressor(level=1).compressobj(size=200_000_000)
    piece = np.random.default_rng(0).integers(0, 40, 1_000_000).astype(np.uint16).tobytes()
    with open(tmp_path / 'x.u16.zst', 'wb') as f:
        for _ in range(100): f.write(z.compress(piece))
        f.write(z.flush())
    out = subprocess.run([sys.executable, '-c', code, tmp_path / 'x.u16.zst'], capture_output=True, text=True, check=True)
    tokens, grown_kb = map(int, out.stdout.split())
    assert tokens == 100_000_000 and grown_kb < 50_000


# ---- documents --------------------------------------------------------------------------------------------------

@few
@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=60), kind=st.sampled_from(['megatron', 'megatron32', 'datatrove', 'olmo']), data=st.data())
def test_documents_come_from_the_index(tmp_path, lengths, kind, data):
    tokens = token_sample(sum(lengths), wide=FORMATS[kind].wide)
    shard = open_shard(write(kind, tmp_path, tokens, lengths))
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    assert np.array_equal(shard.doc_bounds(eos=7), starts)               # the index decides, not EOS
    a = data.draw(st.integers(0, len(tokens))); b = data.draw(st.integers(a, len(tokens)))
    assert np.array_equal(shard.doc_bounds(None, a, b), starts[(starts >= a) & (starts < b)])


@few
@given(tokens=st.lists(st.integers(0, 3), min_size=1, max_size=200), kind=st.sampled_from(['u16.zst', 'llmc', 'foreign.u16.zst']), data=st.data())
def test_documents_come_from_eos_otherwise(tmp_path, tokens, kind, data):
    shard = open_shard(write(kind, tmp_path, np.array(tokens, np.uint16)))
    begins = kind == 'llmc' and tokens[0] == 0 != tokens[-1]
    want = [i for i in range(len(tokens)) if (tokens[i] == 0 if begins else i == 0 or tokens[i - 1] == 0)]
    assert shard.doc_bounds(0).tolist() == want
    a = data.draw(st.integers(0, len(tokens))); b = data.draw(st.integers(a, len(tokens)))
    assert shard.doc_bounds(0, a, b).tolist() == [i for i in want if a <= i < b]
    assert shard.doc_bounds(None).tolist() == [0]


# ---- guessing ---------------------------------------------------------------------------------------------------

def test_headerless_files_are_guessed_only_when_decisive(tmp_path):
    raw, rng = tmp_path / 'x.bin', np.random.default_rng(0)
    bpe, chars = token_sample(100_000), np.frombuffer((open(__file__, 'rb').read() * 20)[:200_000], np.uint8).astype(np.uint16)
    for tokens in (bpe, chars):
        for dtype in ('uint16', 'uint32'):
            raw.write_bytes(tokens.astype(dtype).tobytes())
            shard = open_shard(raw)
            assert shard.dtype == dtype and 'taken as' in shard.evidence[0]
            assert np.array_equal(shard.read(0, 1000), tokens[:1000])
    refused = {
        'random': rng.bytes(400_000), 'zeros': bytes(400_000), 'text': open(__file__, 'rb').read() * 10,
        'compressed': zstandard.ZstdCompressor().compress(chars.tobytes() + rng.bytes(100_000))[4:],
        'float32': rng.normal(size=100_000).astype(np.float32).tobytes(), 'float16': rng.normal(size=100_000).astype(np.float16).tobytes(),
        'audio': (rng.normal(size=100_000) * 3000).astype(np.int16).tobytes(), 'short': bpe[:100].tobytes(), 'odd': bpe.tobytes() + b'x',
        'int64': bpe.astype(np.int64).tobytes(), 'positions': np.arange(100_000, dtype=np.uint32).tobytes(),
    }
    for name, content in refused.items():
        raw.write_bytes(content)
        with pytest.raises(ShardError, match=r'byte 0: no head known here.*give the dtype'):
            print(name, open_shard(raw).evidence)
    for magic, what in [(b'PAR1', 'Parquet'), (b'PK\3\4', 'npz'), (struct.pack('<i', 20240522), 'evaluation')]:
        raw.write_bytes(magic + bpe.tobytes())
        with pytest.raises(ShardError, match=what): open_shard(raw)


def test_a_given_dtype_must_agree_with_the_head(tmp_path):
    for kind in ('u16.zst', 'llmc', 'npy', 'megatron', 'datatrove'):
        path = write(kind, tmp_path, token_sample(1000))
        with pytest.raises(ShardError): open_shard(path, dtype='uint32')
    with pytest.raises(UserError, match='uint16 or uint32'): open_shard(path, dtype='float32')
    with pytest.raises(UserError, match='unknown shard format'): open_shard(path, format='mds')
    (tmp_path / 'noname.zst').write_bytes(write('u16.zst', tmp_path, token_sample(1000)).read_bytes())
    with pytest.raises(ShardError, match='2 or 4 bytes'): open_shard(tmp_path / 'noname.zst')
    assert open_shard(tmp_path / 'noname.zst', dtype='uint16').tokens == 1000


# ---- the manifest -----------------------------------------------------------------------------------------------

@pytest.fixture
def corpus(tmp_path):
    for d, domain in enumerate(('math', 'code')):
        for i in range(3): write_shard(tmp_path / 'c' / domain / f'shard_{i:05d}.u16.zst', token_sample(100_000, seed=10 * d + i))
    manifest = build_manifest(tmp_path / 'c', 'bytes', 50_000, 0, meta={'note': 'x'})
    manifest.save()
    return manifest


def test_manifest_round_trip(corpus):
    again = Manifest.load(corpus.root)
    assert again == corpus and again.hash == corpus.hash and again.domains == ('code', 'math')
    assert build_manifest(corpus.root, 'bytes', 50_000, 0, domain_order=['math', 'code']).domains == ('math', 'code')
    assert [s.domain for s in build_manifest(corpus.root, 'bytes', 50_000, 0, domain_order=['math']).shards] == ['math'] * 3
    assert pickle.loads(pickle.dumps(again)).read(4, 5, 9).tolist() == again.read(4, 5, 9).tolist()
    moved = corpus.root.parent / 'elsewhere'
    os.rename(corpus.root, moved)
    assert Manifest.load(moved).hash == corpus.hash                       # no path of this machine in it


def test_what_decides_the_hash(corpus):
    doc = json.loads((corpus.root / 'manifest.json').read_text())
    def variant(**changes):
        return Manifest(corpus.root, corpus.shards, **{**dict(tokenizer='bytes', vocab_size=50_000, eos=0, meta={}), **changes}).hash
    assert variant() == doc['hash']
    assert len({variant(), variant(vocab_size=50_001), variant(eos=1), variant(tokenizer='t.json')}) == 4
    assert Manifest(corpus.root, corpus.shards[::-1], 'bytes', 50_000, 0).hash != doc['hash']        # order counts


def test_entries_made_at_writing_are_those_made_by_reading(tmp_path):
    entries = [write_shard(tmp_path / 'm' / f'{i}.u16.zst', token_sample(9_000 + i, seed=i)) for i in range(3)]
    assert build_manifest(tmp_path, 'bytes', 65_536, None).shards == tuple(entries)


@pytest.mark.parametrize('kind', [k for k in FORMATS if k not in ('raw16', 'raw32')])
def test_manifest_from_foreign_shards(tmp_path, kind):
    (tmp_path / 'web').mkdir(); (tmp_path / 'code').mkdir()
    tokens = {d: token_sample(30_000, wide=FORMATS[kind].wide, seed=i) for i, d in enumerate(['code', 'web'])}
    for d in tokens: write(kind, tmp_path / d, tokens[d])
    build_manifest(tmp_path, 'bytes', 1 << 20, 0).save()
    m = Manifest.load(tmp_path, verify='full')
    assert m.domains == ('code', 'web') and all(np.array_equal(m.read(i, 5, 900), tokens[d][5:900]) for i, d in enumerate(m.domains))


def test_raw_shards_with_a_dtype(tmp_path):
    tokens = token_sample(500)
    (tmp_path / 'train.bin').write_bytes(tokens.tobytes())
    with pytest.raises(ShardError, match='too short to tell'): build_manifest(tmp_path, 'bytes', 50_257, 0)
    build_manifest(tmp_path, 'bytes', 50_257, 0, dtype='uint16').save()
    assert Manifest.load(tmp_path).read(0, 3, 7).tolist() == tokens[3:7].tolist()    # the manifest knows the dtype from then on
    (tmp_path / 'train.bin').write_bytes(token_sample(50_000).tobytes())
    with pytest.warns(UserWarning, match=r'train\.bin: taken as uint16: odd and even'): build_manifest(tmp_path, 'bytes', 50_257, 0)


def test_loading_a_manifest_of_foreign_zstd_unpacks_nothing(tmp_path, cache):
    (tmp_path / 'm').mkdir()
    path = write('foreign.u16.zst', tmp_path / 'm', token_sample(50_000))
    build_manifest(tmp_path, 'bytes', 50_257, 0).save()
    manifest = Manifest.load(tmp_path)
    assert not cache.exists()
    assert np.array_equal(manifest.read(0, 40_000, 40_009), token_sample(50_000)[40_000:40_009]) and cache.exists()
    before = path.stat()
    path.write_bytes(zstandard.ZstdCompressor().compress(token_sample(50_000, seed=1).tobytes()).ljust(before.st_size, b'\0')[:before.st_size])
    os.utime(path, ns=(0, before.st_mtime_ns))
    with pytest.raises(ShardError): Manifest.load(tmp_path)


def test_no_token_outside_the_vocabulary_gets_into_a_manifest(tmp_path):
    write_shard(tmp_path / 'm/x.bin', np.arange(400) % 300)
    with pytest.raises(ShardError, match=r'x.bin: byte 1536: token 256 is 256, the vocabulary has 256'): build_manifest(tmp_path, 'bytes', 256, None)


def test_build_manifest_says_what_is_missing(tmp_path):
    with pytest.raises(UserError, match='no shards found'): build_manifest(tmp_path, 'bytes', 256, None)
    write_shard(tmp_path / 'm/x.bin', [1, 2])
    with pytest.raises(UserError, match="no shards of domain 'web'; found m"): build_manifest(tmp_path, 'bytes', 256, None, domain_order=['web'])


def test_opening_hashes_again_only_what_moved(corpus, monkeypatch):
    "Streams of whole shards are counted: none, unless the time moved, and then only once."
    import shohin.shards as S
    streamed = []
    real = S.ZstReader.blocks
    monkeypatch.setattr(S.ZstReader, 'blocks', lambda self, *part: real(self, *part) if part else streamed.append(self.path.name) or real(self))
    Manifest.load(corpus.root)
    assert streamed == []
    os.utime(corpus.root / 'math/shard_00001.u16.zst')
    Manifest.load(corpus.root)
    assert streamed == ['shard_00001.u16.zst']
    Manifest.load(corpus.root)
    assert streamed == ['shard_00001.u16.zst']
    Manifest.load(corpus.root, verify='full')
    assert len(streamed) == 7


def test_many_shards_few_open_files(tmp_path):
    for i in range(60): write_shard(tmp_path / 'm' / f'{i:03d}.u16.zst', np.full(10, i))
    m = build_manifest(tmp_path, 'bytes', 300, None)
    m._pool.limit = 8
    before = len(os.listdir('/proc/self/fd'))
    for _ in range(3):
        for i in range(60): assert m.read(i, 3, 5).tolist() == [i, i]
    assert len(os.listdir('/proc/self/fd')) <= before + 8
    with pytest.raises(UserError, match='shard 60'): m.read(60, 0, 1)


def test_rows_are_what_read_gives(tmp_path):
    "Every format and width in one corpus, rows across frames; a row that does not lie in its shard is an error and no other row."
    kinds = ['u16.zst', 'u32.zst', 'foreign.u16.zst', 'llmc', 'megatron', 'npy']
    for kind in kinds:
        (tmp_path / kind).mkdir()
        write(kind, tmp_path / kind, token_sample(200_000, seed=len(kind)))
    m = build_manifest(tmp_path, 'bytes', 50_000, 0)
    rng = np.random.default_rng(0)
    for n in (1, 257, 70_000):
        shards = rng.integers(0, len(m.shards), 40).tolist()
        starts = rng.integers(0, 200_000 - n + 1, 40).tolist()
        got = m.rows(shards, starts, n)
        assert got.shape == (40, n) and all(np.array_equal(row, m.read(s, a, a + n)) for row, s, a in zip(got, shards, starts, strict=True))
    for s in range(len(m.shards)):
        for a in (-1, 199_999, 10**12):
            with pytest.raises(ShardError, match='asked for'): m.rows([s], [a], 2)


def test_loading_ten_thousand_shards_is_quick_and_touches_no_file(tmp_path):
    shards = tuple(Shard(f'd{i % 7}/{i:05d}.u16.zst', f'd{i % 7}', 'zst', 'uint16', 10**8, f'{i:064x}', 10**8, 0, ('0' * 16,) * 3) for i in range(10_000))
    Manifest(tmp_path, shards, 'bytes', 257, 256).save()
    start = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    m = Manifest.load(tmp_path, verify='none')
    assert resource.getrusage(resource.RUSAGE_SELF).ru_utime - start < 2 and len(m.shards) == 10_000
    with pytest.raises(UserError, match='No such file'): m.read(0, 0, 1)
    with pytest.raises(UserError, match='No such file'): check_shard(m, 1)


# ---- many rows at once ------------------------------------------------------------------------------------------

@pytest.mark.parametrize('kinds', [['llmc'], ['u16.zst'], None])
def test_rows_of_more_shards_than_may_be_open(tmp_path, kinds):
    "All formats beside each other, more shards than may be open, any order, rows repeated."
    rng, made = np.random.default_rng(0), [k for k in FORMATS if 'raw' not in k] if kinds is None else kinds * 5
    for i, kind in enumerate(made):
        (folder := tmp_path / f'd{i % 2}' / f'{i:02d}').mkdir(parents=True)
        write(kind, folder, token_sample(60_000 + 1000 * i, seed=i, wide=FORMATS[kind].wide))
    m = build_manifest(tmp_path, 'bytes', 1 << 31, None)
    assert len(m.shards) >= 5
    m._pool.limit = 3
    for _ in range(12):                                                 # until shards are unpacked, too
        shard = rng.integers(0, len(m.shards), 40).tolist()
        start = [int(rng.integers(0, m.shards[s].tokens - 256)) if rng.random() < .8 else m.shards[s].tokens - 257 for s in shard]
        got = m.rows(shard, start, 257)
        assert got.shape == (40, 257) and got.flags.writeable
        for row, s, a in zip(got, shard, start, strict=True): assert np.array_equal(row, m.read(s, a, a + 257))
    assert len(m._pool.open) <= 3


@pytest.mark.parametrize('suffix', ['.bin', '.u16.zst'])
def test_rows_refuse_what_read_refuses(tmp_path, suffix):
    for i in range(3): write_shard(tmp_path / 'd' / f'{i}{suffix}', token_sample(30_000, seed=i))
    m = build_manifest(tmp_path, 'bytes', 1 << 16, None)
    assert m.rows([], [], 9).shape == (0, 9) and m.rows([2, 0], [29_991, 0], 9).shape == (2, 9)
    for shard, start in [(1, 29_992), (1, -1), (1, 1 << 40)]:
        with pytest.raises(ShardError, match=rf'd/1{suffix}: byte \d+: tokens .* asked for, the shard holds 30000'): m.rows([0, shard, 2], [5, start, 5], 9)
    for shard in (3, -1):
        with pytest.raises(UserError, match=f'shard {shard} asked for'): m.rows([0, shard], [5, 5], 9)
    os.truncate(tmp_path / 'd' / f'1{suffix}', 600)
    with pytest.raises(ShardError, match=f'd/1{suffix}: byte'): Manifest(m.root, m.shards, m.tokenizer, m.vocab_size, m.eos).rows([0, 1, 2], [5, 20_000, 5], 9)
    if suffix == '.bin':                                                # the other has its frame in memory
        with pytest.raises(ShardError, match=r'd/1.bin: byte 41024: the file became shorter'): m.rows([0, 1, 2], [5, 20_000, 5], 9)
        m.reader(0).close()
        with pytest.raises(ShardError, match=r'd/0.bin: byte 41024: cannot be read: Bad file'): m.rows([2, 0], [5, 20_000], 9)
