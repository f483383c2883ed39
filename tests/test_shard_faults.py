"""Damaged and hostile shards: a UserError that names file and byte, never a crash, a hang, a huge allocation or, with a
manifest, a wrong token."""
import json
import os
import re
import struct
import subprocess
import sys
import time
import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from shard_files import FORMATS, megatron_index, token_sample, write

from shohin.order import InterleavedOrder
from shohin.peek import peek
from shohin.shards import (
    MAX_MANIFEST,
    Manifest,
    ShardError,
    UserError,
    _seek_table,
    build_manifest,
    open_shard,
    write_shard,
)

N = 3000
fuzz = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv('SHOHIN_CACHE', str(tmp_path / 'cache'))


def read_all(path, kind):
    "Everything a user can do with a shard."
    shard = open_shard(path, dtype=FORMATS[kind].dtype)
    tokens = np.concatenate(list(shard.blocks(1000)))
    assert len(tokens) == shard.tokens
    if shard.tokens > 20: assert np.array_equal(shard.read(7, 19), tokens[7:19])
    bounds = shard.doc_bounds(0)
    assert len(bounds) == 0 or (bounds[0] >= 0 and bounds[-1] < shard.tokens and (np.diff(bounds) > 0).all())
    return tokens


def fails_clearly(path, kind='u16.zst', match='byte', names=None):
    "The error is one line, names the file (or its index) and a byte inside or at the end of it."
    with pytest.raises(ShardError, match=match) as e: read_all(path, kind)
    line = str(e.value)
    file, at = re.fullmatch(r'(.*?): byte (\d+): [^\n]+', line).groups()
    assert names is None or os.path.basename(file) == names
    assert os.path.dirname(file) == str(path.parent) and (int(at) <= os.path.getsize(file) or file.endswith('.gz')), line
    return line


mutations = st.one_of(
    st.tuples(st.just('cut'), st.floats(0, 0.9999)),
    st.tuples(st.just('flip'), st.floats(0, 0.9999), st.integers(0, 7)),
    st.tuples(st.just('head'), st.integers(0, 60), st.integers(0, 7)),          # bits near the beginning and the end:
    st.tuples(st.just('tail'), st.integers(1, 60), st.integers(0, 7)),          # heads, counts, seek tables
    st.tuples(st.just('put'), st.integers(0, 60), st.sampled_from([b'\xff' * 8, b'\xff' * 7 + b'\x7f', bytes(8), b'\xff\xff\xff\x7f', b'\1'])),
    st.tuples(st.just('puttail'), st.integers(8, 60), st.sampled_from([b'\xff' * 8, b'\xff' * 4, bytes(8), b'\1'])),
    st.tuples(st.just('insert'), st.floats(0, 1), st.binary(min_size=1, max_size=9)),
    st.tuples(st.just('drop'), st.floats(0, 0.9999), st.integers(1, 9)),
    st.tuples(st.just('double'),), st.tuples(st.just('append'), st.binary(min_size=1, max_size=40)))


def mutate(raw: bytes, m) -> bytes:
    what, *a = m
    raw = bytearray(raw)
    at = int(a[0] * len(raw)) if a and isinstance(a[0], float) else None
    if what == 'cut': return bytes(raw[:at])
    if what == 'double': return bytes(raw + raw)
    if what == 'append': return bytes(raw) + a[0]
    if what in ('head', 'put'): at = min(a[0], len(raw) - 1)
    if what in ('tail', 'puttail'): at = max(0, len(raw) - a[0])
    if what in ('flip', 'head', 'tail'): raw[at] ^= 1 << a[1]
    elif what in ('put', 'puttail'): raw[at:at + len(a[1])] = a[1][:len(raw) - at]
    elif what == 'insert': raw[at:at] = a[1]
    elif what == 'drop': del raw[at:at + a[1]]
    return bytes(raw)


