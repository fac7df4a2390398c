"""Trains a small language model by the Trainer of transformers, which resumes where it was."""

# ruff: noqa: T201 - it tells what it does
import hashlib
import os
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

directory, steps = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        attention_dropout=0.1,
    )
)


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        words = torch.randint(64, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": words, "labels": words}


class Teller(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        print("step", state.global_step, flush=True)


arguments = TrainingArguments(
    directory,
    max_steps=steps,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    learning_rate=1e-2,
    save_steps=2,
    save_total_limit=2,
    logging_steps=1,
    use_cpu=True,
    ddp_backend="gloo" if "RANK" in os.environ else None,
    report_to=[],
    disable_tqdm=True,
)
trainer = Trainer(model, arguments, train_dataset=Data(), callbacks=[Teller()])
trainer.train(resume_from_checkpoint=os.path.isdir(directory) and get_last_checkpoint(directory))
state = model.state_dict() | {
    f"{number}.{name}": value
    for number, moments in trainer.optimizer.state_dict()["state"].items()
    for name, value in moments.items()
}
losses = [entry.get("loss") for entry in trainer.state.log_history if "loss" in entry]
data = b"".join(state[name].numpy().tobytes() for name in sorted(state)) + repr(losses).encode()
print("digest", hashlib.sha256(data).hexdigest(), flush=True)
