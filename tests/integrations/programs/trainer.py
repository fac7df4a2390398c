"""Trains a small language model by the Trainer of transformers, which resumes where it was.

A third argument has the model sharded by FSDP2: `fsdp` by the Trainer's own option, `loading` as transformers
shards a model that it loads.
"""

# ruff: noqa: T201 - it tells what it does
import hashlib
import os
import sys

import torch
from accelerate import DistributedType, PartialState
from accelerate.utils import FullyShardedDataParallelPlugin
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments
from transformers import Trainer as GenuineTrainer
from transformers.distributed import DistributedConfig
from transformers.trainer_utils import get_last_checkpoint

directory, steps = sys.argv[1], int(sys.argv[2])
sharded = sys.argv[3] if len(sys.argv) > 3 else None
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
if sharded == "loading":
    start = os.path.join(directory, f"start-{os.environ['RANK']}")
    model.save_pretrained(start)
    processes = DistributedConfig(fsdp_size=int(os.environ["WORLD_SIZE"]))
    model = LlamaForCausalLM.from_pretrained(start, distributed_config=processes, attn_implementation="eager")


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        words = torch.randint(64, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": words, "labels": words}


class Teller(TrainerCallback):
    def on_step_begin(self, args, state, control, model, **kwargs):
        is_sharded = sharded == "fsdp" or (sharded and args.world_size > 1)
        assert not is_sharded or all(isinstance(parameter, DTensor) for parameter in model.parameters())
        print("step", state.global_step, digest(), flush=True)


class Trainer(GenuineTrainer):
    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        if self.args.fsdp and not self.is_fsdp_enabled:
            # On CPUs Accelerate passes over the plugin without a word, and would train by DDP.
            for state in (PartialState(), self.accelerator.state):
                state.distributed_type = DistributedType.FSDP
                state.fsdp_plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
            self.is_fsdp_enabled = True


def digest():
    """What tells the parameters, moments and losses from others, whatever devices hold them."""
    tensors = trainer.model.state_dict() | {
        f"{number}.{name}": value
        for number, moments in trainer.optimizer.state_dict()["state"].items()
        for name, value in moments.items()
    }
    losses = [entry.get("loss") for entry in trainer.state.log_history if "loss" in entry]
    found = hashlib.sha256(repr(losses).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        found.update(whole.numpy().tobytes())
    return found.hexdigest()


arguments = TrainingArguments(
    directory,
    max_steps=steps,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    learning_rate=1e-2,
    save_steps=2,
    save_total_limit=2,
    logging_steps=1,
    fsdp=sharded == "fsdp",
    fsdp_config={"state_dict_type": "SHARDED_STATE_DICT"} if sharded == "fsdp" else None,
    save_only_model=sharded == "loading",  # of such a model the Trainer itself saves no more
    use_cpu=True,
    ddp_backend="gloo" if "RANK" in os.environ else None,
    report_to=[],
    disable_tqdm=True,
)
trainer = Trainer(model, arguments, train_dataset=Data(), callbacks=[Teller()])
trainer.train(resume_from_checkpoint=os.path.isdir(directory) and get_last_checkpoint(directory))
print("digest", digest(), flush=True)