@pytest.mark.parametrize('kind', FORMATS)
@settings(fuzz, max_examples=40)
@given(m=mutations, where=st.integers(0, 2))
def test_a_damaged_file_is_an_error_or_differs_only_where_it_was_damaged(tmp_path, kind, m, where):
    tokens = token_sample(N, FORMATS[kind].wide)
    path = write(kind, tmp_path, tokens)
    side = [path.with_suffix('.idx'), path.parent / f'{path.name}.index', path.with_suffix('.csv.gz')]
    target = next((p for p in side if where and p.exists()), path)
    raw = target.read_bytes()
    target.write_bytes(mutate(raw, m))
    try: got = read_all(path, kind)
    except ShardError as e:
        assert re.fullmatch(r'[^\n]+: byte \d+: [^\n]+', str(e)) and '\0' not in str(e)
        return
    if target != path or kind in ('u16.zst', 'u32.zst'): assert np.array_equal(got, tokens)       # an index decides no token; ours has checksums
    elif m[0] in ('flip', 'head', 'tail') and kind != 'foreign.u16.zst': assert (got != tokens).sum() <= 1


@pytest.mark.parametrize('kind', [k for k in FORMATS if not k.startswith('raw')])
@settings(fuzz, max_examples=20)
@given(m=mutations, keep_time=st.booleans())
def test_with_a_manifest_a_damaged_file_is_never_read(tmp_path, kind, m, keep_time):
    tokens = token_sample(N, FORMATS[kind].wide)
    path = write(kind, tmp_path, tokens)
    build_manifest(tmp_path, 'bytes', 1 << 20, 0).save()
    before = path.stat()
    path.write_bytes(mutate(path.read_bytes(), m))
    if keep_time: os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    try:
        manifest = Manifest.load(tmp_path, verify='full' if keep_time else 'quick')
        assert np.array_equal(manifest.read(0, 0, N), tokens)
    except UserError as e: assert '\n' not in str(e) and (path.name in str(e) or path.with_suffix('').name in str(e))


@pytest.mark.parametrize('kind', FORMATS)
def test_cut_at_every_byte_near_the_ends(tmp_path, kind):
    tokens = token_sample(300, FORMATS[kind].wide)
    path = write(kind, tmp_path, tokens)
    raw = path.read_bytes()
    for keep in [*range(0, 50), *range(len(raw) - 50, len(raw))]:
        path.write_bytes(raw[:keep])
        if kind.startswith('raw') and keep and keep % tokens.itemsize == 0: continue      # a shorter raw file is just shorter
        if keep < 16 and kind in ('npy', 'npy-pairs', 'npy-big-endian', 'u16.zst', 'u32.zst', 'foreign.u16.zst'):
            with pytest.raises(ShardError): read_all(path, kind)                          # the head itself is gone
        elif kind in ('u16.zst', 'u32.zst') and keep == len(raw) - 29: assert np.array_equal(read_all(path, kind), tokens)   # only the seek table is gone
        else: fails_clearly(path, kind)


def test_every_single_bit_of_our_own_shards(tmp_path):
    "Found, or harmless: unused bits, and those of the seek table's magic, without which the shard is read as plain zstd."
    tokens = token_sample(150)
    path = tmp_path / 'x.u16.zst'
    write_shard(path, tokens)
    raw, harmless = path.read_bytes(), 0
    for bit in range(8 * len(raw)):
        damaged = bytearray(raw)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try: assert np.array_equal(read_all(path, 'u16.zst'), tokens); harmless += 1
        except ShardError: pass
    assert harmless < 80


def test_two_frames_that_changed_places(tmp_path):
    a, b = (zstandard.ZstdCompressor(write_checksum=True).compress(token_sample(65_536, seed=s).tobytes()) for s in (1, 2))
    path = tmp_path / 'x.u16.zst'
    def table(*frames): return _seek_table([(len(f), 131_072, int.from_bytes(f[-4:], 'little')) for f in frames])
    path.write_bytes(a + b + table(a, b))
    assert open_shard(path).tokens == 131_072
    path.write_bytes(b + a + table(a, b))
    fails_clearly(path, match='frame 0')


# ---- zstd -------------------------------------------------------------------------------------------------------

def zst(path, frames, contents, flags=0, count=None, extra=b''):
    body = b''.join(struct.pack('<II', len(f), c) for f, c in zip(frames, contents, strict=True)) + struct.pack('<IBI', len(frames) if count is None else count, flags, 0x8F92EAB1)
    path.write_bytes(b''.join(frames) + extra + struct.pack('<II', 0x184D2A5E, len(body)) + body)
    return path


