# SPDX-License-Identifier: Apache-2.0
"""Models of transformers: read when they are wrapped, and written as save_pretrained() does."""
