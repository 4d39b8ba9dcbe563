# SPDX-License-Identifier: Apache-2.0
"""Ranks that torch.distributed started: which of them divide a state, and how the engine exchanges data with them."""
