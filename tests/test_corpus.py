"""corpus: the same text gives the same shards everywhere, probes are not in training, and bad input ends in one line."""
import gzip
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tracemalloc
import venv
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shohin.corpus import (
    DOMAINS,
    EOS_TEXT,
    MAX_OVERLAP,
    NGRAM,
    Doc,
    Tokenizer,
    build_corpus,
    cut,
    decode,
    doc_order,
    excerpt,
    get_wheels,
    load_docs,
    load_prepared,
    local_sources,
    ngrams,
    prepare,
    prepare_wheels,
    read_lock,
    stdlib_sources,
    store_docs,
)
from shohin.shards import Manifest, UserError, open_shard

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / 'data' / 'cache'
build_small = partial(build_corpus, sources=stdlib_sources(250_000), shard_tokens=15_000, probe_bytes=6_000)


def one_line(error) -> str:
    text = str(error.value)
    assert text and '\n' not in text and 'Traceback' not in text
    return text

def all_tokens(manifest, domain):
    return np.concatenate([manifest.read(i, 0, s.tokens) for i, s in enumerate(manifest.shards) if s.domain == domain])

def probe_texts(manifest, domain):
    entry = manifest.meta['probes'][domain]
    tokens = open_shard(manifest.root / entry['path']).read(0, entry['tokens'])
    assert tokens[-1] == manifest.eos
    return decode(manifest, tokens[:-1]).split(EOS_TEXT)

def naive_ngrams(text: str, n=NGRAM):
    "The definition in the plainest words: lower-cased runs of letters, digits and bytes above 127, n in a row."
    w = re.findall(rb'[0-9a-z\x80-\xff]+', re.sub(rb'[A-Z]', lambda m: m[0].lower(), text.encode()))
    return [b' '.join(w[i:i + n]) for i in range(len(w) - n + 1)]

@pytest.fixture(scope='module')
def small(tmp_path_factory):
    return build_small(tmp_path_factory.mktemp('small') / 'corpus')


# ---- what a corpus is

def test_shards_are_exact_single_domain_and_described(small):
    assert small.domains == ('tables', 'prose', 'code_python')
    for shard in small.shards:
        assert shard.tokens == 15_000 and shard.dtype == 'uint16'
        assert re.fullmatch(rf'{shard.domain}/shard_\d{{5}}\.u16\.zst', shard.path)
    assert Manifest.load(small.root, verify='full').hash == small.hash
    files = {p.relative_to(small.root).as_posix() for p in small.root.rglob('*') if p.is_file()}
    assert files == {'manifest.json'} | {s.path for s in small.shards} | {p['path'] for p in small.meta['probes'].values()}

def test_tokens_are_the_documents_each_ended_once(small, tmp_path):
    (tmp_path / 'd').mkdir()
    prepare(stdlib_sources(250_000), tmp_path / 'd', 6_000)
    prepared = load_prepared(tmp_path / 'd')
    for domain in small.domains:
        docs, train = prepared.docs[domain], prepared.train[domain]
        want = {docs[i] for i in np.flatnonzero(train)}
        t = all_tokens(small, domain)
        got = [p[p < 256].astype(np.uint8).tobytes() for p in np.split(t, np.flatnonzero(t == 256))]
        assert set(got[:-1]) <= want and len(set(got)) == len(got)          # whole documents, none twice
        assert any(d.startswith(got[-1]) for d in want)                      # the last one cut by the end of the last shard
        total = sum(len(d) + 1 for d in want)
        assert len(t) == total // 15_000 * 15_000 and small.meta['domains'][domain]['tokens'] == total

