"Loader: every step is read once and in order, from any step on, in any process, on any number of ranks."
import importlib.util
import itertools
import json
import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from shohin.loader import Batch, Loader
from shohin.order import ContiguousOrder, InterleavedOrder, RoundRobinOrder, switch
from shohin.shards import Manifest, UserError, build_manifest, write_shard

# the machine may have fewer cores than workers; torchdata 0.11 calls what torch 2.13 deprecates
pytestmark = [pytest.mark.filterwarnings('ignore:This DataLoader will create'), pytest.mark.filterwarnings("ignore:'set_vital'")]
STOP = 11  # not a multiple of any number of workers tested
needs_torchdata = pytest.mark.skipif(importlib.util.find_spec('torchdata') is None,
                                     reason='torchdata is not installed: StatefulDataLoader is not tested (pip install torchdata)')


@pytest.fixture(scope='module')
def manifest(tmp_path_factory):
    "Three domains of two shards; every token names its shard and place, so that no two rows are alike."
    root = tmp_path_factory.mktemp('corpus')
    for d, k in itertools.product('abc', range(2)):
        at = ('abc'.index(d) * 2 + k) * 5000
        write_shard(root / d / f'{k}.u16.zst', np.arange(at, at + 3000 + 100 * k, dtype=np.uint16))
    m = build_manifest(root, 'bytes', 30000, None)
    m.save()
    return m


def switched(*args): return switch(ContiguousOrder(*args), 5, InterleavedOrder(*args))


@pytest.fixture(scope='module', params=[ContiguousOrder, RoundRobinOrder, InterleavedOrder, switched])
def order(request, manifest): return request.param(manifest, 12, 16)


@pytest.fixture(scope='module')
def truth(manifest, order):
    "Every step as the order says, read shard by shard from files opened anew."
    whole = [manifest.read(i, 0, s.tokens).astype(np.int64) for i, s in enumerate(manifest.shards)]
    return [np.stack([whole[s.shard][s.start:s.stop] for s in order.spans(step)]) for step in range(STOP + 5)]


def points(order, workers):
    "Where to interrupt: everywhere for one order; the others differ in their rows only, so once each."
    return range(STOP) if order.kind == 'interleaved' else [5] if workers in (0, 2) else []


def check(batches, truth, first=0, stop=STOP):
    "The batches are exactly steps first..stop, in order."
    batches = list(batches)
    assert [b.step for b in batches] == list(range(first, stop))
    for b in batches:
        assert isinstance(b, Batch) and b.tokens.dtype == torch.int64
        np.testing.assert_array_equal(b.tokens.numpy(), truth[b.step])


def test_batch_is_a_pure_function_of_the_step(manifest, order, truth):
    loader = Loader(order, manifest)
    for step in [7, 0, 7, 3, 15]:
        b = loader.batch(step)
        np.testing.assert_array_equal(b.tokens.numpy(), truth[step])
        assert list(b.spans) == list(order.spans(step)) and sum(b.domains.values()) == 12
        assert b.domains == {d: [s.domain for s in b.spans].count(d) for d in b.domains}


def test_reading_on_and_jumping_place_the_same_rows(manifest, order):
    "Steps are placed ahead, more and more of them while reading goes on."
    loader, ends = Loader(order, manifest), []
    for step in [*range(30), 1000, 1001, *range(7, 19), 10**6, *range(3)]:
        assert list(loader.batch(step).spans) == order.spans(step)
        ends.append(loader._placed[0] + len(loader._placed[1]))
    assert ends[29] > 60 and ends[30] == 1001


def test_a_batch_crosses_processes_narrow(manifest, order):
    b = Loader(order, manifest).batch(3)
    for tokens in (b.tokens, b.tokens + 70_000, b.tokens - 100, b.tokens << 33, b.tokens.int(), b.tokens[:, ::2], b.tokens[:0], None):
        sent = b._replace(tokens=tokens)
        got = pickle.loads(pickle.dumps(sent))
        assert type(got) is Batch and repr(got[1:]) == repr(sent[1:])
        assert got.tokens is None if tokens is None else torch.equal(got.tokens, tokens) and got.tokens.dtype == tokens.dtype
    assert len(pickle.dumps(b)) < b.tokens.nbytes


@pytest.mark.parametrize('world', [1, 2, 3, 4, 6, 12])
def test_ranks_read_the_same_global_batch(manifest, order, truth, world):
    loaders = [Loader(order, manifest, rank, world) for rank in range(world)]
    for step in range(3):
        parts = [loader.batch(step) for loader in loaders]
        np.testing.assert_array_equal(torch.cat([b.tokens for b in parts]).numpy(), truth[step])
        assert all(b.domains == parts[0].domains for b in parts)


