"Peek: what it shows is what the step reads, hostile text stays text, and every wrong question has one clear answer."
import base64
import hashlib
import html.parser
import io
import itertools
import json
import re
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.console import Console
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from shohin.order import ContiguousOrder, InterleavedOrder
from shohin.peek import (
    Doc,
    PeekBatch,
    PeekResult,
    Row,
    batch_stats,
    bytes_decoder,
    make_decoder,
    peek,
    row_stats,
    token_stats,
    visible,
    visible_runs,
)
from shohin.shards import Manifest, Shard, UserError, build_manifest, write_shard

EOS = 256
HOSTILE = ['\x1b]8;;http://x\x07click\x1b]8;;\x07', '\x1b[2J\x1b[31m', '\x9b31m\x90q\x9c', '[bold red]x[/] [link=http://x]y[/link] [/', ':smile: @here',
           'if a\u202e } \u2066// b\u2069', '</script><script>alert(1)</script>', '"><img src=x onerror=alert(1)>', "' onload='x", '<!--', ']]>', '&lt;',
           '\ud800 \udfff', '\x00\x7f\x85\u2028\u2029\ufeff\u200b', '\r\n\t\x08\x0b\x0c', 'a\u0301' * 50, '\U000e0041\U000e007f', '\n leading']


def result_of(text: str) -> PeekResult:
    "A result in which the corpus, its file names and its domains are all hostile."
    docs = (Doc(0, len(text), True, True, text), Doc(len(text), len(text) + 1, True, False, text[::-1]))
    tokens = np.frombuffer(text.encode('utf-8', 'surrogatepass'), np.uint8)
    row = Row(3, 0, f'{text}/part.bin', 0, len(text) + 1, text, docs, row_stats(tokens, text), tokens)
    return PeekResult(3, 0, 1, 'abc', {}, (PeekBatch(3, (row,), {text: 1}, batch_stats([tokens], bytes_decoder)),))


def on_terminal(renderable, **kw) -> str:
    console = Console(file=io.StringIO(), width=80, **kw)
    console.print(renderable)
    return console.file.getvalue()


hostile = st.one_of(st.text(st.characters(), min_size=1), st.lists(st.sampled_from(HOSTILE), min_size=1, max_size=4).map(''.join))


def examples(test):
    for text in HOSTILE: test = example(text)(test)
    return test


@given(hostile)
@examples
def test_visible_leaves_only_printable_text_and_can_be_read_back(text):
    shown = visible(text)
    assert shown.isprintable() or not shown
    back = ''.join(run.encode('ascii').decode('unicode_escape') if esc else run for run, esc in visible_runs(text))
    assert back == text


@settings(max_examples=60, deadline=None)
@given(hostile)
@examples
def test_nothing_raw_reaches_the_terminal(text):
    "Without colours not one control character but the line ends; with them nothing but rich's own colour sequences."
    result = result_of(text)
    plain = on_terminal(result.render())
    assert plain.replace('\n', '').isprintable()
    coloured = on_terminal(result, force_terminal=True, color_system='truecolor')
    assert re.sub(r'\x1b\[[0-9;]*m', '', coloured) == plain
    unwrapped = on_terminal(result.render(None)).replace('\n', '').replace(' ', '')
    if text.isascii(): assert visible(text).replace(' ', '') in unwrapped  # and the text is all there: markup was not taken as markup


class Page(html.parser.HTMLParser):
    "Collects the tags, attributes and text of a page as a browser would see them."
    def __init__(self):
        super().__init__()
        self.tags, self.attrs, self.text = [], [], ''
        self.other = []

    def handle_starttag(self, tag, attrs): self.tags.append(tag); self.attrs += attrs
    def handle_data(self, data): self.text += data
    def handle_comment(self, data): self.other.append(data)
    def handle_pi(self, data): self.other.append(data)
    def unknown_decl(self, data): self.other.append(data)


def page_of(text: str) -> Page:
    page = Page()
    page.feed(text)
    page.close()
    return page


@settings(max_examples=60, deadline=None)
@given(hostile)
@examples
def test_nothing_from_the_corpus_becomes_markup(text):
    source = result_of(text).to_html()
    source.encode('utf-8')                                             # no lone surrogate
    assert re.sub(r'[\n\t]', '', source).isprintable()
    page, calm = page_of(source), page_of(result_of('calm').to_html())
    assert not page.other
    assert {t for t in page.tags} <= {*calm.tags, 'span'} and 'script' not in page.tags
    ours = {('class', 'esc'), ('class', 'domain'), *calm.attrs}
    assert set(page.attrs) <= ours                                     # every attribute is one of ours, word for word
    shown = ''.join(run for run, _ in visible_runs(text, '\n\t'))
    assert shown in page.text                                          # and the text is all there


