"""An ordinary Keras script whose batch size follows a trace: one line is new, beside its import.

KERAS_BACKEND=torch python examples/trainers/keras_digits.py
"""

from __future__ import annotations

import os

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np

from variable_batch_size.integrations.keras import VariableBatchModel

keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
patterns = rng.normal(size=(10, 14, 14, 1))
y = rng.integers(10, size=2000)
x = (patterns[y] + rng.normal(size=(2000, 14, 14, 1))).astype("float32")

model = keras.Sequential(
    [
        keras.Input((14, 14, 1)),
        keras.layers.Conv2D(8, 3, activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Flatten(),
        keras.layers.Dropout(0.2),
        keras.layers.Dense(10, activation="softmax"),
    ]
)
model = VariableBatchModel(model, trace="0:32 20:128 40:256", rule="root", ref_batchsize=32)  # the new line
model.compile(optimizer=keras.optimizers.Adam(1e-3), loss="sparse_categorical_crossentropy", metrics=["accuracy"])
history = model.fit(x, y, batch_size=32, epochs=4, validation_split=0.2, verbose=2)

print(f"{int(model.optimizer.iterations)} updates, accuracy {history.history['val_accuracy'][-1]:.2f}")
