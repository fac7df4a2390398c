"""The functions for Accelerate: what they find of an `Accelerator`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from waystation.errors import Unsupported


@pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed")
@pytest.mark.parametrize("kind", ["models", "optimizers", "schedulers", "dataloaders", "custom_objects"])
@pytest.mark.share(5)
def test_what_another_release_keeps_elsewhere_is_not_left_out(kind: str, tmp_path: Path) -> None:
    # Within, as the import takes each process of the tests seconds.
    import accelerate

    from waystation.integrations.accelerate import save_state

    accelerator: Any = accelerate.Accelerator(cpu=True)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters())
    accelerator.prepare(model, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer))
    save_state(accelerator, tmp_path / "whole")
    setattr(accelerator, f"_kept_{kind}", getattr(accelerator, f"_{kind}"))
    delattr(accelerator, f"_{kind}")
    with pytest.raises(Unsupported, match=rf"accelerate 1\..*Accelerator\._{kind}"):
        save_state(accelerator, tmp_path / "lacking")
    assert not (tmp_path / "lacking").exists()
