"megatron-core: its IndexedDataset and its C++ blending index, the rows of each domain shuffled as GPTDataset does; one process."
from pathlib import Path

import numpy as np
import torch
from corpus import DOMAINS
from megatron.core.datasets import helpers_cpp
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder


def prepare(corpus, folder: Path):
    folder.mkdir(parents=True, exist_ok=True)
    for domain in DOMAINS:
        out = IndexedDatasetBuilder(f'{folder}/{domain}.bin', dtype=DType.optimal_dtype(60_000))
        for row in corpus.rows(domain):
            out.add_item(torch.from_numpy(row.astype(np.int32)))
            out.end_document()
        out.finalize(f'{folder}/{domain}.idx')


def mix(weights, places):
    size, w = int(places.max()) + 1, np.array(list(weights.values()))
    which, index = np.zeros(size, np.int16), np.zeros(size, np.int64)
    helpers_cpp.build_blending_indices(which, index, w / w.sum(), len(w), size, False)
    return which[places], index[places]


class Stream:
    def __init__(self, corpus, folder, workers=0, rank=0, world=1):
        if workers: raise NotImplementedError('measured in one process')
        size = corpus.batch * (corpus.steps + 40)
        self.parts = [IndexedDataset(f'{folder}/{d}') for d in DOMAINS]
        self.which, self.index = np.zeros(size, np.int16), np.zeros(size, np.int64)
        helpers_cpp.build_blending_indices(self.which, self.index, np.array(list(DOMAINS.values())), len(DOMAINS), size, False)
        rng = np.random.RandomState(corpus.seed)
        self.shuffle = [rng.permutation(len(p)) for p in self.parts]
        self.corpus, self.rank, self.world, self.consumed = corpus, rank, world, 0

    def __iter__(self):
        each = self.corpus.batch // self.world
        while self.consumed + self.corpus.batch <= len(self.which):
            first = self.consumed + self.rank * each
            self.consumed += self.corpus.batch
            yield np.stack([self.parts[w][self.shuffle[w][i % len(self.shuffle[w])]] for w, i in
                            zip(self.which[first:first + each].tolist(), self.index[first:first + each].tolist(), strict=True)]).astype(np.int64)

    def state(self): return self.consumed
    def load(self, state): self.consumed = state
