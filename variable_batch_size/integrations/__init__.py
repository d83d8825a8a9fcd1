"""The trainers that people already use: one module for each, imported by its name.

`from variable_batch_size.integrations.transformers import VariableBatchTrainer`, for example. Each needs its framework,
which the extra of the same name installs: `pip install 'variable_batch_size[transformers]'`.
"""