def test_seek_tables_that_lie(tmp_path):
    pieces = [token_sample(1000, seed=i).tobytes() for i in range(3)]
    frames, path = [zstandard.ZstdCompressor().compress(p) for p in pieces], tmp_path / 'x.u16.zst'
    assert open_shard(zst(path, frames, [2000] * 3)).tokens == 3000
    zst(path, frames, [2000, 2002, 1998]); fails_clearly(path, match='frame 1 holds 2000 bytes, the seek table says 2002')
    zst(path, frames, [2002, 2002, 2002]); fails_clearly(path, match='frame 0')                   # regular, so found on use
    zst(path, frames, [2000] * 3, count=4); fails_clearly(path)
    zst(path, frames, [2000] * 3, count=2); fails_clearly(path)
    zst(path, frames, [2000] * 3, count=0xFFFFFFFF); fails_clearly(path, match='4294967295 frames')
    zst(path, frames, [2000] * 3, count=1 << 19); fails_clearly(path, match='more than the file can hold')
    zst(path, frames, [2000] * 3, flags=0x10); fails_clearly(path, match='reserved')
    zst(path, frames, [2000] * 3, extra=b'12345678'); fails_clearly(path, match='add up to')
    zst(path, [frames[0] + frames[1], frames[2]], [2000, 2000]); fails_clearly(path, match='frame 0 is damaged')
    zst(path, [frames[0][:-10], frames[0][-10:] + frames[1], frames[2]], [2000] * 3); fails_clearly(path)
    zst(path, [b'', *frames], [2000] * 4); fails_clearly(path, match='frame 0')
    zst(path, frames, [0xFFFFFFFE] * 3); fails_clearly(path, match='promises')
    zst(path, [], []); fails_clearly(path)
    raw = zst(path, frames, [2000] * 3).read_bytes()
    path.write_bytes(raw[:-9] + raw[-9:]); assert open_shard(path).tokens == 3000
    path.write_bytes(raw[:-33] + b'junk' + raw[-29:]); fails_clearly(path)


def test_zstd_bombs_are_refused_quickly_and_in_little_memory(tmp_path):
    path, zeros = tmp_path / 'x.u16.zst', bytes(8 << 20)
    z = zstandard.ZstdCompressor(level=3, write_content_size=False)
    one = z.compress(zeros)                                             # 8 MiB in a few hundred bytes
    stated = zstandard.ZstdCompressor().compress(zeros)
    stream = zstandard.ZstdCompressor().compressobj()
    long = b''.join(stream.compress(zeros) for _ in range(64)) + stream.flush()
    hostile = {
        'many frames': one * 1000, 'stated': stated * 1000, 'one frame of half a gigabyte': long,
        'a frame that states 2^60 bytes': b'\x28\xb5\x2f\xfd\xe0' + (1 << 60).to_bytes(8, 'little') + b'\x01\x00\x00',
        'a window of 2^41': b'\x28\xb5\x2f\xfd\x00\xf8' + b'\x01\x00\x00', 'empty frames': zstandard.ZstdCompressor().compress(b'') * 20_000,
        'skippable only': struct.pack('<II', 0x184D2A50, 0) * 20_000, 'a skippable frame of 4 GB': struct.pack('<II', 0x184D2A50, 0xFFFFFFFF) + b'x' * 50,
        'empty blocks': b'\x28\xb5\x2f\xfd\x00\x58' + bytes(3) * 500_000 + b'\x01\x00\x00'}
    for name, raw in hostile.items():
        path.write_bytes(raw)
        tracemalloc.start(); began = time.process_time()
        fails_clearly(path)
        used, peak = time.process_time() - began, tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 150 << 20 and used < 12, (name, peak, used)
    zst(path, [stated] * 300, [8 << 20] * 300)
    fails_clearly(path, match='no shard of tokens')
    assert not (tmp_path / 'cache').exists() or not list((tmp_path / 'cache').rglob('*.tmp'))


def test_a_frame_whose_head_understates_its_content(tmp_path):
    "The frame says 100 bytes and unpacks to more: zstd itself must stop, and we must say where."
    honest = zstandard.ZstdCompressor(write_checksum=True).compress(bytes(range(200)))
    lying = bytearray(honest); lying[5] = 100
    (tmp_path / 'x.u16.zst').write_bytes(lying)
    fails_clearly(tmp_path / 'x.u16.zst')