@pytest.mark.parametrize('kind', ['bytes', 'bpe'])
def test_doc_seed_changes_what_meets_and_nothing_else(kind, tmp_path):
    a, again, b = (build_small(tmp_path / name, doc_seed=seed, tokenizer=kind, shard_tokens=10_000, vocab_size=512)
                   for name, seed in [('a', 0), ('again', 0), ('b', 1)])
    assert a.hash == again.hash != b.hash
    assert [s.path for s in a.shards] == [s.path for s in b.shards]
    assert a.meta['probes'] == b.meta['probes'] and a.meta['domains'] == b.meta['domains']
    if kind == 'bpe':
        assert len({(m.root / 'tokenizer.json').read_bytes() for m in (a, again, b)}) == 1
        assert a.vocab_size == 512 and a.tokenizer == 'tokenizer.json'
        ratios = [f['bytes_per_token'] for f in a.meta['domains'].values()]
        assert max(ratios) > 1.1 * min(ratios)                                # losses per token are not comparable
        for p in a.meta['probes'].values(): assert 1.2 < p['bytes'] / p['tokens'] < 4

def test_hash_is_the_same_on_every_machine(tmp_path):
    "Text that no machine changes, so the hash is known. A change here changes every corpus: is that meant?"
    with open(tmp_path / 'squares.jsonl', 'w', encoding='utf8') as f:
        for n in range(3000): f.write(json.dumps({'text': f'{n} times {n} is {n * n}, ' * (n % 40)}) + '\n')
    with open(tmp_path / 'lines.jsonl', 'w', encoding='utf8') as f:
        for line in (ROOT / 'LICENSE').read_text(encoding='utf8').split('\n\n'): f.write(json.dumps({'text': line}) + '\n')
    m = build_corpus(tmp_path / 'out', sources=local_sources({'squares': [tmp_path / 'squares.jsonl'], 'law': [tmp_path / 'lines.jsonl']}),
                     shard_tokens=2_000, doc_seed=7)
    probes = [p['sha256'][:16] for p in m.meta['probes'].values()]
    assert (m.hash[:16], *probes) == PINNED

PINNED = ('2b7a0085d1ee433f', '28288082b670389f', 'a4e339dcb44f8da4')

def test_max_bytes_takes_the_same_documents_for_every_seed(tmp_path):
    a, b = (build_small(tmp_path / str(s), doc_seed=s, max_bytes_per_domain=60_000, shard_tokens=1_000) for s in (0, 1))
    for d in a.domains:
        assert 60_000 <= a.meta['domains'][d]['bytes'] < 80_000
        assert a.meta['domains'][d] == b.meta['domains'][d]


# ---- probes

def test_probes_are_not_in_training(small):
    for domain, entry in small.meta['probes'].items():
        texts = probe_texts(small, domain)
        assert sum(len(t.encode()) for t in texts) == entry['bytes'] >= 6_000
        grams = [g for t in texts for g in naive_ngrams(t)]
        trained = set()
        for d in small.domains:
            tokens = all_tokens(small, d)
            for piece in np.split(tokens, np.flatnonzero(tokens == 256)): trained.update(naive_ngrams(decode(small, piece[piece < 256])))
        share = sum(g in trained for g in grams) / len(grams)
        assert share <= entry['ngram_overlap'] < MAX_OVERLAP      # the last, dropped, shard holds the difference

def numbered(seed, n, length=60):
    r = random.Random(seed)
    return [' '.join(str(r.randrange(10 ** 6)) for _ in range(length)) for _ in range(n)]

def test_near_copies_never_become_probes(tmp_path):
    twins = numbered(1, 50)
    docs = twins + [f'{t} almost' for t in twins] + (alone := numbered(2, 30))
    prepare({'a': lambda: [Doc(t) for t in docs], 'b': lambda: [Doc(t) for t in numbered(3, 30)]}, tmp_path, 900)
    p = load_prepared(tmp_path)
    assert p.probes['a']['texts'] and all(t in alone for t in p.probes['a']['texts'])
    assert p.probes['a']['ngram_overlap'] == 0

def test_overlap_counts_text_of_other_domains(tmp_path):
    shared, alone = numbered(1, 40), numbered(2, 10)
    prepare({'a': lambda: [Doc(t) for t in shared + alone], 'b': lambda: [Doc(f'{t} or so') for t in shared] + [Doc(t) for t in numbered(4, 20)]}, tmp_path, 800)
    assert set(load_prepared(tmp_path).probes['a']['texts']) <= set(alone)

