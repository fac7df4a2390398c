"""Keras on JAX: all that a model remembers is one tree. Run it twice: it goes on where it was.

    python examples/keras_jax.py checkpoint --steps 20

`get_state_tree` gives the weights, the optimizer and the counters of a compiled model; `set_state_tree` takes
them back.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

os.environ["KERAS_BACKEND"] = "jax"

import keras
import numpy as np

import waystation


def make_model() -> keras.Model:
    keras.utils.set_random_seed(0)
    layers = [keras.Input((8,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(8)]
    model = keras.Sequential(layers)
    model.compile(optimizer=keras.optimizers.AdamW(1e-2), loss="mse")
    model.optimizer.build(model.trainable_variables)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a Keras model, and resumes when run again.")
    parser.add_argument("path", type=Path, help="the checkpoint")
    parser.add_argument("--steps", type=int, default=20, help="last step (default 20)")
    arguments = parser.parse_args()
    model = make_model()
    if waystation.is_checkpoint(arguments.path):
        model.set_state_tree(waystation.load(arguments.path, model.get_state_tree()))
    for step in range(int(model.optimizer.iterations) + 1, arguments.steps + 1):
        numbers = np.random.default_rng(step).uniform(size=(64, 8)).astype(np.float32)
        loss = model.train_on_batch(numbers, np.sort(numbers))
        print(f"step {step} loss {float(loss):.9f}")
    waystation.save(arguments.path, model.get_state_tree(), overwrite=True)


if __name__ == "__main__":
    main()
