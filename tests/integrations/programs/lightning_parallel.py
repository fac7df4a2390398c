"""Trains a module that Lightning's `ModelParallelStrategy` shards by FSDP2; Lightning itself calls DCP."""

# ruff: noqa: T201 - it tells what it does
import hashlib
import sys

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torchdata.stateful_dataloader import StatefulDataLoader

directory, steps = sys.argv[1], int(sys.argv[2])


class Sorter(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))

    def configure_model(self):
        fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch):
        print("step", self.global_step, flush=True)
        return torch.nn.functional.mse_loss(self.model(batch[0]), batch[0].sort().values)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


pl.seed_everything(0, verbose=False)
numbers = torch.utils.data.TensorDataset(torch.randn(40, 8))
trainer = pl.Trainer(
    max_steps=steps,
    accelerator="cpu",
    devices=2,
    strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
    callbacks=[ModelCheckpoint(directory, every_n_train_steps=2, save_last=True)],
    use_distributed_sampler=False,
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
module = Sorter()
trainer.fit(module, StatefulDataLoader(numbers, batch_size=4), ckpt_path="last")
data = b"".join(value.full_tensor().numpy().tobytes() for value in module.state_dict().values())
print("digest", hashlib.sha256(data).hexdigest(), flush=True)