def test_foreign_zstd_cut_short_is_found_on_opening(tmp_path):
    path = write('foreign.u16.zst', tmp_path, token_sample(400_000))
    raw = path.read_bytes()
    for keep in (len(raw) - 1, len(raw) // 2, 20):
        path.write_bytes(raw[:keep])
        with pytest.raises(ShardError, match=f'byte {keep}: '): open_shard(path)


# ---- Megatron, datatrove, OLMo ----------------------------------------------------------------------------------

@pytest.mark.parametrize('change, byte, says', [
    (dict(pointers=[0, 2**40, 60]), 54, 'pointer of sequence 1 is 1099511627776, outside; expected 20'),
    (dict(pointers=[0, -20, 60]), 54, 'outside'), (dict(pointers=[2, 20, 60]), 46, 'leaving a gap; expected 0'),
    (dict(pointers=[0, 21, 60]), 54, 'unaligned'), (dict(pointers=[0, 18, 60]), 54, 'overlapping'),
    (dict(pointers=[0, 0, 0]), 54, 'overlapping'), (dict(pointers=[0, 22, 60]), 54, 'leaving a gap'),
    (dict(lengths=[10, -20, 60]), 38, 'length -20'), (dict(lengths=[10, 20, 2**31 - 1]), 34, 'the .bin has 120'),
    (dict(lengths=[10, 20, 29]), 34, 'take 118 bytes, the .bin has 120'), (dict(code=7), 17, 'a float'), (dict(code=6), 17, 'a float'),
    (dict(code=0), 17, 'dtype code'), (dict(code=99), 17, 'dtype code'), (dict(code=4), 54, 'expected 40'), (dict(code=1), 54, 'expected 10'),
    (dict(docs=[1, 2, 3]), 70, 'expected 0'), (dict(docs=[0, 2, 1, 3]), 86, 'begins at sequence 1'), (dict(docs=[0, 9, 3]), 78, 'begins at sequence 9'),
    (dict(docs=[0, 1, 2]), 86, 'end at sequence 2, not 3'), (dict(docs=[0, -1, 3]), 78, 'begins at sequence -1'),
    (dict(docs=[0, 2**62, -2**62, 3]), 78, 'begins'), (dict(docs=[0, 2, -2**63, 3]), 86, 'begins'), (dict(docs=[0]), 18, 'no documents'),
])
def test_megatron_indices_that_lie(tmp_path, change, byte, says):
    write('megatron', tmp_path, token_sample(60))
    args = dict(lengths=[10, 20, 30], itemsize=2, code=8, pointers=[0, 20, 60]) | change
    (tmp_path / 'meg.idx').write_bytes(megatron_index(**args))
    line = fails_clearly(tmp_path / 'meg.bin', match=re.escape(says), names='meg.idx')
    assert f': byte {byte}: ' in line


@pytest.mark.parametrize('at, value, byte', [(0, b'TNTIDX\0\0', 0), (9, struct.pack('<Q', 2), 9), (18, b'\xff' * 8, 18), (26, b'\xff' * 8, 18),
                                             (18, struct.pack('<Q', 2**61), 18), (18, bytes(8), 18), (26, struct.pack('<Q', 2**63), 18)])
def test_megatron_heads_that_lie(tmp_path, at, value, byte):
    write('megatron', tmp_path, token_sample(60))
    raw = bytearray((tmp_path / 'meg.idx').read_bytes())
    raw[at:at + len(value)] = value
    (tmp_path / 'meg.idx').write_bytes(raw)
    assert f': byte {byte}: ' in fails_clearly(tmp_path / 'meg.bin', names='meg.idx')


def test_a_multimodal_index_and_a_missing_bin(tmp_path):
    path = write('megatron', tmp_path, token_sample(60))
    idx = path.with_suffix('.idx')
    idx.write_bytes(idx.read_bytes() + bytes(2))
    fails_clearly(path, match='multimodal', names='meg.idx')
    path.unlink()
    with pytest.raises(UserError, match=r'meg.bin: No such file'): open_shard(idx)


def test_negative_megatron_tokens_are_not_wrapped_around(tmp_path):
    (tmp_path / 'x.bin').write_bytes(np.array([5, 6, -1, 7], '<i4').tobytes())
    (tmp_path / 'x.idx').write_bytes(megatron_index([4], 4, 4))
    assert open_shard(tmp_path / 'x.bin').read(0, 2).tolist() == [5, 6]
    with pytest.raises(ShardError, match=r'byte 8: expected a token in 0\.\.4294967295, found -1'): open_shard(tmp_path / 'x.bin').read(0, 4)


@pytest.mark.parametrize('ends, byte, says', [([5, 3, 60], 8, 'document 1 ends at token 3, before it begins'), ([5, 60, 61], 16, 'the index counts 61'), ([2**64 - 1], 0, 'ends'),
                                              ([], 0, '8 bytes a document'), ([5, 2**63 - 1], 8, 'counts'), ([0, 0, 0], 16, 'counts 0')])
def test_datatrove_indices_that_lie(tmp_path, ends, byte, says):
    path = write('datatrove', tmp_path, token_sample(60))
    (tmp_path / f'{path.name}.index').write_bytes(np.array(ends, '<u8').tobytes())
    assert f': byte {byte}: ' in fails_clearly(path, match=says, names=f'{path.name}.index')


@pytest.mark.parametrize('lines', ['0,60', '0,5\n5,60\n', '0,5\n6,60\n', '0,5,a\n5,5,b\n5,60,c\n', 'start,end\n', '0,99999999999999999999\n', '', '0,30\n30,59\n', '0,6\xb2\n'])
def test_olmo_sidecars(tmp_path, lines):
    import gzip
    path = write('olmo', tmp_path, token_sample(60))
    path.with_suffix('.csv.gz').write_bytes(gzip.compress(lines.encode()))
    if lines in ('0,60', '0,5\n5,60\n'): assert open_shard(path).tokens == 60
    else: fails_clearly(path, names=path.with_suffix('.csv.gz').name)


# ---- heads ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('head, byte', [((20240520, 1, 2**31 - 1), 8), ((20240520, 1, -5), 8), ((20240520, 1, 0), 8), ((20240520, 2, 60), 4),
                                        ((20240801, 7, 60), 8), ((20240801, 1, 30), 4), ((20240522, 1, 60), 0), ((20240520, 1, 59), 8)])
