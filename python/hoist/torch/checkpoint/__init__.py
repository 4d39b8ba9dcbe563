# SPDX-License-Identifier: Apache-2.0
"""The parts of a commit beside the state of the model, and named checkpoints."""