def test_a_problem_is_held_out_with_all_its_solutions_in_every_domain(tmp_path):
    human = [Doc(f'{q} answer {q[::-1]}', f'problem {i}') for i, q in enumerate(numbered(1, 100))]
    model = [Doc(f'{d.text} {k} {k}', d.group) for d in human for k in range(5)]
    prepare({'math': lambda: human, 'math_llm': lambda: model, 'web': lambda: [Doc(t) for t in numbered(5, 100)]}, tmp_path, 2_000)
    p = load_prepared(tmp_path)
    held = [set(p.docs[d].group[~p.train[d]].tolist()) for d in ('math', 'math_llm')]
    assert held[0] == held[1] and 2 <= len(held[0]) < 50
    assert (~p.train['math_llm']).sum() == 5 * (~p.train['math']).sum()

def test_nothing_to_hold_out_is_said(tmp_path):
    text = numbered(1, 1)[0]
    with pytest.raises(UserError) as e: prepare({'a': lambda: [Doc(f'{text} {i}') for i in range(50)]}, tmp_path, 500)
    assert 'domain a' in one_line(e)

@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(alphabet='aBc 9.\né한\n', max_size=40), min_size=1, max_size=6), st.integers(1, 4))
def test_ngrams_are_those_of_the_definition(texts, n):
    data = [t.encode() for t in texts]
    got, doc = ngrams(np.frombuffer(b''.join(data), np.uint8), np.cumsum([len(d) for d in data]), n)
    want = [(g, i) for i, t in enumerate(texts) for g in naive_ngrams(t, n)]
    assert list(doc) == [i for _, i in want]
    assert len({*zip(got.tolist(), (g for g, _ in want), strict=True)}) == len(set(got.tolist())) == len({g for g, _ in want})

@given(st.text(min_size=1, max_size=200), st.integers(0, 2 ** 64 - 1), st.integers(8, 50))
@settings(max_examples=60, deadline=None)
def test_excerpts_are_text_from_the_document(text, key, limit):
    data = text.encode()
    piece = excerpt(data, key, limit)
    assert 0 < len(piece) <= limit and piece.decode() in text


# ---- pieces

