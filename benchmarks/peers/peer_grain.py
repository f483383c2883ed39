"grain: shuffled sources, mixed; random access underneath."
import grain
import numpy as np
from corpus import DOMAINS


class Rows:
    "A random access source, as grain wants it."
    def __init__(self, corpus, domain): self.corpus, self.domain, self.rows = corpus, domain, corpus.rows(domain)
    def __len__(self): return len(self.rows)
    def __getitem__(self, i): return np.array(self.rows[i])
    def __repr__(self): return f'Rows({self.domain})'
    def __reduce__(self): return Rows, (self.corpus, self.domain)


def prepare(corpus, folder): pass  # reads the flat files as they are


def mix(weights, places):
    parts = [grain.MapDataset.range(10**8).map(lambda i, k=k: (k, i)) for k in range(len(weights))]
    ds = grain.MapDataset.mix(parts, list(weights.values()))
    return zip(*(ds[int(i)] for i in places), strict=True)


class Stream:
    def __init__(self, corpus, folder, workers=0, rank=0, world=1):
        sources = [grain.MapDataset.source(Rows(corpus, d)).shuffle(seed=corpus.seed + k) for k, d in enumerate(DOMAINS)]
        ds = grain.MapDataset.mix(sources, list(DOMAINS.values()))
        ds = ds[rank::world].batch(corpus.batch // world)
        ds = ds.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
        if workers: ds = ds.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers))
        self.iterator = iter(ds)

    def __iter__(self):
        for batch in self.iterator: yield batch.astype(np.int64)

    def state(self): return self.iterator.get_state()
    def load(self, state): self.iterator.set_state(state)