@pytest.mark.parametrize('workers', range(5))
def test_resume_at_every_step_with_plain_dataloader(manifest, order, truth, workers):
    "Without a StatefulDataLoader the position is the number of the last batch used."
    for k in points(order, workers):
        loader = Loader(order, manifest, stop=STOP)
        taken = list(itertools.islice(DataLoader(loader, batch_size=None, num_workers=workers), k))
        check(taken, truth, stop=k)
        state = json.loads(json.dumps(loader.state_dict(k)))
        resumed = Loader(order, manifest, stop=STOP)
        resumed.load_state_dict(state)
        check(DataLoader(resumed, batch_size=None, num_workers=workers), truth, first=k)


def test_state_follows_the_iterator(manifest, order, truth):
    loader = Loader(order, manifest, step=2, stop=STOP)
    assert loader.state_dict()['step'] == 2
    for b in loader: assert loader.state_dict()['step'] == b.step + 1
    check(loader, truth, first=2)  # a new iterator begins where the loader was told to


@needs_torchdata
@pytest.mark.parametrize('workers', range(5))
def test_resume_at_every_step_with_stateful_dataloader(manifest, order, truth, workers):
    from torchdata.stateful_dataloader import StatefulDataLoader
    make = lambda: StatefulDataLoader(Loader(order, manifest, stop=STOP), batch_size=None, num_workers=workers)
    for k in points(order, workers):
        loader = make()
        check(itertools.islice(loader, k), truth, stop=k)
        state = pickle.loads(pickle.dumps(loader.state_dict()))
        resumed = make()
        resumed.load_state_dict(state)
        rest = list(itertools.islice(resumed, 3))
        check(rest, truth, first=k, stop=min(k + 3, STOP))
        again = make()                                       # a resumed run is interrupted once more
        again.load_state_dict(resumed.state_dict())
        if k + 3 < STOP: check(again, truth, first=k + 3)


@needs_torchdata
def test_a_state_of_other_workers_is_refused(manifest, order):
    from torchdata.stateful_dataloader import StatefulDataLoader
    loader = StatefulDataLoader(Loader(order, manifest), batch_size=None, num_workers=2)
    next(iter(loader))
    state = loader.state_dict()['_snapshot']['_worker_snapshots']['worker_1']['dataset_state']
    alone = Loader(order, manifest)
    alone.load_state_dict(state)
    with pytest.raises(UserError, match=r'worker 1 of 2.*num_workers=2'): iter(alone)


@pytest.mark.parametrize('before,after', [(4, 2), (1, 3), (3, 1), (2, 12)])
def test_world_may_change_on_resume(manifest, order, truth, before, after):
    k = 4
    loaders = [Loader(order, manifest, r, before, stop=k) for r in range(before)]
    seen = [torch.cat([b.tokens for b in parts]) for parts in zip(*loaders, strict=True)]
    state = loaders[-1].state_dict()
    resumed = [Loader(order, manifest, r, after, stop=STOP) for r in range(after)]
    for loader in resumed: loader.load_state_dict(state)
    seen += [torch.cat([b.tokens for b in parts]) for parts in zip(*resumed, strict=True)]
    assert len(seen) == STOP
    for step, tokens in enumerate(seen): np.testing.assert_array_equal(tokens.numpy(), truth[step])