@given(st.lists(st.integers(0, 30), max_size=8), st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_cut_loses_only_the_tail(sizes, size):
    ends = np.cumsum([0, *sizes])
    pieces = list(cut((np.arange(a, b, dtype=np.uint32) for a, b in pairwise(ends)), size))
    assert [len(p) for p in pieces] == [size] * (ends[-1] // size)
    assert np.array_equal(np.concatenate([*pieces, []]), np.arange(ends[-1] // size * size))

def test_doc_order_is_a_permutation_that_follows_the_document():
    digest = np.random.default_rng(0).integers(0, 2 ** 63, 5000, dtype=np.uint64)
    a, b = doc_order(digest, 0), doc_order(digest, 1)
    assert sorted(a) == list(range(5000)) and abs(np.corrcoef(a, b)[0, 1]) < 0.05 and abs(np.corrcoef(a, np.arange(5000))[0, 1]) < 0.05
    shuffled = np.random.default_rng(1).permutation(5000)
    assert np.array_equal(digest[shuffled][doc_order(digest[shuffled], 0)], digest[a])

def test_copies_are_dropped_across_domains_and_memory_is_bounded(tmp_path):
    seen = set()
    store_docs([Doc('x'), Doc('y')], tmp_path / 'a', seen)
    store_docs([Doc('y'), Doc('z'), Doc('  \n')], tmp_path / 'b', seen)
    docs = load_docs(tmp_path / 'b')
    assert [docs[i] for i in range(len(docs))] == [b'z']
    tracemalloc.start()
    store_docs((Doc(str(i) * 2000) for i in range(3000)), tmp_path / 'c', set())     # about 20 MB of text
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (tmp_path / 'c.text').stat().st_size > 20e6 and peak < 2e6

@pytest.fixture(scope='module')
def bpe(tmp_path_factory):
    m = build_small(tmp_path_factory.mktemp('bpe') / 'corpus', tokenizer='bpe', vocab_size=700, shard_tokens=10_000)
    return Tokenizer.of(m)

@given(st.text(max_size=60))
@settings(max_examples=80, deadline=None)
def test_tokenizers_give_text_back_and_count_its_bytes(bpe, text):
    for tok in (Tokenizer(), bpe):
        ids = tok.encode(text)
        assert tok.decode(ids) == text and tok.n_bytes(ids) == len(text.encode()) and not (ids == tok.eos).any()
        assert not len(ids) or ids.max() < tok.vocab_size == len(tok.token_bytes)
        assert tok.n_bytes([tok.eos]) == 0 and tok.decode([*ids, tok.eos]) == text + EOS_TEXT

def test_half_a_character_is_shown_and_not_an_error():
    assert Tokenizer().decode(list('π'.encode()[1:])) == '\ufffd'

def test_a_document_cannot_end_itself(tmp_path):
    texts = [f'{t} {EOS_TEXT} more' for t in numbered(1, 200)]
    (tmp_path / 'a.jsonl').write_text('\n'.join(json.dumps({'text': t}) for t in texts))
    m = build_corpus(tmp_path / 'out', sources=local_sources({'a': tmp_path / 'a.jsonl'}), tokenizer='bpe', vocab_size=400, shard_tokens=500, probe_bytes=500)
    f = m.meta['domains']['a']
    ends = sum(int((m.read(i, 0, s.tokens) == m.eos).sum()) for i, s in enumerate(m.shards))
    assert f['docs'] - 3 <= ends <= f['docs']

def test_own_tokenizer(small, bpe, tmp_path):
    m = build_small(tmp_path / 'own', tokenizer=str(bpe.path), shard_tokens=10_000)
    assert m.vocab_size == 700 and 'own' not in json.dumps(m.meta) and (m.root / m.tokenizer).read_bytes() == Path(bpe.path).read_bytes()
    (tmp_path / 'bad.json').write_text('{"model": 3}')
    with pytest.raises(UserError) as e: build_small(tmp_path / 'x', tokenizer=str(tmp_path / 'bad.json'))
    assert 'bad.json' in one_line(e) and not (tmp_path / 'x').exists()

def test_the_core_needs_neither_torch_nor_tokenizers_to_open_bytes():
    code = 'import sys, shohin.corpus as c; c.Tokenizer().decode([72]); print([m for m in ("torch", "pandas", "tokenizers", "matplotlib") if m in sys.modules])'
    assert subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True).stdout.strip() == '[]'


# ---- input that cannot be used

BAD = {'latin.txt': 'café'.encode('latin-1'), 'latin.jsonl': '{"text": "é"}'.encode('latin-1'), 'field.jsonl': b'{"text": "a"}\n{"body": "b"}',
       'list.jsonl': b'["a"]', 'broken.jsonl': b'{"text": ', 'deep.jsonl': b'[' * 100_000, 'half.jsonl': b'{"text": "\\ud800"}',
       'number.jsonl': b'{"text": 3}', 'cut.jsonl.gz': gzip.compress(b'{"text": "a"}\n' * 99)[:-20], 'not.jsonl.gz': b'plain',
       'flip.jsonl.gz': gzip.compress(os.urandom(99))[:30] + b'\xff' * 50, 'empty.jsonl': b'', 'blank.txt': b' \n '}

@pytest.mark.parametrize('name', BAD)
def test_bad_text_is_one_line_and_leaves_nothing(name, tmp_path):
    (tmp_path / name).write_bytes(BAD[name])
    with pytest.raises(UserError) as e: build_corpus(tmp_path / 'out', sources=local_sources({'mine': [tmp_path / name]}))
    line = one_line(e)
    assert name in line or 'domain mine: no documents' in line
    if name in ('field.jsonl', 'half.jsonl', 'number.jsonl', 'list.jsonl', 'broken.jsonl', 'deep.jsonl'): assert re.search(r'line \d', line)
    assert [p.name for p in tmp_path.iterdir()] == [name]

@pytest.mark.parametrize('call, says', [
    (dict(sources=local_sources({'mine': ['no such file.txt']})), 'no such file.txt'),
    (dict(sources=local_sources({'mine': ['.']})), 'cannot be read'),
    (dict(sources=local_sources({'../up': ['a.txt']})), 'domain'),
    (dict(sources=local_sources({'probes': ['a.txt']})), 'domain'),
    (dict(domains=['tables', 'maths']), "'maths'"),
    (dict(shard_tokens=10 ** 9), 'do not fill a shard'),
    (dict(shard_tokens=0), 'at least 1'),
    (dict(tokenizer='gpt5'), 'tokenizer')])
def test_bad_settings_are_one_line_and_leave_nothing(call, says, tmp_path):
    with pytest.raises(UserError) as e: build_small(tmp_path / 'out', **call)
    assert says in one_line(e)
    assert not list(tmp_path.iterdir())

def test_a_byte_order_mark_and_a_group_field(tmp_path):
    (tmp_path / 'a.jsonl').write_bytes(b'\xef\xbb\xbf' + b'\n'.join(json.dumps({'body': t, 'id': i // 2}).encode() for i, t in enumerate(numbered(1, 40))))
    docs = list(local_sources({'a': tmp_path / 'a.jsonl'}, field='body', group='id')['a']())
    assert len(docs) == 40 and docs[0].group == docs[1].group != docs[2].group

def test_a_long_text_file_is_cut_at_ends_of_lines(tmp_path):
    text = 'a line of text\r\n' * 200_000
    (tmp_path / 'a.txt').write_text(text, newline='')
    docs = [d.text for d in local_sources({'a': str(tmp_path / 'a.txt')})['a']()]
    assert ''.join(docs) == text and len(docs) == 4 and all(d.endswith('\n') for d in docs)


# ---- what is there stays

def test_the_same_corpus_is_found_and_another_is_not_overwritten(tmp_path):
    m = build_small(tmp_path / 'out')
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / 'out').rglob('*')}
    assert build_small(tmp_path / 'out').hash == m.hash
    with pytest.raises(UserError) as e: build_small(tmp_path / 'out', doc_seed=3)
    assert 'out' in one_line(e)
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / 'out').rglob('*')} == before and len(list(tmp_path.iterdir())) == 1

@pytest.mark.parametrize('as_file', [True, False])
def test_other_files_are_not_overwritten(as_file, tmp_path):
    out = tmp_path / 'out'
    if not as_file: out.mkdir()
    (out if as_file else out / 'thesis.txt').write_text('mine')
    with pytest.raises(UserError) as e: build_small(out)
    one_line(e)
    assert (out if as_file else out / 'thesis.txt').read_text() == 'mine' and len(list(tmp_path.iterdir())) == 1

def run_python(code, **kw):
    return subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kw)

BUILD = 'from shohin.corpus import *; m = build_corpus({out!r}, sources=stdlib_sources(250_000), shard_tokens=15_000, probe_bytes=6_000); print(m.hash)'

def test_two_processes_may_build_the_same(tmp_path, small):
    both = [run_python(BUILD.format(out=str(tmp_path / 'out'))) for _ in range(2)]
    assert [p.communicate()[0].strip() for p in both] == [small.hash] * 2
    assert [p.name for p in tmp_path.iterdir()] == ['out']

def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path):
    "The limit on a file's size is a full disk that a test may make."
    p = run_python('import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\nfrom shohin.shards import UserError\ntry:\n    '
                   + BUILD.format(out=str(tmp_path / 'out')) + '\nexcept UserError as e: print("said", e)')
    out, err = p.communicate()
    assert out.startswith('said ') and out.count('\n') == 1 and 'File too large' in out, (out, err)
    assert not list(tmp_path.iterdir())


# ---- wheels

FAKE = 'twisted-26.10.0-py3-none-any.whl'

def test_the_lock_pins_every_wheel():
    assert len(read_lock()) == 6 and all(len(w.sha256) == 64 for w in read_lock())

def test_a_folder_of_wheels_is_checked(tmp_path):
    (tmp_path / 'wheels').mkdir()
    with pytest.raises(UserError) as e: build_corpus(tmp_path / 'out', wheels=tmp_path / 'wheels')
    assert 'django==5.2.8' in one_line(e)
    (tmp_path / 'wheels' / 'Twisted-26.10.0-py3-none-any.whl').write_bytes(b'tampered')
    with pytest.raises(UserError) as e: build_corpus(tmp_path / 'out', wheels=tmp_path / 'wheels')
    assert 'Twisted-26.10.0-py3-none-any.whl' in one_line(e) and 'SHA-256' in str(e.value)
    assert [p.name for p in tmp_path.iterdir()] == ['wheels']

@pytest.mark.parametrize('tampered', [True, False])
def test_pip_that_fails_is_one_line_and_leaves_nothing(tampered, tmp_path, monkeypatch):
    "The real pip, told by its own settings to look in a folder: the wheels there are wrong, or missing."
    (tmp_path / 'index').mkdir()
    if tampered:
        for w in read_lock(): (tmp_path / 'index' / f'{w.name.replace("-", "_")}-{w.version}-py3-none-any.whl').write_bytes(b'tampered')
    monkeypatch.setenv('PIP_NO_INDEX', '1')
    monkeypatch.setenv('PIP_FIND_LINKS', str(tmp_path / 'index'))
    with pytest.raises(UserError) as e: build_corpus(tmp_path / 'data' / 'out')
    assert ('its hash differs' if tampered else 'cannot be downloaded') in one_line(e)
    assert [p for p in (tmp_path / 'data').rglob('*') if p.is_file()] == [] and not (tmp_path / 'data' / 'out').exists()

def test_a_python_without_pip_is_one_line(tmp_path, monkeypatch):
    venv.create(tmp_path / 'bare', with_pip=False)
    monkeypatch.setattr(sys, 'executable', str(tmp_path / 'bare' / 'bin' / 'python'))
    with pytest.raises(UserError) as e: get_wheels(tmp_path / 'wheels')
    assert 'ensurepip' in one_line(e)

def test_a_wheel_damaged_in_the_cache_is_named(tmp_path):
    (tmp_path / FAKE).write_bytes(b'')
    with pytest.raises(UserError) as e: get_wheels(tmp_path)
    assert FAKE in one_line(e)


# ---- the default corpus, where its wheels have been downloaded

have_wheels = pytest.mark.skipif(len(list((CACHE / 'wheels').glob('*.whl'))) < 6, reason='the default corpus has not been downloaded')

@have_wheels
def test_the_default_corpus_is_the_one_that_was_published(tmp_path):
    m = build_corpus(tmp_path / 'real', cache=CACHE)
    assert m.domains == DOMAINS == ('math', 'web', 'papers', 'code_python')
    assert m.hash == DEFAULT_HASH
    for p in m.meta['probes'].values(): assert p['tokens'] >= 64 * 257 and p['ngram_overlap'] < MAX_OVERLAP
    assert 'answers by models' not in json.dumps(m.meta['domains'])
    readme = (ROOT / 'data' / 'README.md').read_text(encoding='utf8')
    for d, f in m.meta['domains'].items():
        assert f'| {d} | {f["docs"]:,} | {f["bytes"] / 1e6:.2f} |' in readme
        assert f'{d} {m.meta["probes"][d]["ngram_overlap"]:.2%}'.replace('%', ' %') in readme

DEFAULT_HASH = '932b22db7805d60b2d72a5a6e71aa8768609f3a309895eb4d10a5664ca7be0a6'

@have_wheels
def test_mathematics_is_held_out_by_problem():
    p = prepare_wheels(CACHE)
    held = {d: set(p.docs[d].group[~p.train[d]].tolist()) for d in ('math', 'math_llm')}
    trained = {d: set(p.docs[d].group[p.train[d]].tolist()) for d in ('math', 'math_llm')}
    assert held['math_llm'] and not (held['math'] | held['math_llm']) & (trained['math'] | trained['math_llm'])

@have_wheels
def test_damaged_documents_are_extracted_again(tmp_path):
    good = prepare_wheels(CACHE)
    folder = tmp_path / good.folder.name
    shutil.copytree(good.folder, folder)
    (folder / 'math.text').write_bytes((folder / 'math.text').read_bytes()[:-1] + b'?')
    assert prepare_wheels(tmp_path, wheels=CACHE / 'wheels').key == good.key