def test_llmc_heads_that_lie(tmp_path, head, byte):
    (tmp_path / 'x.bin').write_bytes(struct.pack('<256i', *head, *[0] * 253) + token_sample(60).tobytes())
    assert f': byte {byte}: ' in fails_clearly(tmp_path / 'x.bin')


@pytest.mark.parametrize('head', [
    "{'descr': '<f4', 'fortran_order': False, 'shape': (60,), }", "{'descr': '|O', 'fortran_order': False, 'shape': (60,), }",
    "{'descr': [('a', '<u2')], 'fortran_order': False, 'shape': (60,), }", "{'descr': '<u2', 'fortran_order': True, 'shape': (6, 10), }",
    "{'descr': '<u2', 'fortran_order': False, 'shape': (-60,), }", "{'descr': '<u2', 'fortran_order': False, 'shape': (-6, -10), }",
    "{'descr': '<u2', 'fortran_order': False, 'shape': (99999999999999999999999,), }", "{'descr': '<u2', 'fortran_order': False, 'shape': 60, }",
    "{'descr': '<u2', 'fortran_order': False, 'shape': (0,), }", "{'descr': '<u2', 'shape': (60,), }", "__import__('os').system('true')",
    "{'descr': '<u2', 'fortran_order': False, 'shape': ('6', 'x'), }", '(' * 4000, '{' + '[' * 200, '[1]', '', '{"a": ' * 500, '9' * 9000, "{'descr': '<u2', 'fortran_order': 0, 'shape': (59,), }"])
def test_npy_heads_that_lie(tmp_path, head):
    (tmp_path / 'x.npy').write_bytes(b'\x93NUMPY\1\0' + struct.pack('<H', len(head)) + head.encode() + token_sample(60).tobytes())
    fails_clearly(tmp_path / 'x.npy', 'npy')


def test_npy_head_lengths_that_lie(tmp_path):
    for head in (b'\x93NUMPY\1\0\xff\xff', b'\x93NUMPY\2\0\xff\xff\xff\xff', b'\x93NUMPY\x09\0\x10\0', b'\x93NUMPY'):
        (tmp_path / 'x.npy').write_bytes(head + b' ' * 50)
        fails_clearly(tmp_path / 'x.npy', 'npy')
    head = b"{'descr': '<u2', 'fortran_order': False, 'shape': (60,), }".ljust(60_000)
    (tmp_path / 'x.npy').write_bytes(b'\x93NUMPY\1\0' + struct.pack('<H', len(head)) + head + token_sample(60).tobytes())
    fails_clearly(tmp_path / 'x.npy', 'npy', match='a .npy head of 60000 bytes')


