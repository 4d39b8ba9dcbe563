# SPDX-License-Identifier: Apache-2.0
"""What a commit holds beside the state of the model, and named checkpoints."""
