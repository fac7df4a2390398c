"""Trains a model of Keras on JAX with `fit`, whose callback saves by Orbax after each batch."""

# ruff: noqa: T201 - it tells what it does
import hashlib
import os
import sys

os.environ["KERAS_BACKEND"] = "jax"

import keras
import numpy as np

directory, steps = sys.argv[1], int(sys.argv[2])
keras.utils.set_random_seed(0)
model = keras.Sequential(
    [keras.Input((8,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(8)]
)
model.compile(optimizer=keras.optimizers.AdamW(1e-2), loss="mse")
model.optimizer.build(model.trainable_variables)
numbers = np.random.default_rng(1).uniform(size=(32, 8)).astype(np.float32)
saves = keras.callbacks.OrbaxCheckpoint(directory, max_to_keep=2)
tell = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: print("step", epoch, flush=True))
if any(name.isdigit() for name in os.listdir(directory)):
    model.load_weights(directory)
start = int(model.optimizer.iterations) // 2
model.fit(
    *(numbers, np.sort(numbers)),
    batch_size=16,
    epochs=steps,
    initial_epoch=start,
    shuffle=False,
    callbacks=[saves, tell],
    verbose=0,
)
data = b"".join(np.asarray(variable).tobytes() for variable in model.variables + model.optimizer.variables)
print("digest", hashlib.sha256(data).hexdigest(), flush=True)
