"Hugging Face datasets: streamed parquet, a shuffle buffer a domain, interleaved by probability."
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from corpus import DOMAINS
from datasets import interleave_datasets, load_dataset
from torchdata.stateful_dataloader import StatefulDataLoader

FILES = 4  # of each domain: no more workers than this can read


def prepare(corpus, folder: Path):
    for domain in DOMAINS:
        rows = corpus.rows(domain)
        for i, part in enumerate(np.array_split(np.arange(len(rows)), FILES)):
            values = pa.array(np.ascontiguousarray(rows[part[0]:part[-1] + 1]).reshape(-1))
            table = pa.table({'tokens': pa.FixedSizeListArray.from_arrays(values, corpus.length)})
            (folder / domain).mkdir(parents=True, exist_ok=True)
            pq.write_table(table, folder / domain / f'{i}.parquet', row_group_size=1000)


class Stream:
    def __init__(self, corpus, folder, workers=0, rank=0, world=1):
        if world > 1: raise NotImplementedError('a state is tied to the number of ranks and workers')
        parts = [load_dataset('parquet', data_files=[str(p) for p in sorted((folder / d).glob('*.parquet'))], split='train', streaming=True,
                              cache_dir=str(folder / 'cache')).shuffle(seed=corpus.seed + k, buffer_size=1000) for k, d in enumerate(DOMAINS)]
        ds = interleave_datasets(parts, probabilities=list(DOMAINS.values()), seed=corpus.seed, stopping_strategy='first_exhausted')
        self.loader = StatefulDataLoader(ds.with_format('numpy'), batch_size=corpus.batch, num_workers=workers,
                                         collate_fn=lambda rows: np.stack([r['tokens'] for r in rows]))

    def __iter__(self):
        for batch in self.loader: yield batch.astype(np.int64)

    def state(self): return self.loader.state_dict()
    def load(self, state): self.loader.load_state_dict(state)
