# SPDX-License-Identifier: Apache-2.0
"""The model as hoist has it: its units, the tensors of their parameters, and the values that those begin with."""