@fuzz
@given(raw=st.binary(max_size=400), name=st.sampled_from(['x.bin', 'x.npy', 'x.ds', 'x.u16.zst', 'x.u32.zst', 'x']),
       head=st.sampled_from([b'', b'\x28\xb5\x2f\xfd', b'\x93NUMPY\1\0', struct.pack('<ii', 20240520, 1), struct.pack('<I', 0x184D2A50)]))
@example(raw=b'', name='x.bin', head=b'')
def test_arbitrary_bytes_under_any_name(tmp_path, raw, name, head):
    (tmp_path / name).write_bytes(head + raw)
    try: assert len(read_all(tmp_path / name, 'npy')) > 0
    except ShardError as e: assert str(e).startswith(f'{tmp_path / name}: byte ')


@fuzz
@given(raw=st.binary(max_size=200), wide=st.booleans())
def test_arbitrary_bytes_as_an_index(tmp_path, raw, wide):
    kind = 'megatron32' if wide else 'datatrove'
    path = write(kind, tmp_path, token_sample(60, wide))
    side = path.with_suffix('.idx') if wide else path.parent / f'{path.name}.index'
    side.write_bytes((b'MMIDIDX\0\0' + struct.pack('<QB', 1, 4) if wide else b'') + raw)
    try: read_all(path, kind)
    except ShardError: pass


def test_things_that_are_not_files(tmp_path):
    os.mkfifo(tmp_path / 'x.bin')                                       # opening it would wait for ever
    for path in (tmp_path / 'x.bin', tmp_path, '/dev/zero'):
        with pytest.raises(ShardError, match='regular file'): open_shard(path)
    write('datatrove', tmp_path, token_sample(60))
    os.remove(tmp_path / '00000_tokens.ds.index'); os.mkfifo(tmp_path / '00000_tokens.ds.index')
    with pytest.raises(ShardError, match='regular file'): open_shard(tmp_path / '00000_tokens.ds')
    os.mkfifo(tmp_path / 'y.csv.gz'); (tmp_path / 'y.npy').write_bytes(b'1234')
    with pytest.raises(ShardError, match='regular file'): open_shard(tmp_path / 'y.npy')
    with pytest.raises(UserError, match='No such file'): open_shard(tmp_path / 'nothing.bin')
    (tmp_path / 'loop.bin').symlink_to('loop.bin')
    with pytest.raises(UserError, match=r'loop\.bin'): open_shard(tmp_path / 'loop.bin')


def test_a_file_that_shrinks_while_it_is_open(tmp_path):
    path = write('llmc', tmp_path, token_sample(60_000))
    shard = open_shard(path)
    os.truncate(path, 50_000)
    with pytest.raises(ShardError, match='byte 50000: the file became shorter'): shard.read(0, 60_000)
    assert len(shard.read(0, 1000)) == 1000


def test_hostile_heads_within_a_small_address_space(tmp_path):
    "All the counts that promise exabytes, in a process that may not take half a gigabyte more."
    write('megatron', tmp_path, token_sample(60))
    raw = bytearray((tmp_path / 'meg.idx').read_bytes()); raw[18:34] = b'\xff' * 7 + b'\x0f' + b'\xff' * 7 + b'\x0f'
    (tmp_path / 'meg.idx').write_bytes(raw)
    (tmp_path / 'a.bin').write_bytes(struct.pack('<256i', 20240801, 7, 2**31 - 1, *[0] * 253))
    head = b"{'descr': '<u2', 'fortran_order': False, 'shape': (1152921504606846976,), }"
    (tmp_path / 'b.npy').write_bytes(b'\x93NUMPY\1\0' + struct.pack('<H', len(head)) + head)
    (tmp_path / 'c.u16.zst').write_bytes(b'\x28\xb5\x2f\xfd\xe0' + (1 << 60).to_bytes(8, 'little') + b'\x01\x00\x00')
    zst(tmp_path / 'd.u16.zst', [b'x' * 50], [0xFFFFFFFE])
    zst(tmp_path / 'e.u16.zst', [b'x' * 50], [100], count=0xFFFFFFF0)
    code = '''if True:
        import resource, sys
        from shohin.shards import ShardError, open_shard
        used = int(open('/proc/self/statm').read().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 29),) * 2)
        for path in sys.argv[1:]:
            try: open_shard(path).read(0, 10)
            except ShardError as e: print('refused')'''
    files = [str(p) for p in sorted(tmp_path.iterdir()) if p.suffix in ('.bin', '.npy', '.zst')]
    out = subprocess.run([sys.executable, '-c', code, *files], capture_output=True, text=True, timeout=60)
    assert out.stdout.split() == ['refused'] * 6, out.stderr