@given(hostile)
@examples
def test_json_is_printable_ascii(text):
    "With controls as escapes, and it reads back to the same text."
    out = result_of(text).to_json()
    assert out.isascii() and out.isprintable()
    back = json.loads(out)['batches'][0]['rows'][0]['docs'][0]['text']
    assert back == text.encode('utf-16', 'surrogatepass').decode('utf-16', 'surrogatepass')  # JSON joins split surrogate pairs


# --- what it shows is what the step reads

DOCS = {'code': ['def f(x): return x\n', 'import os\n\n\nprint(os.name)  # ok\n', 'x = {\n\t"a": 1}\n'],
        'math': ['Let $x^2 = 2$. Then $x = \\sqrt{2}$.', 'Ἔστω √2 ἄρρητος 数学 ∎', '']}


def write_corpus(root, docs=DOCS, repeat=40, name='0.u16.zst', encode=lambda d: [*d.encode()], eos=EOS, first=False):
    "A shard a domain; returns where documents truly begin in each."
    begins = {}
    for domain, texts in docs.items():
        ids, starts = [], []
        for text in texts * repeat:
            starts.append(len(ids))
            ids += [eos, *encode(text)] if first else [*encode(text), eos]
        write_shard(root / domain / name, np.array(ids, np.uint16))
        begins[domain] = (starts, len(ids))
    return begins


@pytest.fixture(scope='module')
def corpus(tmp_path_factory):
    root = tmp_path_factory.mktemp('corpus')
    begins = write_corpus(root)
    manifest = build_manifest(root, 'bytes', 257, EOS)
    manifest.save()
    return manifest, begins


