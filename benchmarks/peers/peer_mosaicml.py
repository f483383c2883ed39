"mosaicml-streaming: MDS shards, one stream a domain; rows of a batch are drawn by proportion ('random', its default)."
import importlib
import os
import re
from pathlib import Path

import torch
from corpus import DOMAINS


def import_torchvision():
    "streaming needs it to be importable; a build of it for CUDA beside a CPU build of torch lacks its own operators: declare them."
    while True:
        try: return importlib.import_module('torchvision')
        except RuntimeError as e:
            if not (missing := re.search(r'operator (torchvision::\w+) does not exist', str(e))): raise
            torch.library.define(missing[1], '(Tensor dets, Tensor scores, float threshold) -> Tensor')


import_torchvision()
from streaming import MDSWriter, StreamingDataLoader, StreamingDataset  # noqa: E402
from streaming import Stream as Part  # noqa: E402
from streaming.base.util import clean_stale_shared_memory  # noqa: E402

METHOD = 'random'


def prepare(corpus, folder: Path):
    for domain in DOMAINS:
        with MDSWriter(out=str(folder / domain), columns={'tokens': f'ndarray:uint16:{corpus.length}'}) as out:
            for row in corpus.rows(domain): out.write({'tokens': row})


class Stream:
    def __init__(self, corpus, folder, workers=0, rank=0, world=1):
        if world > 1: raise NotImplementedError('ranks come from torch.distributed only')
        os.environ.update(RANK='0', WORLD_SIZE='1', LOCAL_RANK='0', LOCAL_WORLD_SIZE='1', MASTER_ADDR='127.0.0.1', MASTER_PORT='0')
        clean_stale_shared_memory()
        ds = StreamingDataset(streams=[Part(local=str(folder / d), proportion=w) for d, w in DOMAINS.items()], batch_size=corpus.batch,
                              shuffle=True, shuffle_seed=corpus.seed, batching_method=METHOD, num_canonical_nodes=1)
        self.loader = StreamingDataLoader(ds, batch_size=corpus.batch, num_workers=workers)

    def __iter__(self):
        for batch in self.loader: yield batch['tokens'].to(torch.int64).numpy()

    def state(self): return self.loader.state_dict()
    def load(self, state): self.loader.load_state_dict(state)