# ---- manifests --------------------------------------------------------------------------------------------------

@pytest.fixture
def corpus(tmp_path):
    root = tmp_path / 'c'
    for i in range(2): write_shard(root / 'math' / f'{i}.u16.zst', token_sample(20_000, seed=i))
    build_manifest(root, 'bytes', 50_000, 0).save()
    return root


def edit(root, change, rehash=True):
    "Change manifest.json; with `rehash` its own hash is made to fit again, as an attacker would."
    doc = json.loads((root / 'manifest.json').read_text())
    change(doc)
    (root / 'manifest.json').write_text(json.dumps(doc))
    if rehash:
        try: Manifest.load(root, verify='none')
        except UserError: pass
        from shohin import shards
        s = tuple(shards.Shard(**{**x, 'blocks': tuple(x['blocks'])}) for x in doc['shards'])
        doc['hash'] = Manifest(root, s, doc['tokenizer'], doc['vocab_size'], doc['eos']).hash
        (root / 'manifest.json').write_text(json.dumps(doc))


@pytest.mark.parametrize('path', ['/etc/passwd', '../secret.u16.zst', 'math/../../secret.u16.zst', 'math/./0.u16.zst', '', 'math//0.u16.zst', 'a\0b'])
def test_paths_that_leave_the_folder(corpus, path):
    write_shard(corpus.parent / 'secret.u16.zst', token_sample(20_000))
    edit(corpus, lambda d: d['shards'][0].update(path=path))
    for verify in ('none', 'quick', 'full'):
        with pytest.raises(UserError, match='not a plain path'): Manifest.load(corpus, verify=verify)
    edit(corpus, lambda d: d['shards'][0].update(path='math/0.u16.zst'))
    edit(corpus, lambda d: d.update(tokenizer='../../tokenizer.json'))
    with pytest.raises(UserError, match='not a plain path'): Manifest.load(corpus)


def test_links_that_leave_the_folder(corpus):
    write_shard(corpus.parent / 'secret.u16.zst', token_sample(20_000))
    (corpus / 'math/0.u16.zst').unlink(); (corpus / 'math/0.u16.zst').symlink_to('../../secret.u16.zst')
    with pytest.raises(UserError, match='link that leads out'): Manifest.load(corpus)
    with pytest.raises(UserError, match='link that leads out'): Manifest.load(corpus, verify='none').read(0, 0, 1)
    os.rename(corpus / 'math', corpus.parent / 'math'); (corpus / 'math').symlink_to('../math')
    with pytest.raises(UserError, match='link that leads out'): Manifest.load(corpus)


def test_names_that_no_file_can_have_and_links_in_a_circle(corpus):
    os.symlink('circle', corpus / 'circle')
    for what, says in ((dict(path='math/\ud800.u16.zst'), 'cannot be the name'), (dict(path='math/' + 'x' * 5000), 'too long'), (dict(path='circle/0.u16.zst'), 'circle'),
                       (dict(domain='\ud800'), 'is not text')):
        edit(corpus, lambda d, what=what: d['shards'][0].update(path='math/0.u16.zst', domain='math'))
        edit(corpus, lambda d, what=what: d['shards'][0].update(what))
        with pytest.raises(UserError, match=says) as e: Manifest.load(corpus)
        assert '\n' not in str(e.value)


def test_a_tokenizer_that_is_no_file_of_the_corpus(corpus):
    "A manifest may name one: never by a link that leads out, and never a pipe, which would be waited for without end."
    (corpus.parent / 'secret.json').write_text('{}')
    os.symlink('../secret.json', corpus / 'out.json'); os.mkfifo(corpus / 'pipe.json')
    for name, says in (('out.json', 'leads out'), ('pipe.json', 'regular file'), ('math', 'regular file'), ('absent.json', 'No such file')):
        edit(corpus, lambda d, name=name: d.update(tokenizer=name))
        m = Manifest.load(corpus)
        with pytest.raises(UserError, match=says): peek(m, InterleavedOrder(m, 4, 16), 0)