@pytest.mark.parametrize('Order', [ContiguousOrder, InterleavedOrder])
@pytest.mark.parametrize('step,rank,world', [(0, 0, 1), (3, 1, 2), (8, 3, 4), (10**9, 0, 2)])
def test_rows_are_those_of_the_order(corpus, Order, step, rank, world):
    manifest, begins = corpus
    order = Order(manifest, 4, 50)
    batch, = peek(manifest, order, step, rank, world).batches
    spans = order.spans(step)
    assert [r.row for r in batch.rows] == list(range(4))[rank * 4 // world:(rank + 1) * 4 // world]
    assert batch.domains == {d: n for d in manifest.domains if (n := sum(s.domain == d for s in spans))}
    for r in batch.rows:
        s = spans[r.row]
        assert (r.step, r.shard, r.start, r.stop, r.domain) == (step, f'{s.domain}/0.u16.zst', s.start, s.stop, s.domain)
        np.testing.assert_array_equal(r.tokens, manifest.read(s.shard, s.start, s.stop))
        starts, length = begins[r.domain]
        assert [d.start for d in r.docs] == [r.start, *(b for b in starts if r.start < b < r.stop)]
        assert [d.stop for d in r.docs] == [*(d.start for d in r.docs[1:]), r.stop]
        for d in r.docs:
            assert d.opens == (d.start in starts) and d.closes == (d.stop in starts or d.stop == length)
            assert d.text == bytes(t for t in r.tokens[d.start - r.start:d.stop - r.start].tolist() if t < 256).decode('utf-8', 'replace')


def test_documents_that_begin_with_eos(tmp_path):
    "As modded-nanogpt writes them."
    begins, length = write_corpus(tmp_path, {'a': DOCS['code']}, name='0.bin', first=True)['a']
    manifest = build_manifest(tmp_path, 'bytes', 257, EOS)
    for step in range(4):
        for r in peek(manifest, ContiguousOrder(manifest, 3, 40), step).batches[0].rows:
            assert [d.start for d in r.docs if d.opens] == [b for b in begins if r.start <= b < r.stop]
            assert [d.stop for d in r.docs if d.closes] == [b for b in [*begins, length] if r.start < b <= r.stop]


def test_a_document_that_ends_with_its_shard(tmp_path):
    write_corpus(tmp_path, {'a': ['five!']}, repeat=5)                  # 30 tokens: the last row of 10 ends with the shard
    manifest = build_manifest(tmp_path, 'bytes', 257, EOS)
    rows = peek(manifest, ContiguousOrder(manifest, 3, 9), 0).batches[0].rows
    assert [(d.start, d.stop, d.opens, d.closes) for d in rows[2].docs] == [(20, 24, False, True), (24, 30, True, True)]


def test_around_stops_at_both_ends(corpus):
    manifest, _ = corpus
    order = InterleavedOrder(manifest, 2, 30)
    assert [b.step for b in peek(manifest, order, 1, around=3).batches] == [0, 1, 2, 3, 4]
    alone, among = peek(manifest, order, 7).to_dict(), peek(manifest, order, 6, around=2).to_dict()
    assert alone['batches'][0] == among['batches'][3]
    assert json.loads(peek(manifest, order, 7).to_json()) == json.loads(json.dumps(alone))


def test_render_keeps_to_its_length(corpus):
    manifest, _ = corpus
    result = peek(manifest, ContiguousOrder(manifest, 1, 200), 0)
    text = result.batches[0].rows[0].docs[0].text + result.batches[0].rows[0].docs[1].text
    short = on_terminal(result.render(chars=30))
    assert visible(text[:10]) in short and visible(text[30:45]) not in short and 'more characters' in short
    assert 'more characters' not in on_terminal(result.render(chars=None))


# --- vocabularies

def train_tokenizer(path):
    t = Tokenizer(models.BPE())
    t.pre_tokenizer, t.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    t.train_from_iterator([d for ds in DOCS.values() for d in ds] * 5, trainers.BpeTrainer(
        vocab_size=400, special_tokens=['<eos>'], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    t.save(str(path))
    return t


def test_hugging_face_tokenizer(tmp_path):
    "The manifest's own tokenizer decodes every whole document back; an id that it lacks is named."
    t = train_tokenizer(tmp_path / 'tokenizer.json')
    write_corpus(tmp_path, encode=lambda d: t.encode(d).ids, eos=0)
    manifest = build_manifest(tmp_path, 'tokenizer.json', 1000, 0)
    rows = peek(manifest, InterleavedOrder(manifest, 4, 60), 2).batches[0].rows
    whole = [d.text for r in rows for d in r.docs if d.opens and d.closes]
    assert len(whole) > 5 and set(whole) <= {d for ds in DOCS.values() for d in ds}
    assert make_decoder('tokenizer.json', tmp_path)([*t.encode('x = 1').ids, 999, 998]) == 'x = 1⟨999⟩⟨998⟩'


def test_tiktoken_vocabulary(corpus, tmp_path):
    "A file that spells the bytes out decodes as 'bytes' does, whatever row it is given."
    (tmp_path / 'v.tiktoken').write_bytes(b''.join(base64.b64encode(bytes([i])) + f' {i}\n'.encode() for i in range(256)))
    manifest, _ = corpus
    order = ContiguousOrder(manifest, 4, 33)
    for step in range(3):
        theirs = peek(manifest, order, step, tokenizer=tmp_path / 'v.tiktoken').to_dict()
        assert theirs == peek(manifest, order, step).to_dict()


ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
HALVES = ['a', 'Ġ', 'âĪ', 'ļ', 'Ã', '©', 'é', 'í', 'łĢ', 'ðŁ', 'ĺ', 'Ģ', 'ÿ', 'ô', 'Ċ']                       # bytes, written byte-level; many are half a character
FOREIGN = ['', 'a b', '\n', '√', '日本', 'Ġ日', '\xad', 'e\u0301', '<eos>', '<|x|>', '\x00']                     # some of them with characters that are no bytes


def library_text(tokenizer, ids) -> str:
    "What `tokenizers` itself makes of each run of ids it has."
    return ''.join(tokenizer.decode(list(run), skip_special_tokens=False) if known else ''.join(f'⟨{i}⟩' for i in run)
                   for known, run in itertools.groupby(ids, lambda i: tokenizer.id_to_token(i) is not None))


@st.composite
def vocabularies(draw):
    "Byte-level vocabularies with and without some bytes, with gaps between the ids, odd tokens and added ones."
    tokens = draw(st.lists(st.one_of(st.sampled_from(ALPHABET + HALVES + FOREIGN), st.text(st.sampled_from(ALPHABET), max_size=4), st.text(max_size=3)), min_size=1, max_size=40, unique=True))
    at = draw(st.lists(st.integers(0, 300), min_size=len(tokens), max_size=len(tokens), unique=True))
    t = Tokenizer(models.WordLevel(dict(zip(tokens, at, strict=True)), unk_token=draw(st.sampled_from(tokens))))
    t.decoder = decoders.ByteLevel()
    added = draw(st.lists(st.one_of(st.sampled_from(HALVES + FOREIGN), st.text(max_size=4)), max_size=6))
    for text in added: (t.add_special_tokens if draw(st.booleans()) else t.add_tokens)([AddedToken(text, normalized=draw(st.booleans()))])
    return t, [*at, *t.get_vocab().values()]


@settings(max_examples=300, deadline=None)
@given(vocabularies(), st.data())
def test_byte_level_text_is_the_librarys_to_the_character(tmp_path_factory, vocabulary, data):
    t, known = vocabulary
    t.save(path := str(tmp_path_factory.mktemp('v') / 'tokenizer.json'))
    t, decode = Tokenizer.from_file(path), make_decoder(path)
    for _ in range(3):                                                 # the later ones meet what the earlier ones learned
        ids = data.draw(st.lists(st.one_of(st.sampled_from(known), st.integers(0, 400), st.sampled_from([5000, 1 << 22, (1 << 32) - 1])), max_size=40))
        assert decode(np.array(ids, np.uint32)) == decode(ids) == library_text(t, ids)


def test_every_kind_of_broken_utf8_is_shown_as_the_library_shows_it(tmp_path):
    "All pairs of bytes, and all fours of bytes at which UTF-8 decides."
    t = train_tokenizer(tmp_path / 'tokenizer.json')
    decode, of = make_decoder('tokenizer.json', tmp_path), {}
    for i in range(t.get_vocab_size()): of.setdefault(t.id_to_token(i), i)
    plain = [c for c in ALPHABET if ord(c) < 256]
    byte = {ord(c): of[c] for c in plain} | {b: of[c] for b, c in zip([b for b in range(256) if chr(b) not in plain], ALPHABET[len(plain):], strict=True)}
    edges = [0x00, 0x7f, 0x80, 0x8f, 0x90, 0x9f, 0xa0, 0xbf, 0xc0, 0xc1, 0xc2, 0xdf, 0xe0, 0xe1, 0xed, 0xee, 0xef, 0xf0, 0xf1, 0xf4, 0xf5, 0xff]
    for alphabet, n in ((range(256), 2), (edges, 4)):
        raw = b'x'.join(map(bytes, itertools.product(alphabet, repeat=n)))
        ids = [byte[b] for b in raw]
        assert decode(ids) == t.decode(ids, skip_special_tokens=False) == raw.decode('utf-8', 'replace')


@pytest.mark.parametrize('decoder', [None, decoders.Metaspace(), decoders.WordPiece(), decoders.BPEDecoder(), decoders.ByteFallback(), decoders.CTC(), decoders.Fuse(),
                                     decoders.Sequence([decoders.ByteLevel()]), decoders.Sequence([decoders.ByteLevel(), decoders.Strip(' ', 1, 1)])])
def test_any_other_decoder_is_the_librarys_own(tmp_path, decoder):
    tokens = ['▁the', 'Ġa', '##b', 'c</w>', '<0xE2>', '<0x88>', 'Ã', '©', 'x']
    t = Tokenizer(models.WordLevel({w: i for i, w in enumerate(tokens)}, unk_token='x'))
    if decoder is not None: t.decoder = decoder
    t.save(str(tmp_path / 'tokenizer.json'))
    for ids in ([0, 1, 2, 3], [4, 5, 4], [6, 7, 6], [8, 99, 0, 0], [1, 1]):
        assert make_decoder('tokenizer.json', tmp_path)(ids) == library_text(t, ids)


@pytest.mark.parametrize('content', [b'', b'{', b'{"version": "1.0"}', b'YQ== zero', b'YQ==', b'\xff\xfe\x00', b'!!!! 1', b'{"model": {"type": "BPE"}}', b'YQ== 0 0'])
def test_broken_tokenizer_files(corpus, tmp_path, content):
    (tmp_path / 'tok').write_bytes(content)
    manifest, _ = corpus
    with pytest.raises(UserError, match='tok') as e: peek(manifest, ContiguousOrder(manifest, 4, 33), 0, tokenizer=tmp_path / 'tok')
    assert '\n' not in str(e.value)


# --- wrong questions

def one_line(f, *names):
    with pytest.raises(UserError) as e: f()
    assert '\n' not in str(e.value)
    for name in names: assert name in str(e.value)


@pytest.mark.parametrize('kw,names', [(dict(step=-1), ['step', '-1']), (dict(step=2**60), ['step']), (dict(step=0, rank=2, world=2), ['rank 2', '2 ranks']),
                                      (dict(step=0, rank=-1), ['rank -1']), (dict(step=0, world=3), ['3 ranks']), (dict(step=0, world=0), ['0 ranks']),
                                      (dict(step=0, around=-1), ['around=-1']), (dict(step=0, around=10**9), ['around=1000000000', 'too many']), (dict(step=0, tokenizer='nowhere.json'), ['nowhere.json'])])
def test_wrong_questions(corpus, kw, names):
    manifest, _ = corpus
    one_line(lambda: peek(manifest, ContiguousOrder(manifest, 4, 33), **kw), *names)


def test_missing_and_changed_shards(tmp_path):
    write_corpus(tmp_path)
    manifest = build_manifest(tmp_path, 'bytes', 257, EOS)
    fresh = lambda: type(manifest)(tmp_path, manifest.shards, 'bytes', 257, EOS)
    ask = lambda m: peek(m, InterleavedOrder(m, 4, 33), 0)
    ask(fresh())
    path = tmp_path / 'math' / '0.u16.zst'
    content = path.read_bytes()
    write_shard(path, np.arange(200, dtype=np.uint16).repeat(30))
    one_line(lambda: ask(fresh()), 'math/0.u16.zst')
    path.write_bytes(content[:len(content) // 2])
    one_line(lambda: ask(fresh()), 'math/0.u16.zst')
    path.unlink()
    one_line(lambda: ask(fresh()), 'math/0.u16.zst')


# --- statistics against the plainest way to compute them

@given(st.lists(st.integers(0, 5), max_size=60))
def test_token_stats_against_counting(ids):
    s = token_stats(ids, eos=3)
    runs, run = [0], 0
    for i, t in enumerate(ids):
        run = run + 1 if i and ids[i - 1] == t else 1
        runs.append(run)
    p = [ids.count(t) / len(ids) for t in set(ids)]
    assert (s['tokens'], s['distinct'], s['eos'], s['longest_run']) == (len(ids), len(set(ids)), ids.count(3), max(runs))
    assert s['entropy'] == pytest.approx(-sum(x * np.log2(x) for x in p))


@given(hostile)
@examples
def test_text_shares_against_counting(text):
    s, n = row_stats([0], text), len(text)
    assert s['digits'] == sum(c in '0123456789' for c in text) / n
    assert s['whitespace'] == sum(c in ' \t\n\r\f\v' for c in text) / n
    assert s['non_ascii'] == sum(not c.isascii() for c in text) / n
    assert s['latex'] == sum(c in '\\{}$^_&' for c in text) / n
    assert s['zlib'] > 0


def test_batch_stats_show_the_odd_row():
    calm = [*('The cat sat on the mat, the dog lay on the log, and nobody minded them at all today. ' * 2).encode()][:128]
    odd = [65] * 128
    one, both = batch_stats([calm, calm], bytes_decoder), batch_stats([calm, odd], bytes_decoder)
    assert both['longest_run'] == 128 and both['entropy_min'] == 0 and both['zlib_min'] < one['zlib_min'] / 4
    assert both['entropy_max'] == one['entropy_max']
    assert batch_stats([[65, EOS]], bytes_decoder, EOS)['digits'] == 0  # an EOS is not the text ⟨256⟩


# --- speed and imports

def test_a_step_costs_the_same_anywhere_in_a_huge_shard(tmp_path):
    "A shard of 2^31 - 1 tokens (sparse on disk): no step takes over 100 ms."
    n, path = 2**31 - 1, tmp_path / 'big' / '0.bin'
    path.parent.mkdir()
    with open(path, 'wb') as f:
        f.write(np.array([20240520, 1, n] + [0] * 253, np.int32).tobytes())
        f.truncate(1024 + 2 * n)
    blocks = (hashlib.sha256(bytes(8192)).hexdigest()[:16],) * 3
    shard = Shard('big/0.bin', 'big', 'llmc', 'uint16', n, '0' * 64, 1024 + 2 * n, path.stat().st_mtime_ns, blocks)
    manifest = Manifest(tmp_path, (shard,), 'bytes', 257, EOS)
    for order in (ContiguousOrder(manifest, 12, 256), InterleavedOrder(manifest, 12, 256)):
        for step in (0, 690_000, 10**9):
            took = []
            for _ in range(3):
                start = time.perf_counter()
                peek(manifest, order, step)
                took.append(time.perf_counter() - start)
            assert min(took) < .1


def test_peek_needs_no_torch():
    code = "import sys, shohin.peek; print([m for m in ('torch', 'pandas', 'matplotlib', 'rich', 'tokenizers') if m in sys.modules])"
    assert subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True).stdout.strip() == '[]'