def test_an_epoch_reads_every_row_once(manifest):
    "Through worker processes, to the token: no repeat, no gap."
    order = ContiguousOrder(manifest, 12, 16)
    rows = sum(s.tokens // 17 for s in manifest.shards)
    loader = DataLoader(Loader(order, manifest, stop=rows // 12), batch_size=None, num_workers=3)
    tokens = torch.cat([b.tokens.flatten() for b in loader]).numpy()
    assert len(np.unique(tokens)) == len(tokens) == rows // 12 * 12 * 17


def test_an_order_that_ends(manifest):
    "All of its steps are served, and the first beyond says why there is none."
    order = InterleavedOrder(manifest, 12, 16, max_epochs=1)
    loader = Loader(order, manifest)
    assert [loader.batch(s).step for s in range(order.end)] == list(range(order.end))
    with pytest.raises(UserError) as e: loader.batch(order.end)
    assert str(e.value) == order.end_why
    with pytest.raises(UserError): Loader(order, manifest, step=order.end + 1)


def test_resume_needs_the_same_data_and_order(manifest, tmp_path):
    state = Loader(ContiguousOrder(manifest, 12, 16), manifest).state_dict(5)
    def refused(order, m=manifest):
        with pytest.raises(UserError) as e: Loader(order, m).load_state_dict(state)
        return str(e.value)
    assert 'batch_size: saved 12, now 6' in refused(ContiguousOrder(manifest, 6, 16))
    assert 'data_seed: saved 0, now 1' in refused(ContiguousOrder(manifest, 12, 16, data_seed=1))
    assert "saved" in refused(RoundRobinOrder(manifest, 12, 16))
    assert 'saved' in refused(switch(ContiguousOrder(manifest, 12, 16), 3, InterleavedOrder(manifest, 12, 16)))
    write_shard(tmp_path / 'a' / '0.u16.zst', np.arange(3000, dtype=np.uint16))
    other = build_manifest(tmp_path, 'bytes', 30000, None)
    text = refused(ContiguousOrder(other, 12, 16), other)
    assert '6 shards then, 1 now' in text and manifest.hash[:12] in text and other.hash[:12] in text and '\n' not in text
    without = {k: v for k, v in state.items() if k != 'shards'}
    Loader(ContiguousOrder(manifest, 12, 16), manifest).load_state_dict(without)     # a state of before these marks
    for bad in ({k: v for k, v in state.items() if k != 'order'}, None, [], state | dict(step='x'), state | dict(step=-1), state | dict(worker=2, workers=2), state | dict(order=3), state | dict(step=True)):
        with pytest.raises(UserError, match=r'not the state of a loader|saved 3') as e: Loader(ContiguousOrder(manifest, 12, 16), manifest).load_state_dict(bad)
        assert '\n' not in str(e.value)


def test_a_resume_against_changed_content_names_the_shard(tmp_path):
    def corpus(**shards):
        for name, x in shards.items(): write_shard(tmp_path / name[0] / f'{name}.u16.zst', np.asarray(x, np.uint16))
        return build_manifest(tmp_path, 'bytes', 30000, None)
    x = np.arange(2000)
    m = corpus(a0=x, a1=x + 1, b0=x + 2)
    order = InterleavedOrder(m, 12, 16)
    saved = json.loads(json.dumps(order.state(7)))
    assert order.check_state(saved) == 7
    def refused(m, state=saved):
        with pytest.raises(UserError) as e: InterleavedOrder(m, 12, 16).check_state(state)
        also = {k: v for k, v in Loader(order, m).state_dict(7).items() if k in state or k in ('worker', 'workers')}
        with pytest.raises(UserError) as f: Loader(InterleavedOrder(m, 12, 16), m).load_state_dict(also)
        assert str(e.value).split(': ', 1)[1].split(';')[0] in str(f.value)
        return str(e.value)
    assert 'a/a1.u16.zst is not what it was (' in refused(corpus(a1=x + 3))
    assert 'a/a1.u16.zst is not what it was, nor are 1 more' in refused(corpus(b0=x[::-1]))
    corpus(a1=x + 1, b0=x + 2)
    assert '3 shards then, 4 now; a/a00.u16.zst is not what it was (' in refused(corpus(a00=x))
    (tmp_path / 'a' / 'a00.u16.zst').unlink()
    (tmp_path / 'a' / 'a1.u16.zst').unlink()
    assert '3 shards then, 2 now; the shards that are there are what they were' in refused(corpus())
    m = corpus(a1=x + 1)
    assert 'tokenizer, vocab_size or eos is another' in refused(Manifest(m.root, m.shards, 'bytes', 30000, 5))
    assert 'not written down' in refused(corpus(a1=x), {k: v for k, v in saved.items() if k != 'shards'})


def test_a_token_beyond_the_vocabulary_names_shard_and_offset(manifest):
    small = Manifest(manifest.root, manifest.shards, 'bytes', 5100, None)  # shard a/1 holds 5000, 5001, ...
    order = ContiguousOrder(small, 12, 16, plan=[1])
    with pytest.raises(UserError, match=r'a/1\.u16\.zst: token 100 is 5100, the vocabulary has 5100'): Loader(order, small).batch(0)
    with pytest.raises(UserError, match='token 100 is 5100'): list(DataLoader(Loader(order, small, stop=1), batch_size=None, num_workers=1))


@pytest.mark.parametrize('rank,world,text', [(2, 2, 'rank 2 is not one of 2'), (-1, 2, 'rank -1'), (0, 5, 'does not divide'), (0, 0, '0 ranks')])
def test_ranks_that_do_not_exist(manifest, order, rank, world, text):
    with pytest.raises(UserError, match=text): Loader(order, manifest, rank, world)


def test_a_missing_shard_is_one_line(tmp_path):
    write_shard(tmp_path / 'a' / '0.u16.zst', np.arange(3000, dtype=np.uint16))
    m = build_manifest(tmp_path, 'bytes', 3000, None)
    (tmp_path / 'a' / '0.u16.zst').unlink()
    with pytest.raises(UserError, match=r'0\.u16\.zst') as e: Loader(ContiguousOrder(m, 4, 16), m).batch(0)
    assert '\n' not in str(e.value)


def test_spawned_workers(manifest):
    "Where processes are not forked everything crosses by pickle."
    loader = Loader(InterleavedOrder(manifest, 12, 16), manifest, stop=4)
    spawned = list(DataLoader(loader, batch_size=None, num_workers=2, multiprocessing_context='spawn'))
    check(spawned, [b.tokens.numpy() for b in loader], stop=4)