@pytest.mark.parametrize('change', [
    lambda d: d['shards'][0].update(tokens=19_999), lambda d: d['shards'][0].update(tokens=0), lambda d: d['shards'][0].update(tokens=True),
    lambda d: d['shards'][0].update(tokens='20000'), lambda d: d['shards'][0].update(tokens=2**70), lambda d: d['shards'][0].update(size=-1),
    lambda d: d['shards'][0].update(dtype='float32'), lambda d: d['shards'][0].update(dtype='uint32'), lambda d: d['shards'][0].update(format='exe'),
    lambda d: d['shards'][0].update(format='raw'), lambda d: d['shards'][0].update(blocks=[]), lambda d: d['shards'][0].update(blocks=[1, 2, 3]),
    lambda d: d['shards'][0].update(blocks=['0' * 16] * 3), lambda d: d['shards'][0].update(path=5), lambda d: d['shards'][1].update(path='math/0.u16.zst'),
    lambda d: d['shards'][0].pop('sha256'), lambda d: d.update(shards=[]), lambda d: d.update(shards=7), lambda d: d['shards'].append(3),
    lambda d: d.update(vocab_size=-1), lambda d: d.update(vocab_size=1e9), lambda d: d.update(eos=50_000), lambda d: d.update(eos='x'),
    lambda d: d.update(shohin_manifest=2), lambda d: d.update(meta=[]), lambda d: d.pop('tokenizer'), lambda d: d.clear()])
def test_manifests_that_lie(corpus, change):
    edit(corpus, change, rehash=False)
    with pytest.raises(UserError) as e: Manifest.load(corpus)
    assert '\n' not in str(e.value) and str(corpus) in str(e.value)


@pytest.mark.parametrize('content', [b'', b'{', b'[]', b'7', b'null', b'"x"', b'\xff\xfe', b'[' * 100_000, b'{"shohin_manifest": ' + b'9' * 5000 + b'}', b'{"shohin_manifest": NaN}'])
def test_files_that_are_no_manifest(corpus, content):
    (corpus / 'manifest.json').write_bytes(content)
    with pytest.raises(UserError, match=r'manifest\.json'): Manifest.load(corpus)


def test_a_missing_or_huge_manifest(corpus):
    os.truncate(corpus / 'manifest.json', MAX_MANIFEST + 1)
    with pytest.raises(UserError, match='too large'): Manifest.load(corpus)
    (corpus / 'manifest.json').unlink()
    with pytest.raises(UserError, match='No such file'): Manifest.load(corpus)


@fuzz
@given(data=st.data())
def test_fuzzed_manifests(corpus, data):
    raw = (corpus / 'manifest.json').read_bytes()
    tokens = [token_sample(20_000, seed=i) for i in range(2)]
    try:
        (corpus / 'manifest.json').write_bytes(mutate(raw, data.draw(mutations)))
        m = Manifest.load(corpus)
        assert all(np.array_equal(m.read(i, 0, 20_000), tokens[i]) for i in range(2))
    except UserError as e: assert '\n' not in str(e)
    finally: (corpus / 'manifest.json').write_bytes(raw)


def test_content_swapped_between_shards_is_refused_by_name(corpus):
    a, b = corpus / 'math/0.u16.zst', corpus / 'math/1.u16.zst'
    tmp = a.read_bytes(); a.write_bytes(b.read_bytes()); b.write_bytes(tmp)
    with pytest.raises(ShardError, match=r'math/0\.u16\.zst'): Manifest.load(corpus)


def test_a_change_outside_the_sampled_blocks_with_the_time_put_back(corpus):
    "What the quick check cannot see in a file without checksums, the full one does; in ours the read itself does."
    for kind in ('llmc', 'u16.zst'):
        folder = corpus.parent / kind
        folder.mkdir()
        path = write(kind, folder, token_sample(300_000))
        build_manifest(folder, 'bytes', 50_000, 0).save()
        at, raw = path.stat(), bytearray(path.read_bytes())
        raw[len(raw) // 3] ^= 1
        path.write_bytes(raw); os.utime(path, ns=(at.st_atime_ns, at.st_mtime_ns))
        with pytest.raises(ShardError): Manifest.load(folder, verify='full')
        quick = Manifest.load(folder)
        if kind == 'u16.zst':
            with pytest.raises(ShardError, match='damaged'): quick.read(0, 0, 300_000)
        path.write_bytes(raw)                                           # the time moves on, as any ordinary write does
        with pytest.raises(ShardError): Manifest.load(folder)
