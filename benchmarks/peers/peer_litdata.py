"litdata: token chunks of each domain, shuffled, combined by weight."
from pathlib import Path

import numpy as np
import torch
from corpus import DOMAINS
from litdata import CombinedStreamingDataset, StreamingDataLoader, StreamingDataset, TokensLoader, optimize


def _piece(job):
    path, start, stop = job
    yield torch.from_numpy(np.memmap(path, np.uint16, 'r')[start:stop].astype(np.int32)).to(torch.uint16)


def prepare(corpus, folder: Path):
    for domain in DOMAINS:
        per = 1 << 20
        jobs = [(f'{corpus.root}/{domain}.u16', a, min(a + per, corpus.tokens)) for a in range(0, corpus.tokens, per)]
        optimize(_piece, jobs, str(folder / domain), chunk_size=corpus.length * 512, item_loader=TokensLoader(block_size=corpus.length),
                 num_workers=1, start_method='fork')


class Stream:
    def __init__(self, corpus, folder, workers=0, rank=0, world=1):
        if world > 1: raise NotImplementedError('ranks come from torch.distributed only')
        parts = [StreamingDataset(str(folder / d), item_loader=TokensLoader(block_size=corpus.length), shuffle=True, drop_last=True,
                                  seed=corpus.seed) for d in DOMAINS]
        ds = CombinedStreamingDataset(parts, seed=corpus.seed, weights=list(DOMAINS.values()), iterate_over_all=False)
        self.loader = StreamingDataLoader(ds, batch_size=corpus.batch, num_workers=workers)

    def __iter__(self):
        for batch in self.loader: yield batch.to(torch.int64).numpy()

    def state(self): return self.loader.state_dict()
    def load(self, state): self.loader.load_state_dict(state)
