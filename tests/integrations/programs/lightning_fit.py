"""Trains a module of Lightning on a stateful loader; `ModelCheckpoint` keeps the best steps and the last."""

# ruff: noqa: T201 - it tells what it does
import hashlib
import sys

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback, ModelCheckpoint
from torchdata.stateful_dataloader import StatefulDataLoader

directory, steps = sys.argv[1], int(sys.argv[2])


class Sorter(pl.LightningModule):
    def __init__(self, width):
        super().__init__()
        self.save_hyperparameters()
        self.model = torch.nn.Sequential(
            torch.nn.Linear(8, width), torch.nn.Dropout(0.1), torch.nn.ReLU(), torch.nn.Linear(width, 8)
        )

    def training_step(self, batch):
        loss = torch.nn.functional.mse_loss(self.model(batch[0]), batch[0].sort().values)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]

    def on_train_batch_start(self, batch, number):
        torch.manual_seed(self.global_step)  # dropout; Lightning keeps no generators


class Teller(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, number):
        print("step", trainer.global_step, flush=True)


pl.seed_everything(0, verbose=False)
numbers = torch.utils.data.TensorDataset(torch.randn(20, 8))
data = StatefulDataLoader(numbers, batch_size=4, shuffle=True)
keep = ModelCheckpoint(directory, monitor="loss", save_top_k=2, every_n_train_steps=2, save_last=True)
trainer = pl.Trainer(
    max_steps=steps,
    accelerator="cpu",
    devices=1,
    callbacks=[keep, Teller()],
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
module = Sorter(32)
trainer.fit(module, data, ckpt_path="last")
state = module.state_dict() | {
    f"{number}.{name}": value
    for number, moments in trainer.optimizers[0].state_dict()["state"].items()
    for name, value in moments.items()
}
data = b"".join(state[name].numpy().tobytes() for name in sorted(state))
print("digest", hashlib.sha256(data).hexdigest(), flush=True)
